"""Device, communication backend and attention kernels of this process; and CPU mode.

``select_device`` returns the device and comes first in every process that trains. megatron-core hard-codes
"cuda" devices in a few dozen places. Without CUDA ``cpu_mode`` redirects them to the CPU: in torch calls
of the calling thread, and by patches of ``torch.cuda`` and megatron-core in the whole process. With CUDA
``select_device`` changes no library.

Transformer Engine does not refuse a GPU without an attention kernel: without context parallelism it computes
all scores of padded documents (unfused), with it a layer fails in the first pass. So ``layers.py`` asks
``has_te_attention`` before a model is built.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.device import choose_vector_kernels, environment_variable, set_default, uses_gpu

_CPU = torch.device("cpu")
_TE_BASE = "transformer_engine.pytorch.module.base"
_thread = threading.local()
_NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
_NORM_BLOCK = 2**14
"""Block size of the gradient norm, in elements: 128 KiB of float64, which fits a cache. torch sums so few
elements on one thread, so the sum does not depend on the thread count."""
_NORM_ROWS = 16
"""Blocks per torch call, which costs as much as one block; their float64 copies also fit the cache."""


def has_cuda() -> bool:
    """Whether this process trains on a GPU. Raises ConfigError if torch cannot use an expected GPU."""
    return uses_gpu()


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether layers are Transformer Engine's: on a GPU, if installed, in half precision (it requires it)."""
    return dtype != torch.float32 and has_cuda() and find_spec("transformer_engine") is not None


@cache
def pack_attention() -> type:
    """Return a ``TEDotProductAttention`` that passes ``pad_between_seqs`` on: no padding separates documents.

    Otherwise Transformer Engine before 2.20 compares ``cu_seqlens`` with the padded ones in every layer, a
    GPU synchronization. A function, because the base class imports Transformer Engine.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class PackAttention(TEDotProductAttention):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.kept_packed_seq_params.add("pad_between_seqs")

    return PackAttention


def choose_router_matmul(te: bool) -> None:
    """Set megatron's matmul for router logits in this process: Transformer Engine's, or torch's. megatron
    uses the former whenever it is installed, even on a CPU, where its kernel kills the process."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    if te:
        from megatron.core.extensions.transformer_engine import te_general_gemm

        moe_utils.te_general_gemm = te_general_gemm


def has_te_attention(config: Any, longest: int) -> bool:
    """Whether Transformer Engine has a flash or fused kernel for this rank's heads of ``config``.

    ``longest``: longest document in tokens. Raises ConfigError if NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 and
    there is no deterministic kernel: torch has none either.
    """
    deterministic = (environment_variable(_NONDETERMINISTIC) or "1") == "0"
    has_kernel = _has_te_kernel(config, longest, deterministic)
    if deterministic and not has_kernel:
        raise ConfigError(
            f"{_NONDETERMINISTIC}=0 in the environment: there is no deterministic attention here for packs "
            f"of {longest} tokens in Transformer Engine, nor in torch: unset it; a resumed run then "
            "continues to rounding, not bit for bit"
        )
    return has_kernel


