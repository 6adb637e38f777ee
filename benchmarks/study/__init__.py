"""Staleness study (`bapo study staleness`): the paper's claims on stale data, in small runs on a CPU."""
