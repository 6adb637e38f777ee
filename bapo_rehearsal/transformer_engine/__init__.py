"""Transformer Engine on a CPU: its real Python package over torch versions of its compiled kernels.

Layers, parameter names, checkpoints, the choice of attention and the ring of context parallelism are in the
Python part of Transformer Engine; the compiled part, ``transformer_engine_torch``, does the arithmetic. Here
the Python part runs as published (``te_sources.py``), and the arithmetic is torch's::

    installation.install(find_sources("2.11.0"))  # before megatron is imported

What this cannot show is in docs/gpu.md.
"""
