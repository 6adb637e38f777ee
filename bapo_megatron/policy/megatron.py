"""megatron-core policy (the actor), ``MegatronPolicy``: GPTModel, pipeline schedule, distributed optimizer.

It works on packs (micro-batches of concatenated sequences): ``update`` makes an optimizer step; other passes
(``passes.py``) return sums over all ranks' tokens, equal on every rank, or each token's log-probs. It also
saves, loads, offloads and gathers the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.hf.config import attention_weight, read_model_shape
from bapo_megatron.hf.reader import HfReader, TensorReader
from bapo_megatron.interfaces import NamedTensors
from bapo_megatron.policy import checkpoint as megatron_checkpoint
from bapo_megatron.policy import device
from bapo_megatron.policy.background_save import BackgroundSave
from bapo_megatron.policy.bit_digest import state_digest
from bapo_megatron.policy.device import has_cuda, release_cached_memory, select_device
from bapo_megatron.policy.experts import RouterCounters
from bapo_megatron.policy.layout import chunk_layers
from bapo_megatron.policy.model import build_chunks, transformer_config
from bapo_megatron.policy.offload import FrozenReference, Offload
from bapo_megatron.policy.optimizer import build_optimizer, build_schedule, clipped_step
from bapo_megatron.policy.output_head import OutputHead
from bapo_megatron.policy.passes import Passes
from bapo_megatron.policy.weight_map import WeightMap
from bapo_megatron.tensor_types import MicroBatch, SearchedLoss, TokenFn, TokenStats, UpdateResult
from bapo_megatron.types import PackLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronPolicy:
    """The ``Policy`` (actor) on megatron-core, one object per rank: model, optimizer, schedule, optional
    frozen reference. The constructor builds the model and loads its weights from an HF folder; process groups
    must exist (``layout.parallel_processes``). ``interfaces.py`` documents the methods."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        batch: BatchConfig,
        optimizer: OptimizerConfig,
        planned_updates: int,
        temperature: float = 1.0,
        reader: TensorReader | None = None,
        keeps_keys: bool = False,
    ) -> None:
        """``temperature`` divides the logits, as in sampling. ``reader``: source of the weights (default: the
        folder). ``keeps_keys``: see ``RouterCounters``."""
        self.version = 0
        self._keeps_keys = keeps_keys
        self._parallel = parallel
        self.device = select_device()
        shape = read_model_shape(model.hf_path)
        self._attention_weight = attention_weight(shape)
        dtype = _DTYPES[model.dtype]
        self._config = transformer_config(shape, parallel, batch, dtype)
        positions = max(shape.max_positions, batch.pack_tokens)
        chunks = build_chunks(self._config, shape, positions, batch.pack_tokens)
        self._chunks, self._tied = chunks, shape.tied
        self._weights = WeightMap(shape, chunks, chunk_layers(parallel, shape.layers))
        self._weights.load(reader or HfReader(model.hf_path), chunks, shape.tied)
        self._model = self._wrap([chunk.to(self.device) for chunk in chunks], dtype)
        self._optimizer = build_optimizer(optimizer, self._model, dtype)
        self._clip_grad = optimizer.clip_grad
        self._schedule = build_schedule(optimizer, self._optimizer, planned_updates)
        self._config.finalize_model_grads_func = finalize_model_grads
        group = parallel_state.get_tensor_model_parallel_group()
        fused = device.uses_transformer_engine(dtype)
        head = OutputHead(temperature, batch.chunk_tokens(has_cuda()), group, adds_in_float32=fused)
        self._passes = Passes(self._model, chunks[-1], head, self.device)
        self._config.grad_scale_func = self._optimizer.scale_loss
        self._offload = Offload(self._model, self._optimizer, self.device)
        self._reference: FrozenReference | None = None

    @property
    def data_rank(self) -> int:
        return int(parallel_state.get_data_parallel_rank())

    @property
    def has_experts(self) -> bool:
        return self._config.num_moe_experts is not None

    @property
    def pack_layout(self) -> PackLayout:
        config = self._config
        interleaved = config.virtual_pipeline_model_parallel_size is not None
        return PackLayout(
            data_rank=self.data_rank,
            data_size=int(parallel_state.get_data_parallel_world_size()),
            document_multiple=self._parallel.document_multiple,
            length_multiple=self._parallel.length_multiple,
            count_multiple=config.pipeline_model_parallel_size if interleaved else 1,
            fixed_length=interleaved,
            quadratic=self._attention_weight,
        )

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        self._offload.check_loaded("token_sums")
        return self._passes.forward(batches, fn)

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        return self._passes.old_sums(batches, fn)

    def log_probs(self, batches: Sequence[MicroBatch], trained_only: bool = False) -> list[TokenStats]:
        self._offload.check_loaded("log_probs")
        return self._passes.stats(batches, trained_only)

    def load_reference(self, folder: Path, reader: TensorReader | None = None) -> None:
        """``reader``: source of the weights (default: the folder)."""
        self._offload.check_loaded("load_reference")
        reference = FrozenReference(self._model)
        with reference.loading():
            self._weights.load(reader or HfReader(folder), self._chunks, self._tied)
        self._reference = reference

    def reference_log_probs(self, batches: Sequence[MicroBatch]) -> list[TokenStats]:
        self._offload.check_loaded("reference_log_probs")
        if self._reference is None:
            raise RuntimeError("reference_log_probs: there is no reference; call load_reference() first")
        with self._reference.in_place():
            return self._passes.stats(batches, trained_only=True)

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.cpu()

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn | SearchedLoss) -> UpdateResult:
        """Run one optimizer step: backward of the loss, gradient clipping, Adam, learning-rate schedule."""
        self._offload.check_loaded("update")
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        counters = RouterCounters.of(batches, self.version, self._config, self.device, self._keeps_keys)
        sums = self._passes.backward(batches, loss, counters)
        routes = experts = None
        if counters is not None:
            sums, routes, experts = counters.split(sums)
        # Before the schedule and the optimizer: they must not step on such a loss.
        if not torch.isfinite(sums[0]):
            raise FloatingPointError(f"the loss of update {self.version + 1} is {sums[0].item()}")
        self._schedule.step(increment=1)
        grad_norm = clipped_step(self._optimizer, self._clip_grad)
        self.version += 1
        return UpdateResult(sums, grad_norm, self.learning_rate, routes, experts)

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"]) if self.version else 0.0

    def state_digest(self) -> dict[str, list[str]]:
        self._offload.check_loaded("state_digest")
        return state_digest(self._weights, self._optimizer)

    def hf_weights(self) -> NamedTensors:
        self._offload.check_loaded("hf_weights", weights_alone=True)
        return self._weights.gather()

    def offload(self, keep_weights: bool = False) -> int:
        return self._offload.offload(keep_weights)

    def reload(self) -> None:
        self._offload.reload()

    def save(self, path: Path) -> BackgroundSave:
        self._offload.check_loaded("save")
        # First: a save allocates other tensor sizes than an update, and would not fit beside the cache.
        release_cached_memory()
        return megatron_checkpoint.save(path, self._model, self._optimizer)

    def load(self, path: Path, version: int) -> None:
        self._offload.check_loaded("load")
        megatron_checkpoint.load(path, self._model, self._optimizer)
        self.version = version
        # The schedule follows the version: no checkpoint stores it, and a new recipe may change it.
        self._schedule.num_steps = 0
        self._schedule.step(increment=version)

    def _wrap(self, chunks: list[Any], dtype: torch.dtype) -> list[Any]:
        if dtype == torch.bfloat16:
            chunks = [Float16Module(self._config, chunk) for chunk in chunks]
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=False,  # see clipped_step
            average_in_collective=False,
        )
        return [
            DistributedDataParallel(self._config, settings, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
