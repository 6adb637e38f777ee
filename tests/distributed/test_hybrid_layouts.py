"""Hybrids of Gated DeltaNet and gated attention give one answer at every layout: that of transformers.

Dense ones, and those with experts and a gated shared expert.
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
from checkpoints_tools import reshard, to_hf, to_megatron, verify
from tests.distributed.test_converted_checkpoints import train_and_save
from tests.distributed.test_expert_checkpoints import load_and_look, load_both
from tests.distributed.test_layouts import Answer, Layout, answers, check_agreement, layout
from tests.distributed.test_policy import weighted_loss
from tests.support.measured import Case, compare
from tests.support.models import EXPERT_HYBRID, HYBRID, HYBRIDS, VOCAB, save_tiny_model, tiny_model
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

DENSE = [
    *("one full", "tp2-sp selective", "pp3 selective", "pp2 layers3+5", "pp2-vpp2 layers1+2+3+2 full"),
    *("cp2 pack200", "cp4", "dp2-cp2", "tp2-cp2", "tp2-sp-cp2", "pp2-cp2 full", "tp2-sp-pp2-cp2"),
    "tp2-sp-pp2-vpp2 full",
]
WITH_EXPERTS = [
    *("one full", "tp2-sp selective", "tp2-sp-etp2", "dp2-etp2", "pp3", "tp2-sp-ep2", "tp2-sp-cp2-ep2"),
    *("dp2-tp2-sp-ep2-etp2 selective", "dp2-pp2-vpp2-ep2", "tp2-sp-pp2-ep2 full"),
]
"""Any two ways to spread an update stand together in a layout."""
LAYOUTS = [*((HYBRID, text) for text in DENSE), *((EXPERT_HYBRID, text) for text in WITH_EXPERTS)]
QUICK = (
    (HYBRID, "tp2-sp-cp2"),
    (HYBRID, "pp2-vpp2 layers1+2+3+2 full"),
    (EXPERT_HYBRID, "tp2-sp-ep2"),
)
ONE, WIDE = ParallelConfig(), ParallelConfig(tensor=2, sequence=True, expert=2)
SAVED = {HYBRID: ParallelConfig(tensor=2, sequence=True, pipeline=2), EXPERT_HYBRID: WIDE}
LOADED = {
    HYBRID: [
        *(ONE, ParallelConfig(context=2), ParallelConfig(tensor=2, context=2)),
        *(ParallelConfig(pipeline=2, virtual=2), ParallelConfig(pipeline=2, pipeline_layers=(3, 5))),
    ],
    EXPERT_HYBRID: [
        *(ONE, ParallelConfig(data=2, expert=2), ParallelConfig(pipeline=2)),
        ParallelConfig(data=2, tensor=2, sequence=True, expert=2, expert_tensor=2),
    ],
}
CONVERTED = [
    *((HYBRID, layout) for layout in LOADED[HYBRID][2:4]),
    *((EXPERT_HYBRID, layout) for layout in (WIDE, LOADED[EXPERT_HYBRID][2])),
]
"""The others load the same names and shapes from the trainer's checkpoints."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_model(family, tmp_path_factory.mktemp(family)) for family in HYBRIDS}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path], samples: list[Sample]) -> dict[str, Answer]:
    return {family: answers("one", folder, samples)[0] for family, folder in folders.items()}


@pytest.mark.parametrize("family", HYBRIDS)
def test_log_probs_are_those_of_transformers(
    family: str, samples: list[Sample], references: dict[str, Answer]
) -> None:
    """Document by document: its own packs would not begin anew at each."""
    model = tiny_model(family)
    for index, sample in enumerate(samples):
        ids = torch.tensor(sample.token_ids[None].astype("int64"))
        with torch.no_grad():
            logits = model(ids).logits[0, :-1] / 0.7
        theirs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(references[family].log_probs[index], theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("family", "text"), slow_but(LAYOUTS, *QUICK))
