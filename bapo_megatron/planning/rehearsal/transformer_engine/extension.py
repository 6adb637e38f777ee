"""Stand-in module for ``transformer_engine_torch``, the compiled part of Transformer Engine.

A function without a stand-in raises NotImplementedError when it is called. Used by
``planning/rehearsal/fake/meter.py``, ``attention.py`` and ``installation.py``.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping
from typing import Any

MaskType = enum.IntEnum(
    "MaskType",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    start=0,
)
"""Attention masks, by Transformer Engine's numbers."""


def make_extension(kernels: Mapping[str, Callable[..., Any]]) -> types.ModuleType:
    """A module with ``kernels``, the enumerations, and the versions of CUDA's libraries.

    Any other name is an enumeration, or a function that raises when it is called.
    """
    module = _Extension("transformer_engine_torch")
    known = {
        "DType": _enumeration(
            "DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
        ),
        "FP8FwdTensors": _enumeration(
            "FP8FwdTensors", *(f"GEMM{n}_{role}" for n in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT"))
        ),
        "FP8BwdTensors": _enumeration(
            "FP8BwdTensors", *(f"GRAD_{role}{n}" for n in (1, 2, 3) for role in ("OUTPUT", "INPUT"))
        ),
        "NVTE_Mask_Type": MaskType,
        "get_cudnn_version": lambda: 91300,
        "get_cublasLt_version": lambda: 130000,
        "get_num_cublas_streams": lambda: 4,
    }
    for name, value in {**known, **kernels}.items():
        setattr(module, name, value)
    return module


def _enumeration(name: str, *members: str) -> type[enum.IntEnum]:
    names = [one for part in members for one in part.split()]
    return enum.IntEnum(name, names, start=0)  # type: ignore[return-value]


class _Extension(types.ModuleType):
    """Module with default attributes: enumerations, and functions that raise."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Enumeration(name, (), {}) if name[0].isupper() else _missing(name)
        setattr(self, name, value)
        return value


def _missing(name: str) -> Callable[..., Any]:
    def call(*_arguments: Any, **_named: Any) -> Any:
        raise NotImplementedError(
            f"transformer_engine_torch.{name} has no stand-in in "
            "bapo_megatron/planning/rehearsal/transformer_engine"
        )

    call.__name__ = name
    return call


class _Enumeration(type):
    """An enumeration that numbers its members when they are first named: only their identity counts."""

    def __getattr__(cls, name: str) -> Any:
        members = {key: value for key, value in vars(cls).items() if isinstance(value, int)}
        if name == "__members__":
            return members
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(members))
        return len(members)
