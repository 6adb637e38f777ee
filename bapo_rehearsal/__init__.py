"""Rehearsal: dry run of a rank at real shapes on fake tensors, without GPU, weights, arithmetic or peers.

``bapo rehearse`` (``command.py``) is the command, ``job.rehearse_job`` the Python entry point. Each rank runs
in its own process, where torch stays patched. ``fake/`` stands in for CUDA; other modules stand in for the
kernels of Transformer Engine and flash-linear-attention. ``bapo_megatron`` imports it only for the command.
"""
