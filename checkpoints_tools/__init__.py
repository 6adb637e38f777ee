"""Convert, reshard, inspect and compare checkpoints: bytes are moved from file to file, no model is built."""

from checkpoints_tools.conversion import Conversion, Settings
from checkpoints_tools.inspection import Inspection, inspect_checkpoint
from checkpoints_tools.resharding import reshard
from checkpoints_tools.to_hf import to_hf
from checkpoints_tools.to_megatron import to_megatron
from checkpoints_tools.verification import Verification, verify

__all__ = [
    "Conversion",
    "Inspection",
    "Settings",
    "Verification",
    "inspect_checkpoint",
    "reshard",
    "to_hf",
    "to_megatron",
    "verify",
]
