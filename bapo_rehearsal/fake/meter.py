"""Dispatch-mode meter: records storages, FLOPs, collectives and host waits of a rank's kernel calls.

Three modes lie between the program and the kernels, outermost first: ``CudaFunctions`` (corrections for the
fake GPU), ``Meter``, and torch's FakeTensorMode (shapes, dtypes and devices, no memory or arithmetic).

FLOPs are those of matrix products, by shape, and of attention as executed: per unmasked (query, key) pair,
two products forward and five backward (recomputed scores, and the gradients of queries, keys, values and
scores): Dao 2023, FlashAttention-2 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch._subclasses.fake_tensor import (
    _DISPATCH_META_HANDLERS,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bapo_rehearsal.fake.cuda_device import CUDA, META
from bapo_rehearsal.fake.ledger import Ledger, program_line
from bapo_rehearsal.fake.process_group import Collectives
from bapo_rehearsal.fake.values import ShapesFromValues, guess, known, propagate
from bapo_rehearsal.flash_linear_attention import BACKWARD, FORWARD, rule_flops
from bapo_rehearsal.records import Wait
from bapo_rehearsal.transformer_engine.attention import named_arguments
from bapo_rehearsal.transformer_engine.extension import MaskType

aten = torch.ops.aten
_LARGE = 1 << 20
"""Smallest block, in bytes, with a recorded program line."""
_CHECKED = {"aten", "prims", "prim"}
"""Namespaces whose fake kernels detect mixed devices themselves."""
_COPIES = {aten._to_copy.default, aten.copy_.default}
_PRODUCTS = {aten.mm, aten.addmm}
_FORWARD, _BACKWARD = 4, 10
"""FLOPs per (query, key) pair and head_dim entry: two and five products of two FLOPs."""
_OUTPUT_LAYER = "bapo_megatron/policy/output_head.py"


class Meter(TorchDispatchMode):
    """Meter of one rank: a dispatch mode (context manager) that sees every kernel call of its program.

    ``cuda``: whether the rank's device is the fake GPU. Raises RuntimeError for tensors on mixed devices, as
    on a GPU, and for an output layer whose product is not float32.
    """

    def __init__(self, group_names: Mapping[str, str], cuda: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.waits: Counter[Wait] = Counter()
        self.guesses: Counter[Wait] = Counter()
        """Reads of unknown values."""
        self.collectives = Collectives(group_names, lambda tensor, op: self._book(tensor, op))
        self.flops: Counter[str] = Counter()
        """FLOPs of each phase."""
        self.chunks: list[tuple[int, int]] = []
        """(queries, keys) of this rank's document chunks, which variable-length kernels have on the device.
        """
        self.kernels = 0
        self.phase = ""
        self.modules: list[str] = []
        """Names of the modules in their forward pass, innermost last."""
        self.vocabulary = 0
        """Columns of this rank's logits."""
        self._cuda = cuda
        self.shapes = ShapesFromValues(self._read)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid torch.compile's wrapper, which a rehearsal does not need: it adds a call in ten."""
        return False

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context manager of a phase; phases can nest."""
        outer, self.phase = self.phase, phase
        with self.ledger.window(phase):
            try:
                yield
            finally:
                self.phase = outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.kernels += 1
        # C++ queries of tensor metadata (half of all calls: the device) get the fake mode's answer.
        handler = _DISPATCH_META_HANDLERS.get(func)
        if handler is not None:
            return handler(args)  # type: ignore[no-untyped-call]
        named = dict(kwargs or {})
        if func.namespace == "c10d":
            out = self.collectives.answer(func, args, self.phase)
            self._mark_communicated(args)
            return out
        if self._cuda and named.get("device") == META:
            named["device"] = CUDA  # C++ saw a meta tensor and requests another
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if func.namespace not in _CHECKED:
            _check_devices(func.name(), args, named)
        if func is aten._local_scalar_dense.default:
            value = self.value_of(args[0], "item")
            with unset_fake_temporarily():
                return value.item()
        if func is aten.equal.default:
            return self._equal(args[0], args[1])
        if func is aten.is_pinned.default:
            return False
        if func is aten._pin_memory.default:
            return args[0]
        out = self.shapes.answer(func, args, named)
        if out is None:
            out = func(*args, **named)
            propagate(func, args, named, out)
        self._count(func, args, named, out)
        return out

    def value_of(self, tensor: Tensor, what: str) -> Tensor:
        """Values that the host reads from a tensor, known or guessed. A read from the GPU is a wait."""
        self._read(tensor, what)
        value = known(tensor)
        if value is None:
            value = guess(tensor)
        with unset_fake_temporarily():
            return value.detach()

    def wait(self, what: str) -> None:
        """Count a host wait, in which the CPU blocks until the GPU has finished.

        Causes: a value read, a value-dependent shape, a copy without ``non_blocking``, a ``synchronize``.
        """
        self.waits[Wait(self.phase, what, program_line())] += 1

    def see_te_kernel(self, name: str, args: Sequence[Any], named: dict[str, Any]) -> None:
        """Record a Transformer Engine or fla kernel call, which bypasses torch's dispatcher."""
        _check_devices(name, args, named)
        if flops := _te_flops(name, args):
            self.flops[self.phase] += flops

    def _count(self, func: Any, args: Sequence[Any], named: dict[str, Any], out: Any) -> None:
        if func in _COPIES:
            self._copy(func, args, named, out)
        if func._overloadpacket in _PRODUCTS:
            self._check_logits(out)
        if flops := _flops(func, args, named, out, self.chunks):
            self.flops[self.phase] += flops
        for leaf in out if isinstance(out, list | tuple) else (out,):
            if isinstance(leaf, Tensor):
                self._book(leaf, func.name())
            elif isinstance(leaf, list):
                for tensor in leaf:
                    self._book(tensor, func.name())

    def _book(self, tensor: Tensor, op: str) -> None:
        if tensor.layout is not torch.strided or self.ledger.block(tensor) is not None:
            return
        line = program_line() if tensor.untyped_storage().nbytes() >= _LARGE else ""
        self.ledger.add(tensor, op, self._module(), line, self.phase)

    def _module(self) -> str:
        node = torch._C._current_autograd_node()
        if node is not None:
            return f"backward of {node.name().removesuffix('Backward').removesuffix('Backward0')}"
        return self.modules[-1] if self.modules else ""

    def _check_logits(self, product: Tensor) -> None:
        """Check that logits are float32 from the matmul on, as in the servers. Raises RuntimeError."""
        is_logits = product.size(-1) == self.vocabulary and program_line().startswith(_OUTPUT_LAYER)
        if is_logits and product.dtype != torch.float32:
            raise RuntimeError(f"the output layer's matmul gives logits of {product.dtype}, not float32")

    def _copy(self, func: Any, args: Sequence[Any], named: Mapping[str, Any], out: Tensor) -> None:
        """Count the host wait of a blocking copy between host and GPU."""
        source, target = (args[0], out) if func is aten._to_copy.default else (args[1], args[0])
        waits = not (named.get("non_blocking") or (len(args) > 2 and args[2]))
        if waits and source.device.type != target.device.type:
            self.wait("copy to the host" if target.device.type == "cpu" else "copy to the GPU")

    def _mark_communicated(self, args: Sequence[Any]) -> None:
        for leaf in tree_leaves(list(args[:2])):
            if isinstance(leaf, Tensor):
                self._book(leaf, "collective")
                block = self.ledger.block(leaf)
                if block is not None:
                    block.communicated = True

    def _read(self, tensor: Tensor, what: str) -> None:
        """Record a host read: a wait if the tensor is on the GPU, a guess if its values are unknown."""
        if tensor.device.type == "cuda":
            self.wait(what)
        if known(tensor) is None:
            self.guesses[Wait(self.phase, what, program_line())] += 1

    def _equal(self, left: Tensor, right: Tensor) -> bool:
        on_gpu = left if left.device.type == "cuda" else right
        self._read(on_gpu, "equal")
        a, b = known(left), known(right)
        if a is None or b is None:
            return True
        with unset_fake_temporarily():
            return bool(torch.equal(a, b))


