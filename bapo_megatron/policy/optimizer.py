"""AdamW on megatron's distributed optimizer: construction, clipped step, learning-rate schedule.

``build_optimizer`` returns the optimizer, ``build_schedule`` its learning-rate scheduler. ``clipped_step``
steps the optimizer and returns the gradient norm.

With ``optimizer.device=cpu`` master weights and moments stay in host memory and AdamW runs on the CPU. The
GPU keeps only weights and gradients, which saves 12 bytes per parameter (8 with float32 weights) divided by
DP x CP. Gradients are reduced and clipped on the GPU as usual. Then, bucket by bucket, gradients are copied
to the host, AdamW steps, and the new weights are copied back in the model's dtype, into megatron's all-gather
buffer. Two CUDA streams overlap the copies with the steps.

    GPU    gradients 0   1   2   ...        weights    0   1   2
    CPU                  step 0   1   2   ...

Megatron's own ``HybridDeviceOptimizer`` is unusable: after a load without optimizer state it steps on the
weights from before the load (Megatron-LM, pull request 5071).

Master weights and moments are in pageable memory, so that the forked process that writes a checkpoint keeps a
snapshot of them (copy on write). Pinned memory, which a fork shares, is used only for a bucket's copies.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from torch import Tensor

from bapo_megatron.config import OptimizerConfig
from bapo_megatron.policy.device import has_cuda
from bapo_megatron.runtime.device import environment_variable

_FUSED = {"fused": True, "foreach": False}
"""AdamW's fused CPU kernel: one pass over each parameter, on all cores."""
BUCKET = 2**26
"""Bucket size in elements: 256 MiB of gradients in each of two pinned buffers."""


def build_optimizer(config: OptimizerConfig, model: Sequence[Any], dtype: torch.dtype) -> Any:
    """Megatron's distributed optimizer, with state and steps on the host for ``optimizer.device=cpu``. Biases
    and norms have no weight decay."""
    settings = megatron_optimizer.OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    build = megatron_optimizer.get_megatron_optimizer
    optimizer = build(settings, list(model), use_gloo_process_groups=False)
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            _number_as_in_groups(part)
            if config.device == "cpu":
                _move_to_host(part, config)
    if config.device != "cpu" and config.fused and not has_cuda():
        for group in optimizer.param_groups:
            group.update(_FUSED)
    return optimizer


def _number_as_in_groups(part: Any) -> None:
    """Number each group's parameters in the optimizer's order, float32 ones first.

    Megatron numbers them in buffer order, one buffer per dtype: in a bfloat16 model with some float32
    parameters a parameter would get another one's state.
    """
    groups: dict[int, list[tuple[bool, int, Any]]] = {}
    for parameter, (group, order) in part.model_param_group_index_map.items():
        groups.setdefault(group, []).append((parameter.dtype != torch.float32, order, parameter))
    for group, entries in groups.items():
        for order, (_, _, parameter) in enumerate(sorted(entries, key=lambda entry: entry[:2])):
            part.model_param_group_index_map[parameter] = group, order


def clipped_step(optimizer: Any, clip_grad: float) -> float:
    """Run one optimizer step with gradient clipping; return the gradient norm before clipping. Collective.

    Raises FloatingPointError, on every rank and without a step, if the norm is not finite. (Megatron's own
    gradient check raises only on the rank with the nan, and the others would wait for it.)
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient norm is {norm}")
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm


def build_schedule(config: OptimizerConfig, optimizer: Any, planned_updates: int) -> OptimizerParamScheduler:
    """Return the learning-rate schedule over updates: warmup, then ``config.decay`` to ``min_lr``."""
    warmup = config.warmup_updates
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(planned_updates, warmup + 1),
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


class _Shard:
    """This rank's shard of a parameter in host optimization: host master weights, device weights and
    gradient. Megatron treats it as a parameter in gradient norm and clipping."""

    def __init__(self, master: Tensor, weights: Tensor) -> None:
        self.master = master
        """Master weights, float32 on the host: AdamW's parameter."""
        self.weights = weights
        """Weights on the device in the model's dtype: a view of the all-gather buffer."""
        self.grad: Tensor | None = None
        """Reduced gradients, float32 on the device: a view of megatron's buffer."""