def test_layout_agrees_with_one_process(
    family: str, text: str, folders: dict[str, Path], samples: list[Sample], references: dict[str, Answer]
) -> None:
    check_agreement(answers(text, folders[family], samples), references[family], samples)


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


@pytest.mark.parametrize("text", slow_but(["one", "tp2", "cp4", "tp2-sp-cp2"], "tp2-sp-cp2"))
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
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_shared_expert_saves_what_the_plan_says(
    recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the difference to a model without it, in bytes of an update's peak at TP 2 + SP."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160}
    folder = save_tiny_model(EXPERT_HYBRID, tmp_path, vocab_size=512, **sizes)
    case = Case(EXPERT_HYBRID, "bfloat16", recompute, ParallelConfig(tensor=2, sequence=True))
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
    ("family", "parallel"),
    slow_but([(EXPERT_HYBRID, WIDE), (EXPERT_HYBRID, ONE), (HYBRID, ONE)], (EXPERT_HYBRID, WIDE)),
)
def test_gradients_are_those_of_transformers(
    family: str, parallel: ParallelConfig, folders: dict[str, Path], samples: list[Sample]
) -> None:
    """Float32 leaves 3e-5 of a gradient's largest number, in those of A_log."""
    expected = gradients_of_transformers(family, samples)
    for found in run_layout(gradients_of, parallel, folders[family], samples, parallel):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-4, atol=5e-5 * float(gradient.abs().max()), msg=name
            )


@pytest.mark.parametrize(
    ("family", "dtype"),
    slow_but(
        [(family, dtype) for family in HYBRIDS for dtype in ("float32", "bfloat16")],
        (HYBRID, "bfloat16"),
        (EXPERT_HYBRID, "bfloat16"),
    ),
)
def test_every_layout_loads_weights_and_optimizer_bit_for_bit(
    family: str, dtype: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A checkpoint also becomes a folder of transformers, resharded or not."""
    path, folder, saved = tmp_path / "policy", folders[family], SAVED[family]
    [(digest, weights), *others] = run_layout(train_and_save, saved, folder, saved, path, dtype)
    assert all(len(values) == 1 for values in digest.values()), digest
    assert all(other[0] == digest for other in others)
    types = {name: tensor.dtype for name, tensor in weights.items()}
    kept = {name for name in types if name.endswith(("A_log", "linear_attn.norm.weight"))}
    assert {types[name] for name in kept} == {torch.float32}
    assert {types[name] for name in types.keys() - kept} == {getattr(torch, dtype)}
    if dtype == "float32":
        for layout in LOADED[family]:
            for found, same in run_layout(load_and_look, layout, folder, layout, path):
                assert found == digest, layout
                assert all(torch.equal(same[one], tensor) for one, tensor in weights.items()), layout
    reshard(path, tmp_path / "resharded", grid=3, reference=folder)
    compared = verify(path, tmp_path / "resharded", reference=folder)
    assert compared.equal
    assert compared.optimizer.startswith("compared")
    for number, source in enumerate((path, tmp_path / "resharded")):
        to_hf(source, tmp_path / f"hf {number}", reference=folder)
        converted = load_file(tmp_path / f"hf {number}/model.safetensors")
        assert converted.keys() == weights.keys()
        for name, tensor in weights.items():
            assert converted[name].dtype == tensor.dtype, name
            assert torch.equal(converted[name], tensor), name


@pytest.mark.parametrize(
    ("family", "layout"), slow_but(CONVERTED, (HYBRID, LOADED[HYBRID][2]), (EXPERT_HYBRID, WIDE))
)
def test_megatron_loads_what_the_converter_writes(
    family: str, layout: ParallelConfig, folders: dict[str, Path], tmp_path: Path
) -> None:
    other = save_tiny_model(family, tmp_path / "other", seed=2)
    to_megatron(folders[family], tmp_path / "megatron", grid=4)
    for expected, found in run_layout(
        load_both, layout, folders[family], other, layout, tmp_path / "megatron/release"
    ):
        assert expected
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
