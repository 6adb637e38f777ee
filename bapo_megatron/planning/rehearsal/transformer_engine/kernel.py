"""Registry of Transformer Engine's kernels in torch, with a call counter and observers; one for a process.

A kernel allocates the tensors that the compiled one returns or keeps, and no others; then it computes them
where there are values. Under FakeTensorMode there are none, so that what is allocated there is what a GPU
would allocate. Used in ``planning/rehearsal/`` and this folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

KERNELS: dict[str, Callable[..., Any]] = {}
"""Every kernel by the name that the compiled module gives it."""

calls: Counter[str] = Counter()
"""How often each kernel was called in this process."""

observers: list[Callable[[str, tuple[Any, ...], dict[str, Any]], None]] = []
"""Called with the name and the arguments of each kernel before it runs, for example to count FLOPs."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that enters a function in ``KERNELS``, counts its calls and reports them to the observers."""
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
    """Whether a tensor has values to compute with: it is neither fake nor on the meta device."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def torch_type(number: int) -> torch.dtype:
    """The torch dtype of a member of Transformer Engine's ``DType``."""
    return _TYPES[int(number)]


_TYPES = {0: torch.uint8, 1: torch.int32, 2: torch.float32, 3: torch.float16, 4: torch.bfloat16}
