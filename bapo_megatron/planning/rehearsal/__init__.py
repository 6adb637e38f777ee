"""Rehearsal: dry run of a rank at real shapes on fake tensors, without GPU, weights, arithmetic or peers.

``job.rehearse_job`` is its entry; every rank runs in a process of its own, where torch stays
patched.
"""
