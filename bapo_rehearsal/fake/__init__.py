"""Fake torch backend of a rehearsal: fake tensors, a fake GPU, fake process groups, and the meter.

The meter records every kernel call, allocation and collective of a rank.
"""
