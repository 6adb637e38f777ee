"""The policy: a GPTModel on megatron-core's schedules, DDP and distributed optimizer.

Every forward and backward pass, training or not, goes through ``_run``: packs in, one additive vector of
sums out, equal on all ranks. What the vector means is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.interfaces import NamedTensors
from bapo_megatron.policy import megatron_checkpoint
from bapo_megatron.policy.device import select_device
from bapo_megatron.policy.hf_config import read_model_shape
from bapo_megatron.policy.hf_reader import HfReader
from bapo_megatron.policy.model import build_chunks, transformer_config
from bapo_megatron.policy.optimizer import build_optimizer, build_schedule
from bapo_megatron.policy.vocab_parallel import log_prob_and_entropy
from bapo_megatron.policy.weights import WeightMap
from bapo_megatron.types import MicroBatch, PackLayout, TokenFn, TokenStats, UpdateResult

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronPolicy:
    """Implements ``interfaces.Policy``. Process groups must exist (``layout.initialize_groups``)."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        batch: BatchConfig,
        optimizer: OptimizerConfig,
        planned_updates: int,
        temperature: float = 1.0,
    ) -> None:
        """The model of an HF folder, with its weights, ready to train.

        ``temperature`` divides the logits: the trained distribution is the sampled one.
        """
        self.version = 0
        self.device = select_device()
        self._temperature = temperature
        self._chunk_tokens = batch.logprob_chunk_tokens
        shape = read_model_shape(model.hf_path)
        dtype = _DTYPES[model.dtype]
        self._config = transformer_config(shape, parallel, batch, dtype)
        chunks = build_chunks(self._config, shape, max(shape.max_positions, batch.pack_tokens))
        self._weights = WeightMap(shape, chunks)
        self._weights.load(HfReader(model.hf_path), chunks, shape.tied)
        self._model = self._wrap([chunk.to(self.device) for chunk in chunks], dtype)
        self._optimizer = build_optimizer(optimizer, self._model, dtype)
        self._schedule = build_schedule(optimizer, self._optimizer, planned_updates)
        self._config.finalize_model_grads_func = finalize_model_grads
        self._config.grad_scale_func = self._optimizer.scale_loss

    @property
    def data_rank(self) -> int:
        """This process's place among the model's replicas."""
        return int(parallel_state.get_data_parallel_rank())

    @property
    def pack_layout(self) -> PackLayout:
        """What packs this rank takes."""
        interleaved = self._config.virtual_pipeline_model_parallel_size is not None
        return PackLayout(
            data_rank=self.data_rank,
            data_size=int(parallel_state.get_data_parallel_world_size()),
            length_multiple=self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1,
            count_multiple=self._config.pipeline_model_parallel_size if interleaved else 1,
        )

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """Forward only: ``fn`` summed over the packs of all ranks, float64."""
        with torch.no_grad():
            return self._run(batches, fn, forward_only=True)

    def log_probs(self, batches: Sequence[MicroBatch]) -> list[TokenStats]:
        """Log-probs and entropies of this rank's packs, on every rank of its replica."""
        stats = [torch.zeros(2, batch.token_T.numel()) for batch in batches]
        seen = iter(stats)

        def keep(token_stats: TokenStats, _batch: MicroBatch) -> Tensor:
            next(seen).copy_(torch.stack([token_stats.log_prob_T, token_stats.entropy_T]))
            return torch.zeros(1)

        self.token_sums(batches, keep)
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            for values in stats:
                dist.broadcast(values, parallel_state.get_pipeline_model_parallel_last_rank(), group)
        return [TokenStats(*values) for values in stats]

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn) -> UpdateResult:
        """One optimizer step.

        A loss that is not finite raises FloatingPointError, a gradient that is not RuntimeError (by
        megatron-core, on the rank that meets it); either way the weights stay as they were.
        """
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums = self._run(batches, loss, forward_only=False)
        if not torch.isfinite(sums[0]):
            raise FloatingPointError(f"the loss of update {self.version + 1} is {sums[0].item()}")
        self._schedule.step(increment=1)
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        stepped, grad_norm, _ = self._optimizer.step()
        if not stepped:
            raise FloatingPointError(f"the gradient of update {self.version + 1} is not finite")
        self.version += 1
        return UpdateResult(sums, float(grad_norm), learning_rate)

    def hf_weights(self) -> NamedTensors:
        """All weights under their HF names, whole, on every rank. Collective."""
        return self._weights.gather()

    def save(self, path: Path) -> None:
        """Write model and optimizer into ``path`` as a torch_dist checkpoint. Collective."""
        megatron_checkpoint.save(path, self._model, self._optimizer)

    def load(self, path: Path, version: int) -> None:
        """Read what ``save`` wrote at ``version``, at this layout or another. Collective."""
        megatron_checkpoint.load(path, self._model, self._optimizer)
        self.version = version
        self._schedule.num_steps = 0
        self._schedule.step(increment=version)

    def _wrap(self, chunks: list[Any], dtype: torch.dtype) -> list[Any]:
        if dtype == torch.bfloat16:
            chunks = [Float16Module(self._config, chunk) for chunk in chunks]
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=True,
            average_in_collective=False,
        )
        return [
            DistributedDataParallel(self._config, settings, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]

    def _run(self, batches: Sequence[MicroBatch], fn: TokenFn, forward_only: bool) -> Tensor:
        moved = [_to_device(batch, self.device) for batch in batches]
        iterators = [iter(moved) for _ in self._model]
        outputs = get_forward_backward_func()(
            forward_step_func=self._forward_step(fn),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._model if len(self._model) > 1 else self._model[0],
            num_microbatches=len(moved),
            seq_length=moved[0].token_T.numel(),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return self._sum_over_ranks(outputs)

    def _forward_step(self, fn: TokenFn) -> Callable[..., Any]:
        def loss_of(batch: MicroBatch) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
            def evaluate(logits_1TV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                sums = fn(self._token_stats(logits_1TV[0], batch), batch)
                return sums[0], batch.mask_T.sum().to(torch.int), sums.detach().double()

            return evaluate

        def step(iterator: Iterator[MicroBatch], model: Any) -> Any:
            batch = next(iterator)
            extra = {"fp32_output": False} if isinstance(model.module, Float16Module) else {}
            logits_1TV = model(
                input_ids=batch.token_T[None],
                position_ids=batch.position_T[None],
                attention_mask=None,
                packed_seq_params=_packed(batch),
                **extra,
            )
            return logits_1TV, loss_of(batch)

        return step

    def _token_stats(self, logits_TV: Tensor, batch: MicroBatch) -> TokenStats:
        group = parallel_state.get_tensor_model_parallel_group()
        return TokenStats(
            *log_prob_and_entropy(logits_TV, batch.label_T, self._temperature, self._chunk_tokens, group)
        )

    def _sum_over_ranks(self, outputs: list[Tensor]) -> Tensor:
        """Sum of the packs' vectors, each counted once: only last stages have any, and TP ranks agree."""
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        counts = last and parallel_state.get_tensor_model_parallel_rank() == 0
        width = torch.tensor([outputs[0].numel() if last else 0], device=self.device)
        dist.all_reduce(width, dist.ReduceOp.MAX)
        total = torch.zeros(int(width), dtype=torch.float64, device=self.device)
        if counts:
            total += torch.stack(outputs).sum(0)
        dist.all_reduce(total)
        return total.cpu()


def _to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    moved: dict[str, Any] = {
        name: value.to(device, non_blocking=True)
        for name, value in vars(batch).items()
        if isinstance(value, Tensor)
    }
    return replace(batch, **moved)


def _packed(batch: MicroBatch) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
