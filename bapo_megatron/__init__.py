"""BAPO: balanced policy optimization with adaptive clipping, on megatron-core and SGLang."""

__version__ = "0.1.0"
