"""What a small policy really allocates in an update, on every rank, beside what the plan predicts."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo_megatron.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
)
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.planning.job import Job, PlanOptions
from bapo_megatron.planning.memory import stage_memory
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from tests.support.models import EXPERTS, save_tiny_model
from tests.support.workers import run_layout

TOKENS = 512  # of a pack
PACKS = 4  # of a replica
KINDS = ("weights", "gradients", "optimizer", "activations")
_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True)
class Case:
    """One policy."""

    family: str
    dtype: str
    recompute: str
    parallel: ParallelConfig


def save_model(family: str, folder: Path) -> Path:
    """A model large enough that a row's constants do not matter, with random weights."""
    heads = {} if family in ("qwen2", "llama") else {"head_dim": 32}
    experts = {"moe_intermediate_size": 96} if family == EXPERTS else {}
    return save_tiny_model(family, folder, **_SHAPE, **heads, **experts)


def compare(case: Case, folder: Path) -> list[tuple[dict[str, float], dict[str, float]]]:
    """For every rank, bytes predicted and bytes measured."""
    batch = BatchConfig(pack_tokens=TOKENS, recompute=case.recompute, logprob_chunk_tokens=64)
    found = run_layout(measure, case.parallel, folder, case, batch)
    tensor = case.parallel.tensor
    replicas = case.parallel.data or 1
    job = planned(case, folder, batch)
    pairs = []
    for rank, measured in enumerate(found):
        stage = rank // (tensor * replicas)  # megatron numbers ranks TP first, PP last
        memory = stage_memory(job, stage, "torch")
        pairs.append(({kind: getattr(memory, kind) for kind in KINDS}, measured))
    return pairs


def planned(case: Case, folder: Path, batch: BatchConfig) -> Job:
    """The job whose update has PACKS full packs on every replica."""
    replicas = case.parallel.data or 1
    run = RunConfig(
        name="measured",
        model=ModelConfig(folder, case.dtype),
        data=DataConfig(folder, max_prompt_tokens=8),
        parallel=case.parallel,
        rollout=RolloutConfig(prompts_per_step=replicas, group_size=PACKS, max_response_tokens=TOKENS - 8),
        batch=batch,
    )
    return Job(run, read_model_shape(folder), PlanOptions(mean_response_tokens=TOKENS - 8))


def measure(folder: Path, case: Case, batch: BatchConfig) -> dict[str, float]:
    """On one rank: an update, and what it took."""
    policy = MegatronPolicy(ModelConfig(folder, case.dtype), case.parallel, batch, OptimizerConfig(), 10)
    layout = policy.pack_layout
    generator = np.random.default_rng(0)
    samples = [_sample(generator) for _ in range(PACKS * layout.data_size)]
    packs = pack_samples(samples, TOKENS, "token", layout)
    assert len(packs) == PACKS
    saved = SavedBytes(policy._model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda holder: holder.tensor):
        policy.update(packs, _loss)
    buffers = [
        buffer for chunk in policy._model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    return {
        "weights": float(sum(p.nbytes for chunk in policy._model for p in chunk.parameters())),
        "gradients": float(sum(buffer.grad_data.nbytes for buffer in buffers)),
        "optimizer": _optimizer_bytes(policy._optimizer),
        "activations": float(saved.peak),
    }


class SavedBytes:
    """Bytes of the storages that autograd holds for the layers, now and at the peak.

    Counted is what is saved while a decoder runs, or one of its parts runs anew in a backward pass; and the
    output that a stage before the last holds until its gradient comes.
    """

    def __init__(self, chunks: list[Any]) -> None:
        self.now = self.peak = self._depth = 0
        self._uses: dict[int, int] = {}
        self._parameters = {p.untyped_storage().data_ptr() for chunk in chunks for p in chunk.parameters()}
        for chunk in chunks:
            while hasattr(chunk, "module"):
                chunk = chunk.module
            parts = [
                (layer, getattr(layer.self_attention, "core_attention", layer.self_attention), layer.mlp)
                for layer in chunk.decoder.layers
            ]
            for module in (chunk.decoder, *(part for layer in parts for part in layer)):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._leave, always_call=True)
            if not chunk.post_process:
                chunk.decoder.register_forward_hook(self._hold_output)

    def pack(self, tensor: torch.Tensor) -> _Holder:
        """Called by autograd for each tensor that it saves."""
        storage = tensor.untyped_storage()
        # In a backward pass only recomputation saves; that of experts calls no module as a whole.
        recomputes = torch._C._current_autograd_node() is not None
        counts = (self._depth > 0 or recomputes) and storage.data_ptr() not in self._parameters
        return _Holder(self, tensor, counts)

    def use(self, tensor: torch.Tensor) -> int:
        """Count a storage, once; returns its key."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if self._uses.get(key, 0) == 0:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._uses[key] = self._uses.get(key, 0) + 1
        return key

    def release(self, key: int, size: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            self.now -= size

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _hold_output(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            size = output.untyped_storage().nbytes()
            weakref.finalize(output, self.release, self.use(output), size)


class _Holder:
    """A saved tensor; it lives as long as the graph that needs it."""

    def __init__(self, owner: SavedBytes, tensor: torch.Tensor, counts: bool) -> None:
        self.tensor = tensor
        if counts:
            size = tensor.untyped_storage().nbytes()
            weakref.finalize(self, owner.release, owner.use(tensor), size)


def _optimizer_bytes(optimizer: Any) -> float:
    """Moments, and masters where the weights are not float32; ``step`` counters are not counted."""
    total = 0
    for wrapper in getattr(optimizer, "chained_optimizers", [optimizer]):
        states = wrapper.optimizer.state.values()
        total += sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
        masters = (p for group in wrapper.shard_fp32_from_float16_groups for p in group if p is not None)
        total += sum(master.nbytes for master in masters)
    return float(total)


def _loss(stats: TokenStats, batch: MicroBatch) -> torch.Tensor:
    return torch.stack([-(stats.log_prob_T * batch.mask_T).sum(), batch.mask_T.sum()])


def _sample(generator: np.random.Generator) -> Sample:
    zeros = np.zeros(TOKENS // 2, dtype=np.float32)
    tokens = generator.integers(0, _SHAPE["vocab_size"], TOKENS + 1).astype(np.int32)
    return Sample(tokens, zeros, zeros.astype(np.int32), 1.0)
