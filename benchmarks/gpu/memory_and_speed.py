"""GPU check of an update's memory against the plan, its tokens/s and MFU, in each recompute mode."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bapo_megatron.algo.bapo import eq8_literal
from bapo_megatron.config import (
    AlgorithmConfig,
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
from bapo_megatron.hf.config import attention_flops, linear_flops_per_token, read_model_shape
from bapo_megatron.planning.job import GB, GPUS, Job, PlanOptions
from bapo_megatron.planning.memory import stage_memory
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.trainer.update_loss import UpdateLoss
from benchmarks.gpu.rows import Row, Size, seconds

LIMIT = 0.15
"""Largest relative difference between allocated and planned memory, estimates included."""

SEARCH_LIMIT = 0.45
"""Largest share of an update's time for the bounds search: by FLOPs a forward pass is a third."""


def rows(size: Size, folder: Path) -> Iterator[Row]:
    path = save(size, folder / "policy")
    for recompute in ("none", "selective", "full"):
        try:
            yield from of_mode(size, path, BatchConfig(pack_tokens=size.pack, recompute=recompute))
        except torch.cuda.OutOfMemoryError:
            yield Row(f"recompute {recompute}", "out of memory", "fits", False)
        gc.collect()  # a policy is a reference cycle and would count in the next measurement
        torch.cuda.empty_cache()


def save(size: Size, path: Path) -> Path:
    """Write the model with random weights as a Hugging Face folder. Returns the folder."""
    import transformers

    config = transformers.Qwen2Config(
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocab,
        max_position_embeddings=size.pack,
        tie_word_embeddings=False,
    )
    transformers.Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def of_mode(size: Size, path: Path, batch: BatchConfig) -> Iterator[Row]:
    """Rows of one recompute mode."""
    model = ModelConfig(path, dtype="bfloat16")
    policy = MegatronPolicy(model, ParallelConfig(), batch, OptimizerConfig(), planned_updates=100)
    samples = draw(size)
    packs = pack_samples(samples, size.pack, "token", policy.pack_layout)
    clipping = UpdateLoss(AlgorithmConfig(bounds=eq8_literal()))

    def update() -> None:
        loss = clipping.loss(policy, packs, on_policy=True)
        policy.update(packs, loss)

    def search() -> None:
        clipping.loss(policy, packs, on_policy=False)

    took = seconds(update, rounds=2)
    tokens = sum(sample.positions for sample in samples)
    name = f"recompute {batch.recompute}"
    yield Row(f"{name}: speed", f"{tokens / took:,.0f} tokens/s{utilization(path, samples, took)}")
    searched = seconds(search, rounds=2)
    limit, ok = f"{SEARCH_LIMIT:.0%}", None if size.tiny else searched < SEARCH_LIMIT * took
    yield Row(f"{name}: bounds search", f"{searched:.2f} s, {searched / took:.0%} of an update", limit, ok)
    if size.cuda:
        torch.cuda.reset_peak_memory_stats()
        update()
        measured, planned = torch.cuda.max_memory_allocated() / GB, predicted(path, batch, size) / GB
        missed = abs(measured / planned - 1)
        # At tiny size most of it is library workspaces, which the plan counts in its reserve.
        ok = None if size.tiny else missed < LIMIT
        yield Row(f"{name}: memory", f"{measured:.1f} GB, planned {planned:.1f}", f"within {LIMIT}", ok)


def draw(size: Size) -> list[Sample]:
    """One sample per pack, which fills it."""
    generator = np.random.default_rng(0)
    return [
        Sample(
            token_ids=generator.integers(0, size.vocab, size.pack).astype(np.int32),
            log_probs_R=np.full(size.pack - 8, -np.log(size.vocab), np.float32),
            versions_R=np.zeros(size.pack - 8, np.int32),
            advantage=float(generator.normal()),
        )
        for _ in range(size.packs)
    ]


def predicted(path: Path, batch: BatchConfig, size: Size) -> float:
    """Planned bytes of an update, without the reserve for CUDA, NCCL and fragmentation.

    On a GPU torch's layers keep what Transformer Engine's do: norms, SwiGLU and attention are fused. Only on
    a CPU they keep more.
    """
    run = RunConfig(
        name="gpu-check",
        model=ModelConfig(path),
        data=DataConfig(path, max_prompt_tokens=8),
        rollout=RolloutConfig(prompts_per_step=1, group_size=size.packs, max_response_tokens=size.pack - 8),
        batch=batch,
    )
    job = Job(run, read_model_shape(path), PlanOptions(mean_response_tokens=size.pack - 8))
    memory = stage_memory(job, 0, "te" if size.cuda else "torch")
    return memory.training - memory.reserve


def utilization(path: Path, samples: list[Sample], took: float) -> str:
    """Model FLOPs utilization as text, empty for an unknown GPU."""
    peak = next((gpu.peak for gpu in GPUS.values() if _is(gpu.name)), None)
    if peak is None:
        return ""
    shape = read_model_shape(path)
    lengths = [sample.positions for sample in samples]
    flops = sum(n * linear_flops_per_token(shape) + attention_flops(shape, n) for n in lengths)
    return f", {3 * flops / took / peak:.0%} of the peak"


def _is(name: str) -> bool:
    return torch.cuda.is_available() and name.split("-")[0].upper() in torch.cuda.get_device_name()
