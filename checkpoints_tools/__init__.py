"""Checkpoint tools: convert, reshard, inspect, compare, without building a model.

The Python API of ``bapo-ckpt``. Bytes move from file to file; it needs no GPU and no process group.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkpoints_tools.conversion import Conversion, Settings
from checkpoints_tools.to_hf import to_hf
from checkpoints_tools.to_megatron import reshard, to_megatron

if TYPE_CHECKING:
    from checkpoints_tools.inspection import Inspection, inspect_checkpoint
    from checkpoints_tools.verification import FileCheck, Verification, verify, verify_files

__all__ = [
    "Conversion",
    "FileCheck",
    "Inspection",
    "Settings",
    "Verification",
    "inspect_checkpoint",
    "reshard",
    "to_hf",
    "to_megatron",
    "verify",
    "verify_files",
]


def __getattr__(name: str) -> Any:
    """Lazy import of a public name, so that a conversion does not load what it does not use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "inspection" if "nspect" in name else "verification"
    return getattr(import_module(f"{__name__}.{module}"), name)
