"""Fake torch backend of a rehearsal: fake tensors, a fake GPU and process groups, and the meter.

The meter records every kernel call, allocation and collective of a rank.
"""
