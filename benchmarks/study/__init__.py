"""`bapo study staleness`: what the paper says of stale data, tried with small runs on a CPU."""