def _has_te_kernel(config: Any, longest: int, deterministic: bool) -> bool:
    """Query Transformer Engine's backend selection with the arguments of a training layer."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    # The document count matters only for determinism: use the maximum of a pack.
    documents = max(1, longest // (2 * context)) if deterministic else 1
    asked = {
        "qkv_dtype": config.params_dtype,
        "qkv_layout": "thd_thd_thd",
        "batch_size": documents,
        "num_heads": config.num_attention_heads // tensor,
        "num_gqa_groups": config.num_query_groups // tensor,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "num_tokens_q": longest // context,
        "num_tokens_kv": longest // context,
        "head_dim_qk": config.kv_channels,
        "head_dim_v": config.kv_channels,
        "attn_mask_type": "padding_causal",
        "window_size": (-1, 0),
        "bottom_right_diagonal": False,
        "core_attention_bias_requires_grad": False,
        "context_parallel": context > 1,
        "cp_size": context,
        "deterministic": deterministic,
    }
    known = {field.name for field in fields(utils.AttentionParams)}
    answer = utils.get_attention_backend(
        utils.AttentionParams(**{name: value for name, value in asked.items() if name in known})
    )
    use_flash, _, use_fused, *_ = answer
    return bool(use_flash or use_fused)


def backend() -> str:
    """The process-group backend: NCCL for GPU tensors, gloo for objects and CPU tensors."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def select_device() -> torch.device:
    """Select and return this process's device, by LOCAL_RANK on a GPU node. Idempotent; the first call must
    come before any tensor exists. Without CUDA it enters ``cpu_mode``."""
    set_default("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if has_cuda():
        index = int(environment_variable("LOCAL_RANK") or "0") % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    cpu_mode()
    return _CPU


def release_cached_memory() -> None:
    """Release torch's cached GPU memory to the driver, and Transformer Engine's dummy weight gradients, which
    the next backward pass recreates. A save allocates other tensor sizes than an update, and NCCL, which
    bypasses torch's allocator, allocates buffers at a group's first use."""
    if has_cuda():
        getattr(sys.modules.get(_TE_BASE), "_dummy_wgrads", {}).clear()
        torch.cuda.empty_cache()


def free_gpu_bytes() -> int | None:
    """Free bytes of this process's GPU according to the driver, without torch's cache; None without a GPU."""
    return int(torch.cuda.mem_get_info()[0]) if has_cuda() else None


def gpu_name() -> str:
    """Node and number of this process's GPU, for messages."""
    return f"{socket.gethostname()}, GPU {torch.cuda.current_device()}" if has_cuda() else "the CPU"


def cpu_mode() -> None:
    """Make megatron-core run on the CPU. Idempotent; does nothing with CUDA. Functions that megatron-core
    decorates with ``torch.compile`` run uncompiled: compiling takes ten seconds of each process, more than
    they do in a run, and requires a C++ compiler."""
    if has_cuda():
        return
    torch.compiler.set_stance("force_eager")  # type: ignore[no-untyped-call]
    _answer_cuda_queries()
    use_torch_optimizer()
    choose_vector_kernels()
    if not getattr(_thread, "entered", False):  # function modes are per thread
        _thread.entered = True
        _CudaToCpuMode().__enter__()  # type: ignore[no-untyped-call]


def _answer_cuda_queries() -> None:
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.cuda.current_stream = lambda *_args, **_kwargs: _CpuStream()  # type: ignore[assignment,return-value]

    import megatron.core.tensor_parallel.random as megatron_random

    _adapt_expert_dispatch()
    _skip_lone_collectives()
    # Recompute saves and restores the CUDA generator; there is none, and dropout is zero.
    megatron_random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.empty(0)
    megatron_random._set_cuda_rng_state = lambda *_args, **_kwargs: None


def _skip_lone_collectives() -> None:
    from megatron.core.distributed import param_and_grad_buffer as buffer

    buffer.dist_reduce_scatter_func = partial(_unless_alone, torch.distributed.reduce_scatter_tensor)
    buffer.dist_all_gather_func = partial(_unless_alone, torch.distributed.all_gather_into_tensor)


def _unless_alone(
    collective: Callable[..., Any], output: Tensor, tensor: Tensor, *, group: Any, **named: Any
) -> Any:
    """Run an in-place collective, except in a one-rank group, where gloo would copy the whole buffer."""
    return None if group.size() == 1 else collective(output, tensor, group=group, **named)


def _adapt_expert_dispatch() -> None:
    """Patch megatron-core's expert dispatcher and its uneven gathers for gloo. Idempotent."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    if isinstance(mappings._gather_along_first_dim, partial):
        return
    dispatcher: Any = MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = nullcontext()
    dispatcher._maybe_dtoh_and_synchronize = _read_splits
    mappings._gather_along_first_dim = partial(_gather, mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = partial(
        _reduce_scatter, mappings._reduce_scatter_along_first_dim
    )


def _read_splits(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Read the message sizes on the host; on a GPU megatron copies them on a separate stream."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(dispatcher, name)
            if isinstance(value, Tensor):
                setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


def _gather(
    plain: Any, part: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    """Gather parts of different lengths (ETP with EP), padded to the longest: gloo requires equal lengths."""
    if output_split_sizes is None or group.size() == 1:
        return plain(part, group, use_global_buffer=use_global_buffer)
    sizes = [int(size) for size in output_split_sizes]
    pieces = plain(_padded(part, max(sizes)), group).split(max(sizes)) if max(sizes) else []
    kept = [piece[:size] for piece, size in zip(pieces, sizes, strict=False)]
    return torch.cat(kept) if kept else part


def _reduce_scatter(
    plain: Any, whole: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    """Reduce-scatter into parts of different lengths, padded to the longest."""
    if input_split_sizes is None or group.size() == 1:
        return plain(whole, group, use_global_buffer=use_global_buffer)
    sizes = [int(size) for size in input_split_sizes]
    if not max(sizes):
        return whole
    pieces = [_padded(piece, max(sizes)) for piece in whole.split(sizes)]
    return plain(torch.cat(pieces), group)[: sizes[group.rank()]]


def _padded(part: Tensor, length: int) -> Tensor:
    padded = part.new_zeros(length, *part.shape[1:])
    padded[: len(part)] = part
    return padded


def use_torch_optimizer() -> None:
    """Make megatron use torch's AdamW in this process, whatever optimizers are installed. Transformer
    Engine's and apex's kernels need a GPU, but a cluster's CPU nodes share its GPU nodes' environment."""
    from megatron.core import optimizer as choice
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as base

    choice.Adam, choice.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    distrib_optimizer.Adam = torch.optim.Adam
    distrib_optimizer.HAVE_APEX_OR_TE = False
    distrib_optimizer.USING_TE_OPTIMIZER = distrib_optimizer.USING_APEX_OPTIMIZER = False
    for module in (clip_grads, base):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _l2_norm, _scale


def _l2_norm(
    _chunk_size: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], _each: bool, *_: Any
) -> tuple[Tensor, None]:
    """sqrt(sum of squares) of all tensors, float32 [1], accumulated in float64.

    The signature is that of apex's ``multi_tensor_l2norm``. Megatron's fallback adds float32 numbers
    sequentially: at 28 M elements its norm, used for gradient clipping, is 0.16 % too small.
    """
    norms = [norm for tensors in lists for tensor in tensors for norm in _block_norms(tensor.flatten())]
    return torch.linalg.vector_norm(torch.cat(norms)).float()[None], None


def _scale(_chunk_size: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Scale tensors of the first list into those of the second, as apex's ``multi_tensor_scale``."""
    for tensor, scaled in zip(*lists, strict=True):
        torch.mul(tensor, factor, out=scaled)


def _block_norms(flat: Tensor) -> Iterator[Tensor]:
    """Yield the norms of blocks of ``_NORM_BLOCK`` elements, then of the rest; float64, 1-D."""
    whole = flat.numel() // _NORM_BLOCK * _NORM_BLOCK
    if whole:
        for rows in flat[:whole].view(-1, _NORM_BLOCK).split(_NORM_ROWS):
            yield torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    yield torch.linalg.vector_norm(flat[whole:], dtype=torch.float64)[None]


class _CpuStream:
    """Stand-in for a CUDA stream: on a CPU everything runs in order, so waits return immediately."""

    def wait_stream(self, _stream: Any) -> None: ...

    wait_event = record_event = wait_stream


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaToCpuMode(TorchFunctionMode):
    """Torch function mode that redirects requests for a CUDA device to the CPU. It intercepts every torch
    call, so its first lines are fast. Patching the tensor factories would be faster, but would miss those
    that megatron binds as default arguments."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ON_CPU:
            return _ON_CPU[func](func, args, kwargs or {})
        return _call_on_cpu(func, args, kwargs) if kwargs else func(*args)


def _call_on_cpu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": _CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return func(*args, **kwargs)


def _move(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 and _is_cuda(args[1]):
        args = (args[0], _CPU, *args[2:])
    return _call_on_cpu(func, args, kwargs)


def _type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func(*args, **kwargs)
    if len(args) > 1 or kwargs or name.startswith("torch.cuda."):
        return name
    # The distributed optimizer compares these names with torch.cuda.* to distinguish dtypes.
    return name.replace("torch.", "torch.cuda.", 1)


_ON_CPU: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.cuda: lambda _func, args, _kwargs: args[0],
    torch.Tensor.to: _move,
    torch.Tensor.type: _type,
}
