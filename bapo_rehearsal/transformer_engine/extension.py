"""Stand-in module for ``transformer_engine_torch``, the compiled part of Transformer Engine; its registry.

``kernel`` registers the torch version of a compiled kernel (``layers.py``, ``attention.py``), which allocates
exactly the tensors that the compiled one returns or keeps, then computes them if its inputs have values
(under FakeTensorMode they have none). ``make_extension`` returns the module. Counter and observers are global
to the process. A function without a stand-in raises NotImplementedError.
"""

from __future__ import annotations

import enum
import types
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_TYPES = {0: torch.uint8, 1: torch.int32, 2: torch.float32, 3: torch.float16, 4: torch.bfloat16}
"""torch dtypes by the numbers of Transformer Engine's ``DType``."""
KERNELS: dict[str, Callable[..., Any]] = {}
"""Kernels by their names in the compiled module."""

calls: Counter[str] = Counter()
"""Calls of each kernel in this process."""

observers: list[Callable[[str, tuple[Any, ...], dict[str, Any]], None]] = []
"""Callbacks that get a kernel's name and arguments before it runs, for example to count FLOPs."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds a function to ``KERNELS``, counts its calls and notifies the observers."""
    name = function.__name__

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        for observe in observers:
            observe(name, arguments, named)
        return function(*arguments, **named)

    KERNELS[name] = call
    return call


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values: it is neither fake nor on the meta device."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def torch_type(number: int) -> torch.dtype:
    """torch dtype of a number of Transformer Engine's ``DType``."""
    return _TYPES[int(number)]


MaskType = enum.IntEnum(
    "MaskType",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    start=0,
)
"""Attention masks by Transformer Engine's numbers."""


def make_extension() -> types.ModuleType:
    """Module with ``KERNELS``, the enumerations, and the versions of CUDA's libraries.

    Any other name is an enumeration or a function that raises when called.
    """
    module = StandIn("transformer_engine_torch")
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
    for name, value in {**known, **KERNELS}.items():
        setattr(module, name, value)
    return module


def _enumeration(name: str, *members: str) -> type[enum.IntEnum]:
    names = [member for part in members for member in part.split()]
    return enum.IntEnum(name, names, start=0)  # type: ignore[return-value]


class StandIn(types.ModuleType):
    """Module whose missing attributes are enumerations, or functions that raise."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Enumeration(name, (), {}) if name[0].isupper() else _missing(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def _missing(name: str) -> Callable[..., Any]:
    def call(*_arguments: Any, **_named: Any) -> Any:
        raise NotImplementedError(f"{name} has no stand-in in bapo_rehearsal/transformer_engine")

    call.__name__ = name
    return call


class _Enumeration(type):
    """Enumeration that numbers its members on first access: only their identity matters."""

    def __getattr__(cls, name: str) -> Any:
        members = {key: value for key, value in vars(cls).items() if isinstance(value, int)}
        if name == "__members__":
            return members
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(members))
        return len(members)
