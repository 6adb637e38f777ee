"""The frozen reference at every layout: its log-probs are those of a policy that is the reference, and the
policy's state has the same bits after each swap. Updates with it, and with a teacher's column."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from bapo_megatron.algo.advantages import grpo
from bapo_megatron.algo.bapo import balanced
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    DistillationConfig,
    ParallelConfig,
    ReferenceKlConfig,
)
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.train import train_on
from bapo_megatron.trainer.corrections import response_log_probs, with_old_log_probs
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import Metrics
from tests.distributed.test_offload import Device, LateDevice, build, update
from tests.distributed.test_old_log_probs import batch
from tests.support.batches import MemoryBatch, in_memory, samples_of
from tests.support.layouts import layout
from tests.support.metrics import known
from tests.support.models import VOCAB, random_samples, save_tiny_model
from tests.support.policies import stepping, weights_of
from tests.support.runs import run_of
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen2 has biases, and an output layer of its own; the embedding of llama is tied. Two seeds each."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "llama"):
        save_tiny_model(family, folder / family, seed=0)
        save_tiny_model(family, folder / f"{family}_reference", seed=1)
    return folder


def samples() -> list[Sample]:
    """Samples of many lengths, and one with a tool's tokens, which are not trained on."""
    generator = np.random.default_rng(5)
    tool = Sample(
        generator.integers(0, VOCAB, 30).astype(np.int32),
        generator.normal(size=20).astype(np.float32),
        np.zeros(20, np.int32),
        1.0,
        loss_mask_R=np.arange(20) // 5 != 2,
    )
    return [*random_samples(11, seed=3), tool]


def reference_digest(policy: MegatronPolicy) -> list[str]:
    """Digest of the weights that the policy's model has in the reference's turn."""
    with policy._reference.in_place():  # type: ignore[union-attr]
        return policy.state_digest()["weights"]


class Outcome(NamedTuple):
    reference: list[list[np.ndarray]]
    """Log-probs of the reference: before the first update, after two, and after the policy was offloaded."""
    digest: list[str]
    states: list[dict[str, list[str]]]
    """Digests of weights and optimizer before and after each use of the reference."""
    weights: dict[str, torch.Tensor]


def outcome(models: Path, family: str, text: str, dtype: str, device: Device, uses: bool) -> Outcome:
    """Two updates, with the reference used before, between and after them; or without it."""
    policy, given = build(models / family, text, dtype, device, TEMPERATURE), samples()
    found, states, digest = [], [], []

    def use() -> None:
        if uses:
            states.append(policy.state_digest())
            found.append(response_log_probs(policy, given, 96, policy.reference_log_probs))
        states.append(policy.state_digest())

    if uses:
        policy.load_reference(models / f"{family}_reference")
        digest = reference_digest(policy)
    use()
    update(policy, given)
    use()
    policy.offload()
    policy.reload()
    use()
    update(policy, given)
    return Outcome(found, digest, states, weights_of(policy))


def as_policy(models: Path, family: str, text: str, dtype: str) -> tuple[list[np.ndarray], list[str]]:
    """Log-probs by ``with_old_log_probs``, and digest, of a policy that is the reference."""
    policy = build(models / f"{family}_reference", text, dtype, "model", TEMPERATURE)
    [found] = with_old_log_probs(policy, [samples()], 96, None)
    return [one.old_log_probs_R for one in found], policy.state_digest()["weights"]  # type: ignore[misc]


CASES = [
    ("one", "qwen2", "float32", "model"),
    ("tp2-sp", "llama", "bfloat16", "model"),
    ("pp2-vpp2", "qwen2", "bfloat16", "cpu"),
    ("cp2", "qwen2", "float32", "model"),
    ("pp2", "llama", "float32", "model"),
    ("dp2-tp2-sp", "llama", "bfloat16", "cpu"),
]


@pytest.mark.parametrize(("text", "family", "dtype", "device"), slow_but(CASES, *CASES[:4]), ids=str)
def test_the_reference_is_as_a_policy_of_its_own_and_leaves_the_policy_as_it_is(
    text: str, family: str, dtype: str, device: Device, models: Path
) -> None:
    """Bit for bit: log-probs at the same layout and temperature, before and after updates; weights, master
    weights and moments of the policy after each use, and after updates that follow, as without it."""
    parallel = layout(text).parallel
    ranks = run_layout(outcome, parallel, models, family, text, dtype, device, True)
    without = run_layout(outcome, parallel, models, family, text, dtype, device, False)
    expected = run_layout(as_policy, parallel, models, family, text, dtype)
    for ours, plain, (log_probs, digest) in zip(ranks, without, expected, strict=True):
        assert len(ours.reference) == 3
        for found in ours.reference:
            for mine, theirs in zip(found, log_probs, strict=True):
                np.testing.assert_array_equal(mine, theirs)
        tool = ours.reference[0][-1]
        assert not tool[10:15].any()
        assert (tool[:10] != 0).all()
        assert ours.digest == digest != plain.states[0]["weights"]
        assert ours.states[::2] == ours.states[1::2] == plain.states
        assert len(plain.states[0]["weights"]) == 1  # all copies agree
        assert plain.states[1] != plain.states[0]
        assert all(torch.equal(ours.weights[name], tensor) for name, tensor in plain.weights.items())