def answer_reads(meter: Meter) -> None:
    """Patch ``tolist`` and ``numpy`` of fake tensors: each is one read of all values."""

    def read(tensor: Tensor, what: str) -> Tensor:
        with torch._C.DisableTorchFunction():
            return meter.value_of(tensor, what)

    def numpy(tensor: Tensor, **_: Any) -> Any:
        if tensor.device.type == "cuda":
            raise TypeError(f"numpy: a tensor of shape {list(tensor.shape)} is on the GPU; use .cpu() first")
        with unset_fake_temporarily():
            return read(tensor, "numpy").numpy()

    def tolist(tensor: Tensor) -> Any:
        with unset_fake_temporarily():
            return read(tensor, "tolist").tolist()

    cls: Any = FakeTensor
    cls.tolist, cls.numpy = tolist, numpy


def watch_sizes(meter: Meter) -> None:
    """Patch ``UntypedStorage.resize_`` to report released and re-allocated storages to the ledger."""
    storages: Any = torch.UntypedStorage
    plain = storages.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        plain(storage, size)
        meter.ledger.resized(storage)
        return storage

    storages.resize_ = resize


def _check_devices(name: str, args: Sequence[Any], named: dict[str, Any]) -> None:
    devices = {leaf.device for leaf in tree_leaves((list(args), named)) if isinstance(leaf, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"{name}: tensors on {' and '.join(sorted(map(str, devices)))}")


def _flops(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, chunks: Sequence[tuple[int, int]]
) -> int:
    """FLOPs of one kernel call; 0 for a kernel without products."""
    packet = func._overloadpacket
    if packet is torch.ops.torch_attn._varlen_attn:
        return _varlen(args[0], chunks, _FORWARD)
    if packet is torch.ops.torch_attn._varlen_attn_backward:
        return _varlen(args[1], chunks, _BACKWARD)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return _dense(args[0], args[1], _causal(args, 4), _FORWARD)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _dense(args[1], args[2], _causal(args, 7), _BACKWARD)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def _te_flops(kernel: str, args: Sequence[Any]) -> int:
    """FLOPs of one Transformer Engine or fla kernel call; 0 for a kernel without products."""
    if kernel == "generic_gemm":
        a, transposed_a, b = args[:3]
        return 2 * int(b.numel()) * int(a.shape[-2] if transposed_a else a.shape[-1])
    if kernel == "te_general_grouped_gemm":
        pairs = zip(args[0], args[2], strict=True)
        return sum(_te_flops("generic_gemm", (a, args[1], b)) for a, b in pairs)
    if kernel in ("fused_attn_fwd", "fused_attn_bwd"):
        named = named_arguments(kernel, tuple(args))
        each = _FORWARD if kernel == "fused_attn_fwd" else _BACKWARD
        heads, width = named["q"].shape[-2:]
        return int(each * heads * width * _te_pairs(named))
    return rule_flops(kernel, args[0], args[2]) if kernel in (FORWARD, BACKWARD) else 0


def _varlen(query: Tensor, chunks: Sequence[tuple[int, int]], each: int) -> int:
    return each * query.shape[1] * query.shape[2] * sum(_seen(*chunk) for chunk in chunks)


def _dense(query: torch.Tensor, key: torch.Tensor, causal: bool, each: int) -> int:
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    return each * batch * heads * width * (_seen(queries, keys) if causal else queries * keys)


def _te_pairs(named: dict[str, Any]) -> int:
    """Unmasked (query, key) pairs in a fused attention call, from its document bounds."""
    bounds = [known(named[name]) for name in ("cu_q", "cu_kv")]
    causal = "CAUSAL" in MaskType(named["mask"]).name
    if any(bound is None for bound in bounds):
        raise ValueError("fused attention: the bounds of its documents do not follow from the host's data")
    with unset_fake_temporarily():
        queries, keys = (bound.diff().tolist() for bound in bounds)  # type: ignore[union-attr]
    return sum(_seen(q, k) if causal else q * k for q, k in zip(queries, keys, strict=True) if q)


def _seen(queries: int, keys: int) -> int:
    """Unmasked pairs of causal attention, q k - q (q - 1) / 2; the queries are the last q of k keys."""
    return queries * keys - queries * (queries - 1) // 2


def _causal(args: Sequence[Any], place: int) -> bool:
    return bool(args[place]) if len(args) > place else False