def _move_to_host(part: Any, config: OptimizerConfig) -> None:
    shards: dict[Tensor, _Shard] = {}
    owners: list[tuple[_Shard, Any]] = []
    groups = zip(
        [*part.model_float16_groups, *part.model_fp32_groups],
        [*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups],
        strict=True,
    )
    for parameters, masters in groups:
        for number, parameter in enumerate(parameters):
            shard = _shard_of(part, parameter, masters[number])
            shards[masters[number]] = shard
            owners.append((shard, parameter))
            masters[number] = shard.master
            if hasattr(parameter, "main_param"):
                parameter.main_param = shard.master
    adam = HostAdamW(part.optimizer.param_groups, shards, config)
    part.optimizer = adam
    for group_range, group in zip(part.opt_group_ranges, adam.param_groups, strict=True):
        group_range["orig_group"]["params"] = group["params"]  # frees the old master weights on the device
    part.get_parameters = lambda: adam.shards
    part._copy_model_grads_to_main_grads = lambda: _take_gradients(part, owners)
    part._copy_main_params_to_model_params = lambda: None  # the step has copied each bucket


def _shard_of(part: Any, parameter: Tensor, master: Tensor) -> _Shard:
    place = part._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
    buffer, _, bucket = part.model_param_gbuf_map[parameter]
    weights = part.buffers[buffer].buckets[bucket].param_data.view(-1)[place.start : place.end]
    host = torch.empty(master.shape, dtype=torch.float32, device="cpu")
    shard = _Shard(host.copy_(master.detach()), weights)
    for owner in (shard, host):
        copy_tensor_model_parallel_attributes(owner, master)
        if hasattr(master, "shared"):
            owner.shared = master.shared  # type: ignore[union-attr]
    return shard


def _take_gradients(part: Any, owners: Sequence[tuple[_Shard, Any]]) -> None:
    """Set the shards' gradients to views of the reduced ones. ``owners``: shards with model parameters."""
    for shard, parameter in owners:
        place = part._get_model_param_range_map(parameter)["param"]
        shard.grad = parameter.main_grad.view(-1)[place.start : place.end]


class HostAdamW(torch.optim.AdamW):
    """AdamW with master weights and moments on the host, gradients and weights on the device. ``step`` is
    local and may return before the last weights are copied; the current CUDA stream waits for them."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], shards: dict[Tensor, _Shard], config: OptimizerConfig
    ) -> None:
        """``groups``: those of the replaced optimizer; ``shards``: by their old parameters."""
        self.shards = [shards[parameter] for group in groups for parameter in group["params"]]
        on_host = [{**g, **_FUSED, "params": [shards[p].master for p in g["params"]]} for g in groups]
        betas = (config.beta1, config.beta2)
        super().__init__(on_host, config.lr, betas, config.eps, config.weight_decay, **_FUSED)
        self._copies = _Copies(self.shards)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run one AdamW step, bucket by bucket; the current CUDA stream then waits for the new weights."""
        del closure
        copies = self._copies
        with rank_threads():
            copies.begin()
            for bucket in range(len(copies.buckets)):
                # The next bucket's gradients travel while the cores step this one.
                copies.fetch(bucket + 1)
                for shard, gradient in copies.gradients(bucket):
                    shard.master.grad = gradient
                super().step()  # steps only parameters with a gradient: this bucket's
                for shard in copies.buckets[bucket]:
                    shard.master.grad = shard.grad = None
                copies.send(bucket)
            copies.end()


