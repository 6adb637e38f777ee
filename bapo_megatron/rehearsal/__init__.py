"""Rehearsal: dry run of a rank at real shapes on fake tensors, without GPU, weights, arithmetic or peers."""
