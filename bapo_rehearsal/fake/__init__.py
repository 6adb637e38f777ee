"""Fake torch backend of a rehearsal: fake tensors, a fake GPU, fake process groups, and the meter.

The meter sees every kernel call of a rank and records allocations, collectives, FLOPs and host waits.
"""