class _Copies:
    """Overlapped copies of buckets between GPU and host: gradients down, weights up, each way through two
    pinned buffers on its own CUDA stream."""

    def __init__(self, shards: Sequence[_Shard]) -> None:
        self.buckets = buckets_of(shards, BUCKET)
        self._device = shards[0].weights.device if shards else torch.device("cpu")
        self._streams = {way: self._new_stream() for way in ("fetch", "send")}
        self._done: dict[tuple[str, int], Any] = {}
        """Events of possibly unfinished copies, by direction and buffer."""
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def begin(self) -> None:
        """Begin to fetch the first bucket, after the current stream has clipped the gradients."""
        if self._streams["fetch"] is not None:
            self._streams["fetch"].wait_stream(torch.cuda.current_stream(self._device))
        self.fetch(0)

    def fetch(self, bucket: int) -> None:
        """Begin to copy a bucket's gradients to the host; no effect after the last bucket."""
        if bucket < len(self.buckets):
            with self._copying("fetch", bucket):
                for shard, gradient in self._views("fetch", bucket):
                    assert shard.grad is not None
                    gradient.copy_(shard.grad, non_blocking=True)

    def gradients(self, bucket: int) -> Iterator[tuple[_Shard, Tensor]]:
        """Wait for a bucket's gradients on the host; return them by shard."""
        self._wait("fetch", bucket)
        return self._views("fetch", bucket)

    def send(self, bucket: int) -> None:
        """Round a bucket's master weights to the model's dtype and begin to copy them to the device."""
        self._wait("send", bucket)  # the buffer's last copy, two buckets ago, may still run
        for shard, weights in self._views("send", bucket):
            weights.copy_(shard.master)
        with self._copying("send", bucket):
            for shard, weights in self._views("send", bucket):
                shard.weights.copy_(weights, non_blocking=True)

    def end(self) -> None:
        """Make the current stream wait for the weight copies."""
        if self._streams["send"] is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._streams["send"])

    def _views(self, way: str, bucket: int) -> Iterator[tuple[_Shard, Tensor]]:
        shards = self.buckets[bucket]
        dtype = torch.float32 if way == "fetch" else shards[0].weights.dtype
        key = (way, bucket % 2, dtype)
        needed = sum(shard.master.numel() for shard in shards)
        if key not in self._buffers:
            own = [group for group in self.buckets if way == "fetch" or group[0].weights.dtype == dtype]
            most = max(sum(shard.master.numel() for shard in group) for group in own)
            pinned = self._device.type == "cuda"
            self._buffers[key] = torch.empty(most, dtype=dtype, device="cpu", pin_memory=pinned)
        parts = self._buffers[key][:needed].split([shard.master.numel() for shard in shards])
        return zip(shards, parts, strict=True)

    @contextmanager
    def _copying(self, way: str, bucket: int) -> Iterator[None]:
        stream = self._streams[way]
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            yield
            self._done[way, bucket % 2] = stream.record_event()

    def _wait(self, way: str, bucket: int) -> None:
        if event := self._done.pop((way, bucket % 2), None):
            event.synchronize()

    def _new_stream(self) -> Any:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None


def buckets_of(shards: Sequence[_Shard], most: int) -> list[list[_Shard]]:
    """Group shards, in order, into one-dtype buckets of at most ``most`` elements (or one larger shard)."""
    buckets: list[list[_Shard]] = []
    filled = 0
    for shard in shards:
        size = shard.master.numel()
        alike = bool(buckets) and buckets[-1][0].weights.dtype == shard.weights.dtype
        if not alike or filled + size > most:
            buckets.append([])
            filled = 0
        buckets[-1].append(shard)
        filled += size
    return buckets


@contextmanager
def rank_threads() -> Iterator[None]:
    """Context manager that raises torch's thread count to this rank's share of the cores. torchrun gives a
    rank only one thread; Slurm and `bapo train` set the count beforehand."""
    before, ranks = torch.get_num_threads(), environment_variable("LOCAL_WORLD_SIZE")
    if ranks is not None:
        torch.set_num_threads(max(before, len(os.sched_getaffinity(0)) // int(ranks)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
