"""GPU check of the layers (Transformer Engine's, if installed): weights in and out, packed documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.policy.device import uses_transformer_engine
from bapo_megatron.policy.megatron import MegatronPolicy
from benchmarks.gpu.rows import Row, Size

POLICY = Path(__file__).parents[2] / "recipes/demo/policy"
LIMIT = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest log-prob difference in nats: packed attention kernels add in another order."""


def rows(size: Size, _folder: Path) -> Iterator[Row]:
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if size.cuda else "float32"
    policy = MegatronPolicy(
        ModelConfig(POLICY, dtype=dtype), ParallelConfig(), BatchConfig(pack_tokens=256), OptimizerConfig(), 1
    )
    layers = "Transformer Engine" if uses_transformer_engine(getattr(torch, dtype)) else "torch"
    yield weights_row(layers, policy, POLICY, getattr(torch, dtype))
    apart, limit = packed_against_alone(policy), LIMIT[dtype]
    yield Row(
        f"{layers}: documents packed (thd) against one a pack, {dtype}",
        f"{apart:.1e} nats in the worst token",
        f"{limit}",
        apart < limit,
    )


def weights_row(layers: str, policy: MegatronPolicy, folder: Path, dtype: torch.dtype) -> Row:
    """Row: whether the policy returns the weights of its folder bit by bit. ``layers``: their name."""
    wrong = wrong_tensors(policy, folder, dtype)
    count = len(hf_tensors(read_model_shape(folder)))
    said = f"{count - len(wrong)} of {count} equal" + "".join(f", not {name}" for name in wrong[:3])
    return Row(f"{layers}: weights of a Hugging Face folder, in and out", said, "all, bit by bit", not wrong)


def wrong_tensors(policy: MegatronPolicy, folder: Path, dtype: torch.dtype) -> list[str]:
    """Names of the folder's tensors that the policy does not return bit by bit."""
    reader, equal = HfReader(folder), dict.fromkeys(hf_tensors(read_model_shape(folder)), False)
    for name, tensor in policy.hf_weights():
        equal[name] = bool(torch.equal(tensor.cpu(), reader.read(name).to(dtype)))
    return [name for name, is_equal in equal.items() if not is_equal]


def packed_against_alone(policy: MegatronPolicy) -> float:
    """Largest log-prob difference of a token between a pack of several documents and packs of one.

    A kernel that ignores document bounds lets a token attend to the document before its own.
    """
    generator = np.random.default_rng(0)
    vocabulary = read_model_shape(POLICY).vocab
    samples = [random_sample(generator, length, vocabulary) for length in (17, 64, 3, 40, 33)]
    together = pack_samples(samples, 256, "token", policy.pack_layout)
    packed = log_probs_of(policy, together)
    alone = [log_probs_of(policy, pack_samples([doc], 256, "token", policy.pack_layout)) for doc in samples]
    # Packing may reorder documents, so sorted log-probs are compared.
    return float((packed.sort().values - torch.cat(alone).sort().values).abs().max())


def log_probs_of(policy: MegatronPolicy, packs: list) -> torch.Tensor:  # type: ignore[type-arg]
    """Log-probs of the trained tokens of all packs, in pack order."""
    stats = policy.log_probs(packs)
    return torch.cat([out.log_prob_T[pack.mask_T.bool()] for out, pack in zip(stats, packs, strict=True)])


def random_sample(generator: np.random.Generator, length: int, vocabulary: int) -> Sample:
    """Random tokens; the first two are the prompt."""
    return Sample(
        token_ids=generator.integers(0, vocabulary, length).astype(np.int32),
        log_probs_R=np.full(length - 2, -1.0, np.float32),
        versions_R=np.zeros(length - 2, np.int32),
        advantage=1.0,
    )
