"""Fake CUDA device: torch behaves as on a GPU, on a machine without one and with a CPU build of torch.

torch's FakeTensorMode supports ``cuda`` tensors and finds mixed devices without CUDA, but autograd asks C++
for a CUDA device guard, which a CPU build lacks. So Python sees ``cuda``, and C++ sees ``meta``, which has a
guard. ``CudaFunctions`` corrects wrong C++ decisions; ``Meter`` creates on ``cuda`` what C++ requests on
``meta``. ``install`` patches torch for the whole process, which must do nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

META, CUDA = torch.device("meta"), torch.device("cuda", 0)
_GPUS_PER_NODE = 8
_HOPPER = (9, 0)
_TYPES = {
    torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half", torch.float64: "Double",
    torch.int64: "Long", torch.int32: "Int", torch.uint8: "Byte", torch.bool: "Bool",
}  # fmt: skip


def install(on_synchronize: Callable[[], None]) -> CudaFunctions:
    """Pretend that this process has a GPU. Returns the function mode for the program.

    ``on_synchronize`` is called when the program explicitly synchronizes the device or a stream.
    """
    answer_queries(on_synchronize)
    _show_cuda_to_python()
    _patch_megatron()
    functions = CudaFunctions()
    _enter_in_backward(functions)
    return functions


def answer_queries(on_synchronize: Callable[[], None]) -> None:
    """Patch torch.cuda's queries to describe fake GPUs; ``on_synchronize`` as in ``install``."""

    def wait(*_: Any) -> None:
        on_synchronize()

    class Waiting(Stream):
        synchronize = staticmethod(wait)

    stream = Waiting()
    properties = SimpleNamespace(
        name="fake H100", major=9, minor=0, total_memory=80 * 10**9, multi_processor_count=132
    )
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": _GPUS_PER_NODE,
        "current_device": 0, "set_device": None, "current_stream": stream, "default_stream": stream,
        "set_stream": None, "empty_cache": None, "memory_allocated": 0, "max_memory_allocated": 0,
        "memory_reserved": 0, "reset_peak_memory_stats": None, "get_device_capability": _HOPPER,
        "get_device_name": properties.name, "get_device_properties": properties, "is_bf16_supported": True,
        "set_rng_state": None, "manual_seed": None, "manual_seed_all": None, "_lazy_init": None,
        "_lazy_call": None, "is_current_stream_capturing": False,
    }  # fmt: skip
    cuda: Any = torch.cuda
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_args, _answer=answer, **_kwargs: _answer)
    cuda.get_rng_state = lambda *_args, **_kwargs: torch.empty(0, dtype=torch.uint8)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.synchronize, cuda.Stream, cuda.Event = wait, Waiting, Waiting
    for name in ("stream", "device"):
        setattr(cuda, name, lambda *_args, **_kwargs: contextlib.nullcontext())
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_args: 0


class Stream:
    """Fake CUDA stream that runs nothing; also a fake event that is complete immediately."""

    cuda_stream = 0
    device = CUDA

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    wait_stream = wait_event = record = synchronize = wait

    def record_event(self, *_: Any) -> Any:
        return torch.cuda.Event()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 1.0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _show_cuda_to_python() -> None:
    """Show the device of a fake GPU tensor as ``meta`` to C++ and as ``cuda`` to Python."""
    handlers: dict[Any, Any] = fake_tensor._DISPATCH_META_HANDLERS
    plain = handlers[torch.ops.prim.device.default]

    def device(args: Any) -> torch.device:
        real: torch.device = plain(args)
        return META if real.type == "cuda" else real

    handlers[torch.ops.prim.device.default] = device
    cls: Any = FakeTensor
    cls.is_cuda = property(lambda self: self.fake_device.type == "cuda")
    cls.is_cpu = property(lambda self: self.fake_device.type == "cpu")
    cls.is_meta = property(lambda self: self.fake_mode.in_kernel_invocation)
    cls.record_stream = lambda _self, _stream: None
    # torch.cuda.is_available() is true, but torch must not copy constants to a device.
    mode: Any = fake_tensor.FakeTensorMode
    mode.avoid_device_init = property(lambda _self: True)


def _enter_in_backward(functions: CudaFunctions) -> None:
    """Keep the function mode active in backward passes, for which torch disables it."""
    autograd: Any = torch.autograd
    plain = autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with functions:
            return plain(*args, **kwargs)

    autograd._engine_run_backward = run


class CudaFunctions(TorchFunctionMode):
    """Function mode that corrects C++ decisions about tensors on the fake GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if _is_index(named.get("device")):
            named["device"] = torch.device("cuda", named["device"])
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.cuda:
            return _to(args[0], CUDA, non_blocking=bool(named.get("non_blocking")))
        if func is torch.Tensor.to:
            return _to_anywhere(args[0], *args[1:], **named)
        if func is torch.Tensor.type and len(args) == 1 and not named:
            return f"torch.{'cuda.' if args[0].is_cuda else ''}{_TYPES[args[0].dtype]}Tensor"
        if func in (torch.rms_norm, torch.nn.functional.rms_norm):
            return _rms_norm(func, *args, **named)
        return func(*args, **named)


def _is_index(device: Any) -> bool:
    return isinstance(device, int) and not isinstance(device, bool)


def _to_anywhere(tensor: Tensor, *rest: Any, **named: Any) -> Tensor:
    """``Tensor.to`` in all its signatures, through ``_to``."""
    device, dtype = named.pop("device", None), named.pop("dtype", None)
    flags = ["non_blocking", "copy"]
    for value in rest:
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            named[flags.pop(0)] = value
        elif value is not None:
            device = torch.device("cuda", value) if _is_index(value) else value
    return _to(tensor, device, dtype, **named)


def _to(tensor: Tensor, device: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """``Tensor.to`` that returns a tensor already on the device, which C++ would copy."""
    target = torch.device(device) if device is not None else tensor.device
    if target.type == "cuda":
        target = CUDA
    dtype = dtype or tensor.dtype
    if target == tensor.device and dtype == tensor.dtype and not options.get("copy"):
        return tensor
    copied: Tensor = torch.ops.aten._to_copy.default(
        tensor,
        dtype=dtype,
        device=target,
        non_blocking=bool(options.get("non_blocking")),
        memory_format=options.get("memory_format"),
    )
    return copied


def _patch_megatron() -> None:
    """Replace megatron's compiled SwiGLU, forward and backward, with the allocation of its outputs.

    Run eagerly, as on a CPU, it would allocate intermediates that a GPU never has. Also replace megatron's
    own reference to the torch function with which recomputation sets a GPU's generator.
    """
    # After Transformer Engine's installation: megatron checks for it on import.
    import megatron.core.fusions.fused_bias_swiglu as megatron_swiglu
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._lazy_call = lambda *_args, **_kwargs: None
    megatron_swiglu.swiglu = lambda y: y.new_empty(*y.shape[:-1], y.shape[-1] // 2)
    megatron_swiglu.swiglu_back = lambda _gradient, y: torch.empty_like(y)
    megatron_swiglu.weighted_swiglu = lambda y, _weights: megatron_swiglu.swiglu(y)
    megatron_swiglu.weighted_swiglu_back = lambda _gradient, y, weights: (
        torch.empty_like(y),
        torch.empty_like(weights),
    )


def _rms_norm(
    func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """torch's fused RMSNorm on CUDA, which saves its input and one number per row."""
    if not x.is_cuda or weight is None:
        return func(x, shape, weight, eps)
    return _FusedRMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        if x.device != weight.device:
            raise RuntimeError(f"rms_norm: tensors on {x.device} and {weight.device}")
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
