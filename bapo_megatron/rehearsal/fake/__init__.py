"""Fake torch backend of a rehearsal: fake tensors, a fake GPU and process groups, and the meter of all
calls."""
