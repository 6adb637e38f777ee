"""Import of Transformer Engine's Python package over the stand-in for its compiled part.

Call ``install`` once per process, before megatron is imported. For tests, whose tensors are on a CPU, it
makes torch.cuda report a GPU (``answer_cuda``): ``is_available`` and ``is_cuda`` are true for Transformer
Engine's modules only; properties, streams, events and ``Tensor.cuda`` are fake for every caller. A rehearsal
has its own fake GPU (``fake/cuda_device.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from bapo_rehearsal.fake.cuda_device import Stream
from bapo_rehearsal.transformer_engine import (  # noqa: F401  each registers its kernels
    attention,
    layers,
)
from bapo_rehearsal.transformer_engine.extension import StandIn, make_extension


def answer_transformer_engine() -> None:
    """Patch torch.cuda to report a GPU of compute capability 9.0 to Transformer Engine's modules."""
    answer_architecture((9, 0))
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.Stream = torch.cuda.Event = Stream  # type: ignore[misc,assignment]
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    available, on_gpu = torch.cuda.is_available, torch.Tensor.is_cuda
    torch.cuda.is_available = lambda: _asked_by_transformer_engine() or available()
    torch.Tensor.is_cuda = property(  # type: ignore[assignment,method-assign]
        lambda self: _asked_by_transformer_engine() or on_gpu.__get__(self)  # type: ignore[attr-defined]
    )
    torch.Tensor.cuda = lambda self, *_args, **_named: self  # type: ignore[method-assign]


def answer_architecture(architecture: tuple[int, int]) -> None:
    """Patch the GPU's properties to report this compute capability to every caller."""
    major, minor = architecture
    properties = types.SimpleNamespace(
        major=major, minor=minor, name="stand-in", multi_processor_count=132, total_memory=80 << 30
    )
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment,return-value]
    torch.cuda.get_device_capability = lambda *_: architecture  # type: ignore[assignment]


def _asked_by_transformer_engine() -> bool:
    """Whether a Transformer Engine module called the calling function."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("transformer_engine")


def wait_once_for_messages() -> None:
    """Make ``wait`` of the ring's requests idempotent: the ring waits twice, which hangs on gloo."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    communicate = context_parallel.flash_attn_p2p_communicate
    context_parallel.flash_attn_p2p_communicate = lambda *arguments: [
        _IdempotentWait(request) for request in communicate(*arguments)
    ]


def make_dummy_gradients_nan() -> None:
    """Replace the placeholder for an already accumulated weight gradient with NaNs on the CPU.

    Transformer Engine's own has arbitrary values, and megatron's DDP must not add it.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and "get_dummy_wgrad" in vars(module):
            module.get_dummy_wgrad = lambda shape, dtype, zero=False: torch.full(  # type: ignore[attr-defined]
                shape, 0.0 if zero else float("nan"), dtype=dtype
            )


class _IdempotentWait:
    """torch.distributed request whose ``wait`` returns immediately from the second call on."""

    def __init__(self, request: Any) -> None:
        self._request: Any | None = request

    def wait(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.wait()


_NOT_IMPORTABLE = (
    "onnx_extensions",
    "triton",
    *(f"triton.{name}" for name in ("cross_entropy", "grouped_dbias_dscales", "mhc", "pad")),
)
"""Modules of transformer_engine.pytorch that need onnxscript or triton, and that no policy uses."""
_PERMUTATION = "transformer_engine.pytorch.triton.permutation"


def install(folder: Path, *, answer_cuda: bool = True) -> types.ModuleType:
    """Import Transformer Engine from ``folder``. Returns the stand-in for its compiled part.

    Call it once per process, before megatron is imported. With ``answer_cuda`` torch.cuda reports a GPU while
    tensors are on the CPU; a caller that makes fake CUDA tensors patches torch.cuda itself.
    """
    if "megatron.core.extensions.transformer_engine" in sys.modules:
        raise RuntimeError("megatron is imported already, and has found no Transformer Engine")
    extension = make_extension()
    sys.path.insert(0, str(folder))
    sys.modules["transformer_engine_torch"] = extension
    for name in _NOT_IMPORTABLE:
        full_name = f"transformer_engine.pytorch.{name}"
        sys.modules[full_name] = StandIn(full_name)
    _replace_permutation()
    if answer_cuda:
        answer_transformer_engine()
    common = _import_common(folder)
    package = importlib.import_module("transformer_engine")
    package.common = common  # type: ignore[attr-defined]
    importlib.import_module("transformer_engine.pytorch")  # raises the error that the package hides
    copied = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    copied.__getattr__ = lambda name: getattr(extension, name)  # type: ignore[method-assign]
    if answer_cuda:
        wait_once_for_messages()
        make_dummy_gradients_nan()
    return extension


def accept_fake_tensors() -> None:
    """Patch Transformer Engine's checks: a fake tensor counts as a tensor, an int as a CUDA device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and "canonicalize_device" in vars(module):
            plain = module.canonicalize_device
            module.canonicalize_device = lambda device, plain=plain: plain(  # type: ignore[attr-defined]
                torch.device("cuda", device) if isinstance(device, int) else device
            )
    utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    choose = utils.get_attention_backend

    def get_attention_backend(asked: Any) -> Any:
        if asked.qkv_type is FakeTensor:
            asked.qkv_type = torch.Tensor
        return choose(asked)

    utils.get_attention_backend = get_attention_backend  # type: ignore[attr-defined]


def _import_common(folder: Path) -> types.ModuleType:
    """Import ``transformer_engine.common`` in build mode: otherwise it loads CUDA's libraries."""
    name = "transformer_engine.common"
    path = folder / "transformer_engine/common"
    spec = importlib.util.spec_from_file_location(
        name, path / "__init__.py", submodule_search_locations=[str(path)]
    )
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    sys.modules[name] = common
    before = os.environ.get("NVTE_PROJECT_BUILDING")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    try:
        spec.loader.exec_module(common)
    finally:
        if before is None:
            del os.environ["NVTE_PROJECT_BUILDING"]
        else:
            os.environ["NVTE_PROJECT_BUILDING"] = before
    common.load_framework_extension = lambda _framework: None  # type: ignore[attr-defined]
    return common


def _replace_permutation() -> None:
    """Replace the permutation's triton module with the stand-ins."""
    module = types.ModuleType(_PERMUTATION)
    vars(module).update(layers.PERMUTATION)
    package, _, name = _PERMUTATION.rpartition(".")
    sys.modules[_PERMUTATION] = module
    setattr(sys.modules[package], name, module)  # ``import ... as`` reads the attribute
