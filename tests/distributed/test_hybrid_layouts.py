"""Hybrids of Gated DeltaNet and gated attention: documents of a pack, gradients, memory.

Their layouts and checkpoints: test_kinds_of_layers.py, test_checkpoints_of_kinds.py.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.hf import families
from bapo_megatron.hf.parameter_map import expert_tensors
from bapo_megatron.layers.mlp import Experts, SharedExperts
from bapo_megatron.policy.megatron import MegatronPolicy
from tests.distributed.test_policy import weighted_loss
from tests.support.layouts import Layout, layout
from tests.support.measured import Case, compare
from tests.support.models import EXPERT_HYBRID, HYBRID, HYBRIDS, VOCAB, save_tiny_model, tiny_model
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_model(family, tmp_path_factory.mktemp(family)) for family in HYBRIDS}


POISON = VOCAB - 1
"""A token whose embedding is NaN."""


def document(tokens: int, poisoned: bool) -> Sample:
    ids = torch.full((tokens,), POISON) if poisoned else torch.arange(tokens) * 37 % POISON
    zeros = np.zeros(tokens - 1)
    return Sample(ids.numpy().astype("int32"), zeros.astype("float32"), zeros.astype("int32"), 1.0)


def log_probs_beside(folder: Path, packs: list[list[Sample]], where: Layout) -> list[torch.Tensor]:
    """Of each pack the log-probs of the document that is not poisoned."""
    model = ModelConfig(folder, "float32")
    policy = MegatronPolicy(model, where.parallel, where.batch, OptimizerConfig(), 1, 1.0)
    found = []
    for documents in packs:
        [pack] = pack_samples(documents, where.pack_tokens, "sequence", policy.pack_layout)
        [stats] = policy.log_probs([pack])
        for row, start, length in pack.rows:
            if POISON not in documents[row].token_ids:
                found.append(stats.log_prob_T[start : start + length].clone())
    return found


@pytest.mark.parametrize("text", slow_but(["cp4", "tp2-sp-cp2"], "tp2-sp-cp2"))
def test_other_documents_of_a_pack_change_nothing(text: str, tmp_path: Path) -> None:
    """They come before and after, are moved and cut, and everything that they compute is NaN."""
    folder = save_tiny_model(HYBRID, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    own, longer, shorter = document(83, False), document(90, True), document(7, True)
    packs = [[own], [longer, own, shorter], [shorter, longer, own], [own, longer], [document(41, True), own]]
    where = layout(f"{text} pack256")
    for alone, *others in run_layout(log_probs_beside, where.parallel, folder, packs, where):
        assert alone.isfinite().all()
        assert len(others) == len(packs) - 1
        for other in others:
            torch.testing.assert_close(other, alone, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_shared_expert_saves_what_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the difference to a model without it, in bytes of an update's peak at TP 2 + SP."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160}
    folder = save_tiny_model(EXPERT_HYBRID, tmp_path, vocab_size=512, **sizes)
    case = Case(EXPERT_HYBRID, "bfloat16", "none", ParallelConfig(tensor=2, sequence=True))
    ranks = compare(case, folder)
    shared = families._shared_experts
    monkeypatch.setattr(families, "_shared_experts", lambda config: without_shared(shared(config)))
    for with_it, without in zip(ranks, compare(case, folder), strict=True):
        planned, measured = (
            a["activations"] - b["activations"] for a, b in zip(with_it, without, strict=True)
        )
        assert planned == measured > 0


def without_shared(experts: SharedExperts) -> Experts:
    return Experts(**{field.name: getattr(experts, field.name) for field in fields(Experts)})


def gradients_of(folder: Path, samples: list[Sample], parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    """From what a step of an Adam without momentum changes: lr g / (|g| + 1)."""
    lr = 1e4
    settings = OptimizerConfig(lr=lr, eps=1.0, clip_grad=1e9, weight_decay=0.0)
    batch = BatchConfig(pack_tokens=96)
    policy = MegatronPolicy(ModelConfig(folder, "float32"), parallel, batch, settings, 1, 1.0)
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    policy.update(pack_samples(samples, 96, "token", policy.pack_layout), weighted_loss)
    steps = {name: (before[name] - tensor).double() / lr for name, tensor in policy.hf_weights()}
    return {name: (step / (1 - step.abs())).float() for name, step in steps.items()}


def gradients_of_transformers(family: str, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Of the mean over all tokens of responses, experts one by one."""
    model, losses = tiny_model(family), []
    for sample in samples:
        ids = torch.tensor(sample.token_ids[None].astype("int64"))
        log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        losses.append(-log_probs[-sample.response_tokens :] * sample.advantage)
    torch.cat(losses).mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        experts = expert_tensors(name, parameter.shape)
        found |= {own: parameter.grad[place] for own, place in experts.items()} or {name: parameter.grad}
    return found


@pytest.mark.parametrize(
    ("family", "text"),
    slow_but(
        [(EXPERT_HYBRID, "tp2-sp-ep2"), (EXPERT_HYBRID, "one"), (HYBRID, "one")],
        (EXPERT_HYBRID, "tp2-sp-ep2"),
    ),
)
def test_gradients_are_those_of_transformers(
    family: str, text: str, folders: dict[str, Path], samples: list[Sample]
) -> None:
    """Float32 leaves 3e-5 of a gradient's largest number, in those of A_log."""
    expected, parallel = gradients_of_transformers(family, samples), layout(text).parallel
    for found in run_layout(gradients_of, parallel, folders[family], samples, parallel):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-4, atol=5e-5 * float(gradient.abs().max()), msg=name
            )
