"""Rehearsal: dry run of a rank at real shapes on fake tensors, without GPU, weights, arithmetic or peers.

``bapo rehearse`` (``command.py``) is its entry, ``job.rehearse_job`` in Python; every rank runs in a process
of its own, where torch stays patched. A tool beside the package, as ``checkpoints_tools`` is: it stands in
for CUDA (``fake/``), and for the kernels of Transformer Engine and flash-linear-attention. Nothing of the
package imports it.
"""
