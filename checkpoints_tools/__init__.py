"""Checkpoint tools: convert, reshard, inspect, compare, without building a model.

The Python API of ``bapo-ckpt``. Bytes move from file to file; it needs no GPU and no process group.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints_tools.conversion import Conversion, Settings
    from checkpoints_tools.hf_to_megatron import reshard, to_megatron
    from checkpoints_tools.inspection import Inspection, inspect_checkpoint
    from checkpoints_tools.megatron_to_hf import to_hf
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

_MODULES = {
    **dict.fromkeys(("Conversion", "Settings"), "conversion"),
    **dict.fromkeys(("reshard", "to_megatron"), "hf_to_megatron"),
    **dict.fromkeys(("Inspection", "inspect_checkpoint"), "inspection"),
    "to_hf": "megatron_to_hf",
    **dict.fromkeys(("FileCheck", "Verification", "verify", "verify_files"), "verification"),
}
"""The module of each public name. None has the name of a module: an import of that would take its place."""


def __getattr__(name: str) -> Any:
    """Lazy import of a public name: help answers at once, and a command loads only what it uses."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