def on_a_late_device(models: Path) -> tuple[list[list[str]], list[int], list[int]]:
    """Digests of the policy before and after, then twice of the reference; copies that a call left undone."""
    policy = build(models / "qwen2", "one", "bfloat16", "model", TEMPERATURE)
    before = policy.state_digest()["weights"]
    device, left, copies = LateDevice(), [], []
    device.install()
    policy.load_reference(models / "qwen2_reference")
    left.append(len(device.waiting))
    found = []
    for _ in range(2):
        found.append(reference_digest(policy))
        left.append(len(device.waiting))
        copies.append(device.copies)
    return [before, policy.state_digest()["weights"], *found], left, copies


def test_a_swap_waits_for_the_device(models: Path) -> None:
    """Copies of a stream, which happen when it is waited for: none is left, and all bits are right."""
    [((before, after, *references), left, copies)] = run_layout(on_a_late_device, ParallelConfig(), models)
    [(_, digest)] = run_layout(as_policy, ParallelConfig(), models, "qwen2", "one", "bfloat16")
    assert after == before
    assert references == [digest, digest]
    assert left == [0, 0, 0]
    assert copies[1] - copies[0] > 50


def refusals(models: Path) -> list[str]:
    policy, told = build(models / "qwen2", "one", "float32", "model", TEMPERATURE), []
    packs = pack_samples(samples(), 96, "token", policy.pack_layout)

    def call(match: str, *functions: Any) -> None:
        for function in functions:
            with pytest.raises(RuntimeError, match=match) as raised:
                function()
            told.append(str(raised.value))

    call("there is no reference", lambda: policy.reference_log_probs(packs))
    policy.load_reference(models / "qwen2_reference")
    policy.offload()
    call(
        "the policy is offloaded",
        lambda: policy.load_reference(models / "qwen2_reference"),
        lambda: policy.reference_log_probs(packs),
    )
    policy.reload()
    before, sound = policy.state_digest(), policy._passes.stats
    policy._passes.stats = _fails  # type: ignore[method-assign]
    call("a pass fails", lambda: policy.reference_log_probs(packs))
    policy._passes.stats = sound  # type: ignore[method-assign]
    assert policy.state_digest() == before
    return told


def _fails(*_arguments: Any, **_more: Any) -> Any:
    raise RuntimeError("a pass fails")


def test_a_pass_that_fails_leaves_the_policy_and_a_missing_reference_is_named(models: Path) -> None:
    [told] = run_layout(refusals, ParallelConfig(), models)
    assert told[0] == "reference_log_probs: there is no reference; call load_reference() first"
    assert len(told) == 4


Trained = tuple[list[Metrics], dict[str, torch.Tensor]]

IN_LOSS = AlgorithmConfig(
    balanced(),
    reuse_epochs=2,
    updates_per_epoch=2,
    loss_mean="sequence",
    reference_kl=ReferenceKlConfig(0.5, "k3"),
)
IN_REWARD = AlgorithmConfig(
    balanced(),
    reuse_epochs=2,
    updates_per_epoch=2,
    old_log_probs="trainer",
    reference_kl=ReferenceKlConfig(0.02, "k1", "reward"),
    distillation=DistillationConfig(0.5),
)


def taught(given: MemoryBatch, policy: MegatronPolicy) -> MemoryBatch:
    """The batch with the log-probs of the policy's reference as the teacher's."""
    rows = [one.loaded() for group in samples_of(given, grpo) for one in group]
    columns = iter(response_log_probs(policy, rows, 96, policy.reference_log_probs))
    groups = []
    for group in given.batch.groups:
        rollouts = tuple(replace(one, teacher_log_probs_R=next(columns)) for one in group.rollouts)
        groups.append(replace(group, rollouts=rollouts))
    return in_memory(*groups)


def step(models: Path, parallel: ParallelConfig, algorithm: AlgorithmConfig) -> Trained:
    """A whole step with the penalty, whose updates shuffle groups between the replicas.

    The reference is the teacher, too: the step's columns have its log-probs.
    """
    chunks = BatchConfig(pack_tokens=96, logprob_chunk_tokens=40)
    config, policy = stepping(models / "qwen2", parallel, algorithm, TEMPERATURE, batch=chunks)
    policy.load_reference(models / "qwen2_reference")
    given = batch(0.0)
    if algorithm.distillation.enabled:
        given = taught(given, policy)
    metrics = train_on(run_of(config, policy, UpdateLoss(algorithm)), 1, given)
    return metrics, weights_of(policy)


@pytest.mark.parametrize("algorithm", [IN_LOSS, IN_REWARD], ids=["loss", "reward and a teacher"])
def test_every_layout_makes_the_same_updates(algorithm: AlgorithmConfig, models: Path) -> None:
    """The distances to the reference and to a teacher with its log-probs are the same numbers."""
    one = ParallelConfig()
    [(metrics, weights)] = run_layout(step, one, models, one, algorithm)
    assert all(row["reference_kl/k3"] > 0.1 for row in metrics)  # type: ignore[operator]
    for row in metrics if algorithm.distillation.enabled else ():
        assert [row[f"distillation/{kind}"] for kind in ("k1", "k3")] == pytest.approx(
            [row[f"reference_kl/{kind}"] for kind in ("k1", "k3")], rel=1e-6
        )
        assert row["distillation/loss"] > 0.1  # type: ignore[operator]
    for text in ("dp3", "tp2-sp", "pp2-vpp2", "dp2-cp2"):
        parallel = layout(text).parallel
        for ours, own_weights in run_layout(step, parallel, models, parallel, algorithm):
            for row, expected in zip(ours, metrics, strict=True):
                assert known(row) == pytest.approx(known(expected), rel=1e-4, abs=1e-5), text
            for name, tensor in own_weights.items():
                torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)
