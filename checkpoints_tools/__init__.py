"""Checkpoint tools: convert, reshard, inspect, compare, without building a model.

The Python API of ``bapo-ckpt``. Bytes move from file to file; it needs no GPU and no process group.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkpoints_tools.conversion import Conversion, Settings
from checkpoints_tools.to_hf import to_hf
from checkpoints_tools.to_megatron import to_megatron

if TYPE_CHECKING:
    from checkpoints_tools.file_digests import FileCheck, verify_files
    from checkpoints_tools.inspection import Inspection, inspect_checkpoint
    from checkpoints_tools.resharding import reshard
    from checkpoints_tools.verification import Verification, verify

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

_MODULES = {
    "Inspection": "inspection",
    "inspect_checkpoint": "inspection",
    "reshard": "resharding",
    "Verification": "verification",
    "verify": "verification",
    "FileCheck": "file_digests",
    "verify_files": "file_digests",
}


def __getattr__(name: str) -> Any:
    """Lazy import of a public name, so that a conversion does not load what it does not use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
