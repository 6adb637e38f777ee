"""Transformer Engine on a CPU: its real Python package over torch versions of its compiled kernels.

The Python part has the layers, parameter names, checkpoints, attention backend choice and context-parallel
ring; it runs as published (``te_sources.py``). torch does the arithmetic in place of the compiled part,
``transformer_engine_torch``. docs/gpu.md lists what this cannot show. Usage::

    installation.install(find_sources("2.11.0"))  # before megatron is imported
"""
