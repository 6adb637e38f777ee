"""Convert, reshard, inspect and compare checkpoints: bytes are moved from file to file, no model is built."""

from checkpoints_tools.conversion import Conversion, Settings
from checkpoints_tools.to_hf import to_hf
from checkpoints_tools.to_megatron import to_megatron

__all__ = ["Conversion", "Settings", "to_hf", "to_megatron"]
