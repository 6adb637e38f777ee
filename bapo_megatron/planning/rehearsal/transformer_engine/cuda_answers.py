"""Answers of torch.cuda for Transformer Engine's Python code over CPU tensors, as if there were a GPU.

Patches of the whole process: ``is_available`` and ``is_cuda`` say yes to Transformer Engine's modules alone;
properties, streams, events and ``Tensor.cuda`` are fake for every caller. ``installation.py`` applies them
with ``answer_cuda``, as tests do; a rehearsal has answers of its own (``fake/cuda_device.py``).
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import torch


def answer_queries(architecture: tuple[int, int]) -> None:
    """Patch torch.cuda for Transformer Engine's modules: a GPU of ``architecture``, a compute capability."""
    answer_architecture(architecture)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.Stream = torch.cuda.Event = _SynchronousStream  # type: ignore[misc,assignment]
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    available, on_gpu = torch.cuda.is_available, torch.Tensor.is_cuda
    torch.cuda.is_available = lambda: _asked_by_transformer_engine() or available()
    torch.Tensor.is_cuda = property(  # type: ignore[assignment,method-assign]
        lambda self: _asked_by_transformer_engine() or on_gpu.__get__(self)  # type: ignore[attr-defined]
    )
    torch.Tensor.cuda = lambda self, *_args, **_named: self  # type: ignore[method-assign]


def answer_architecture(architecture: tuple[int, int]) -> None:
    """Patch the GPU's properties for every caller: this compute capability."""
    major, minor = architecture
    properties = types.SimpleNamespace(
        major=major, minor=minor, name="stand-in", multi_processor_count=132, total_memory=80 << 30
    )
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment,return-value]
    torch.cuda.get_device_capability = lambda *_: architecture  # type: ignore[assignment]


def _asked_by_transformer_engine() -> bool:
    """Whether the caller of the function that calls this is one of Transformer Engine's modules."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("transformer_engine")


class _SynchronousStream:
    """Fake CUDA stream or event of a device that is synchronous: every method does nothing."""

    def __init__(self, *_arguments: Any, **_named: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_named: None


def wait_once_for_messages() -> None:
    """Make ``wait`` of the ring's requests idempotent: the ring waits twice, and gloo hangs then."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    communicate = context_parallel.flash_attn_p2p_communicate
    context_parallel.flash_attn_p2p_communicate = lambda *arguments: [
        _IdempotentWait(request) for request in communicate(*arguments)
    ]


class _IdempotentWait:
    """A request of torch.distributed whose ``wait`` returns at once from the second time on."""

    def __init__(self, request: Any) -> None:
        self._request: Any | None = request

    def wait(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.wait()
