"""The frozen reference of a run: its column, the penalty in rewards, its record, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.algo.advantages import grpo
from bapo_megatron.config import (
    AlgorithmConfig,
    ReferenceKlConfig,
    RunConfig,
    load_recipe,
)
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.train import train_on
from bapo_megatron.trainer import reference
from bapo_megatron.trainer.preflight import check_reference
from bapo_megatron.trainer.update_loss import UpdateLoss
from tests.support.batches import MemoryBatch, in_memory
from tests.support.runs import run_of
from tests.support.small_steps import LN2, NotedPolicy, group, rollout, run_config
from tests.unit.trainer.test_update_loss import column

pytestmark = pytest.mark.usefixtures("one_process_group")

ROOT = Path(__file__).parents[3]
POLICY = ROOT / "recipes/demo/policy"


class ReferredPolicy(NotedPolicy):
    """The reference gives half the engine's probability to every token, and the log-probs rise by ln 2."""

    def __init__(self) -> None:
        super().__init__(drift=LN2)

    def reference_log_probs(self, batches: Sequence[MicroBatch]) -> list[TokenStats]:
        self.calls.append("reference_log_probs")
        values = [(b.rollout_log_prob_T - LN2) * b.mask_T for b in batches]
        return [TokenStats(value_T, torch.ones_like(value_T)) for value_T in values]


def responses(*masks: list[bool]) -> MemoryBatch:
    """Of rewards 0 and 1, sampled with probability 1/8."""
    made = (
        rollout(reward, len(mask), -3 * LN2, loss_mask_R=np.array(mask)) for reward, mask in enumerate(masks)
    )
    return in_memory(group(*made))


BATCH = responses([True], [True] * 3)


def referred(config: ReferenceKlConfig, **algorithm: Any) -> Any:
    """A run with this reference, of two updates a step."""
    settings = AlgorithmConfig(reuse_epochs=2, advantage="dr_grpo", reference_kl=config, **algorithm)
    return run_of(run_config(settings), ReferredPolicy(), UpdateLoss(settings))


def step(
    config: ReferenceKlConfig, batch: MemoryBatch = BATCH, **algorithm: Any
) -> tuple[list[Any], ReferredPolicy]:
    run = referred(config, **algorithm)
    computed, inner = run.policy.calls, run.advantage
    run.advantage = lambda rewards: computed.append("advantage") or inner(rewards)
    return train_on(run, 1, batch), run.policy


def test_one_pass_a_step_gives_every_update_the_column() -> None:
    updates, policy = step(ReferenceKlConfig(0.1))
    assert policy.calls.count("reference_log_probs") == 1
    assert policy.calls[:2] == ["advantage", "reference_log_probs"]
    assert len(policy.packs) == len(updates) == 2
    for packs in policy.packs:
        assert column(packs, "reference_log_prob_T") == pytest.approx([-4 * LN2] * 4)
        assert column(packs, "advantage_T") == pytest.approx([0.5, 0.5, 0.5, -0.5])
    # pi is 2 and then 4 times the engine's, so 4 and 8 times the reference's.
    assert [row["reference_kl/k1"] for row in updates] == pytest.approx([2 * LN2, 3 * LN2])
    assert updates[0]["reference_kl/penalty"] == pytest.approx(0.1 * (0.25 - 1 + 2 * LN2))


def test_without_a_coefficient_there_is_no_pass() -> None:
    updates, policy = step(ReferenceKlConfig(0.0, model=Path("elsewhere")))
    assert "reference_log_probs" not in policy.calls
    assert not any(name.startswith("reference_kl/") for row in updates for name in row)
    assert not any(column(packs, "reference_log_prob_T")[0] for packs in policy.packs)


@pytest.mark.parametrize(("old", "k1"), [("rollout", LN2), ("trainer", 2 * LN2)])
def test_the_reward_loses_the_penalty_before_the_advantages(old: str, k1: float) -> None:
    """Rewards 0 - 0.2 k1 and 1 - 0.2 * 3 k1: advantages -+(1 - 0.4 k1) / 2. pi_old is that of the loss."""
    updates, policy = step(ReferenceKlConfig(0.2, "k1", "reward"), old_log_probs=old)
    value = (1 - 0.4 * k1) / 2
    for packs in policy.packs:
        assert column(packs, "advantage_T") == pytest.approx([value, value, value, -value])
    assert updates[0]["reference_kl/penalty"] == pytest.approx(0.2 * k1)
    order = [*(["log_probs"] if old == "trainer" else []), "reference_log_probs", "advantage"]
    assert (policy.calls[: len(order)], policy.calls.count("advantage")) == (order, 1)


def test_tokens_that_are_not_trained_on_cost_no_reward() -> None:
    """The second response has three tokens, of which a tool wrote two: both lose one k1."""
    _, policy = step(ReferenceKlConfig(0.2, "k1", "reward"), responses([True], [True, False, False]))
    assert sorted(column(policy.packs[0], "advantage_T")) == pytest.approx([-0.5, 0.5])


def test_a_broken_reference_ends_the_step() -> None:
    class Broken(ReferredPolicy):
        def reference_log_probs(self, batches: Sequence[MicroBatch]) -> list[TokenStats]:
            return [TokenStats(b.mask_T / 0.0, b.mask_T) for b in batches]

    config = ReferenceKlConfig(0.1)
    samples = [reference.Sample(np.zeros(4, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), 1.0)]
    with pytest.raises(FloatingPointError, match="not finite: .* of the reference have"):
        reference.with_reference(Broken(), [samples], BATCH.header, config, 8, grpo)  # type: ignore[arg-type]


def demo(**reference_kl: Any) -> RunConfig:
    config = load_recipe(ROOT / "recipes/demo_cpu.py", RunConfig)
    algorithm = dataclasses.replace(config.algorithm, reference_kl=ReferenceKlConfig(**reference_kl))
    return dataclasses.replace(config, algorithm=algorithm)


def folder_like(tmp_path: Path, **config: Any) -> Path:
    """A copy of the demo's policy with another config.json."""
    folder = tmp_path / "reference"
    folder.mkdir()
    for path in POLICY.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return folder


def check(folder: Path, **settings: Any) -> None:
    known = json.loads((POLICY / "tokenizer.json").read_text())
    added = {one["content"]: one["id"] for one in known["added_tokens"]}
    tokenizer = SimpleNamespace(get_vocab=lambda: {**known["model"]["vocab"], **added})
    check_reference(demo(model=folder, **{"coefficient": 0.1, **settings}), tokenizer)


def exchange_words(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (
            {"rope_theta": 77.0, "rope_parameters": {"rope_theta": 77.0}},
            lambda _folder: None,
            "another shape than the policy",
        ),
        ({}, exchange_words, "another tokenizer vocabulary"),
        ({}, lambda folder: (folder / "model.safetensors").unlink(), "reference"),
        ({}, shutil.rmtree, r"algorithm\.reference_kl\.model=.*reference: no config\.json there"),
    ],
)
def test_another_reference_is_refused(config: Any, change: Any, says: str, tmp_path: Path) -> None:
    folder = folder_like(tmp_path, **config)
    change(folder)
    with pytest.raises(ConfigError, match=says):
        check(folder)
    check(folder, coefficient=0.0)  # nothing is loaded
