"""Checkpoint tools: convert, reshard, inspect and compare checkpoints without building a model.

The Python API of ``bapo-ckpt``: ``to_megatron``, ``to_hf``, ``reshard``, ``inspect_checkpoint``, ``verify``
and ``verify_files``. Bytes move from file to file, without a GPU or process group.
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
"""Module of each public name. No name equals a module's: importing that module would replace it."""


def __getattr__(name: str) -> Any:
    """Import a public name lazily: help appears immediately, and a command loads only what it uses."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
