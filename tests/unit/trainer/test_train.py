"""What the loop hands to the policy (advantages, weights, bounds, versions), and saves before an error."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from bapo_megatron.algo.bapo import balanced, published_code
from bapo_megatron.checkpoint.store import Saved
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
)
from bapo_megatron.errors import ConfigError, Preempted, RunStopped, StorageFailed
from bapo_megatron.interfaces import Need
from bapo_megatron.train import next_batch, train, train_on
from bapo_megatron.trainer import flow_control
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.flow_control import evaluate_if_due, give_gpus_to_engines, give_gpus_to_policy
from bapo_megatron.trainer.resume import PartialStep
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import (
    GIVEN,
    Group,
    MicroBatch,
    PackLayout,
    Prompt,
    Rollout,
    SearchedLoss,
    StepHeader,
    TokenFn,
    TokenStats,
    UpdateResult,
)
from tests.support.batches import NO_FILE, in_memory
from tests.support.runs import Asked, run_of

CONFIG = RunConfig("test", ModelConfig(Path("m")), DataConfig(Path("d")), batch=BatchConfig(pack_tokens=8))


HEADER = StepHeader((), {}, NO_FILE)


class RecordingPolicy:
    """Thinks twice as much of every token as the sampling policy did; remembers what it was given."""

    pack_layout = PackLayout()
    has_experts = False

    def __init__(self) -> None:
        self.version = 10
        self.packs: list[Sequence[MicroBatch]] = []
        self.losses: list[torch.Tensor] = []
        self.searched: list[str] = []
        self.calls: list[str] = []
        self.old_calls = 0

    def save(self, path: Path) -> None:
        raise AssertionError("the store of these tests writes nothing")

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        self.calls.append("old_sums")
        self.old_calls += 1
        stats = [TokenStats(b.old_log_prob_T, torch.ones_like(b.mask_T)) for b in batches]
        return sum(fn(s, b) for s, b in zip(stats, batches, strict=True))

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        self.calls.append("token_sums")
        stats = [TokenStats(b.rollout_log_prob_T + np.log(2), torch.ones_like(b.mask_T)) for b in batches]
        return sum(fn(s, b) for s, b in zip(stats, batches, strict=True))

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn | SearchedLoss) -> UpdateResult:
        self.packs.append(batches)
        if isinstance(loss, SearchedLoss):
            self.searched.append(loss.over)
            loss = loss.loss_of(self.token_sums(batches, loss.measure))
        sums = self.token_sums(batches, loss)
        self.calls.clear()
        self.losses.append(sums)
        self.version += 1
        return UpdateResult(sums, 0.5, 1e-6)


def group(rewards: list[float], lengths: list[int]) -> Group:
    rollouts = tuple(
        Rollout(
            np.full(length, 3, np.int32),
            np.full(length, -1.0, np.float32),
            np.full(length, 8, np.int32),
            "stop",
            reward,
        )
        for reward, length in zip(rewards, lengths, strict=True)
    )
    return Group(Prompt(0, np.array([1, 2], np.int32), "", ""), rollouts)


class Store:
    """A ``CheckpointStore`` that writes nothing."""

    def __init__(self) -> None:
        self.newest = (0, 0)
        self.scores: dict[int, float] = {}
        self.begun: list[tuple[tuple[int, int], dict[str, Any]]] = []
        self._is_pending = False

    def begin(self, moment: tuple[int, int], save: object, trainer: dict[str, Any]) -> None:
        self.newest, self._is_pending = moment, True
        self.begun.append((moment, trainer))

    def oldest_step(self) -> int:
        return 0

    def record_score(self, step: int, score: float) -> None:
        self.scores[step] = score

    def finalize(self, wait: bool) -> Saved | None:
        is_pending, self._is_pending = self._is_pending, False
        return Saved(*self.newest, 1.0) if is_pending else None


def run_with(**algorithm: object) -> tuple[Run, RecordingPolicy]:
    policy = RecordingPolicy()
    config = dataclasses.replace(CONFIG, algorithm=AlgorithmConfig(**algorithm))
    update_loss = UpdateLoss(config.algorithm)
    return run_of(config, policy, update_loss, Store()), policy


@pytest.mark.parametrize(
    ("advantage", "expected"), [("dr_grpo", [-0.5, 0.5]), ("grpo", [-(0.5**0.5), 0.5**0.5])]
)
def test_advantages_are_the_configured_ones(advantage: str, expected: list[float]) -> None:
    """Rewards 0 and 1: mean 1/2; sample standard deviation 1 / sqrt(2)."""
    run, policy = run_with(advantage=advantage)
    train_on(run, 1, in_memory(group([0.0, 1.0], [1, 1])))
    values = {float(v) for pack in policy.packs[0] for v in pack.advantage_T[pack.mask_T != 0]}
    assert sorted(values) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("loss_mean", "expected"), [("token", [1.0, 1.0]), ("sequence", [2 / 3, 2.0])])
def test_weights_are_the_configured_ones(loss_mean: str, expected: list[float]) -> None:
    """Responses of 1 and 3 tokens, mean 2."""
    run, policy = run_with(loss_mean=loss_mean)
    train_on(run, 1, in_memory(group([0.0, 1.0], [1, 3])))
    values = {float(v) for pack in policy.packs[0] for v in pack.weight_T[pack.mask_T != 0]}
    assert sorted(values) == pytest.approx(sorted(set(expected)))


def test_bounds_are_searched_over_the_whole_update() -> None:
    """Ratio 2 everywhere. Positive tokens are dead until c_high passes 2.0: 17 moves from 1.2 to 2.05."""
    run, policy = run_with(bounds=balanced(), advantage="dr_grpo")
    groups = (group([0.0, 1.0], [3, 3]), group([0.0, 1.0], [4, 4]))
    [metrics] = train_on(run, 1, in_memory(*groups))
    assert len(policy.packs[0]) > 1
    assert metrics["bapo/clip_high"] == pytest.approx(2.05)
    assert metrics["bapo/clip_low"] == 0.6
    assert metrics["bapo/rounds"] == 17
    assert (metrics["bapo/bounds_moved"], metrics["bapo/moved_tokens"]) == (1.0, 1.0)
    assert metrics["bapo/reached"] == 1.0
    # The loss was made with them: half of the 14 tokens at -0.5 * 2, half at +0.5 * 2.
    assert float(policy.losses[0][0]) == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy/kl"] == pytest.approx(2 - 1 - np.log(2), rel=1e-5)


def test_micro_batch_scope_needs_no_pass_before_the_update() -> None:
    """The published code's target on P / N is 1: ratio 2 is clipped at 1.2 while negatives count fully."""
    run, policy = run_with(bounds=published_code())
    [metrics] = train_on(run, 1, in_memory(group([0.0, 1.0], [3, 3])))
    assert policy.searched == ["micro_batch"]
    assert metrics["bapo/rounds"] > 0


class EndlessSampler:
    """Has nothing twice, then a batch; or nothing ever more."""

    def __init__(self, stops: bool) -> None:
        self.asked: list[int] = []
        self.kept_from: list[int] = []
        self._stops = stops

    def next_batch(self, step: int, wait_s: float) -> StepHeader | None:
        self.asked.append(step)
        if len(self.asked) < 3:
            return None
        if self._stops:
            raise RunStopped("no engine is left")
        return HEADER

    def state(self) -> dict[str, Any]:
        return {"place": 7}

    def checkpointed(self, oldest: int) -> None:
        self.kept_from.append(oldest)


def test_ranks_meet_regularly_while_rank_0_waits_for_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    met, opened = [], []
    told = lambda value: met.append(value) or value  # noqa: E731
    monkeypatch.setattr("bapo_megatron.trainer.flow_control.broadcast_from_main", told)
    monkeypatch.setattr("bapo_megatron.trainer.flow_control.on_all_ranks", opened.append)
    run, _ = run_with()
    run.sampler = EndlessSampler(stops=False)  # type: ignore[assignment]
    batch = next_batch(run, 4)
    assert batch.header is HEADER
    assert met == [None, None, HEADER]
    assert opened == [batch.open]


def test_a_step_whose_file_a_rank_does_not_see_is_saved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)

    def fails(call: object) -> None:
        raise StorageFailed("rank 3: journal/step_000013.npz on node-7: no such file")

    monkeypatch.setattr("bapo_megatron.trainer.flow_control.on_all_ranks", fails)
    run, _ = run_with()
    run.checkpoints.newest = (10, 0)
    run.sampler = EndlessSampler(stops=False)  # type: ignore[assignment]
    with pytest.raises(StorageFailed, match="rank 3: .* on node-7: no such file"):
        next_batch(run, 13)
    assert [moment for moment, _ in run.checkpoints.begun] == [(12, 0)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("step", "newest", "saved"), [(1, 0, []), (11, 10, []), (13, 10, [(12, 0)])])
def test_a_run_that_lost_its_engines_saves_a_checkpoint(
    step: int, newest: int, saved: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless there is a checkpoint of that moment, and before step 1 there is nothing to save."""
    alone(monkeypatch)
    run, _ = run_with()
    run.checkpoints.newest = (newest, 0)
    run.sampler = EndlessSampler(stops=True)  # type: ignore[assignment]
    with pytest.raises(RunStopped, match="no engine is left"):
        next_batch(run, step)
    assert [moment for moment, _ in run.checkpoints.begun] == saved  # type: ignore[attr-defined]


@pytest.mark.parametrize(("policy_has_gpus", "saved"), [(True, [(12, 0)]), (False, [])])
@pytest.mark.parametrize("to", ["to_engines", "to_policy"])
def test_a_handover_that_fails_saves_what_can_be_saved(
    to: str, policy_has_gpus: bool, saved: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that cannot continue: always, since a save brings the policy back. A lost policy has no
    state."""
    alone(monkeypatch)
    run, _ = run_with()
    run.checkpoints.newest = (10, 0)

    class Handover:
        def __init__(self) -> None:
            self.policy_has_gpus = policy_has_gpus

        def to_policy(self) -> None:
            if to == "to_policy" and not asked:  # the save asks once more
                asked.append(to)
                raise RunStopped("the memory is lost")

        def to_engines(self) -> None:
            raise RunStopped("no server can continue")

    asked: list[str] = []
    run.handover = Handover()  # type: ignore[assignment]
    give = give_gpus_to_engines if to == "to_engines" else give_gpus_to_policy
    with pytest.raises(
        RunStopped, match="no server can continue" if to == "to_engines" else "the memory is lost"
    ):
        give(run, 12)
    expected = [(12, 0)] if to == "to_engines" else saved
    assert [moment for moment, _ in run.checkpoints.begun] == expected  # type: ignore[attr-defined]


def test_training_waits_for_an_evaluation_and_records_its_score(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Engines that were lost meanwhile get the present weights once more. By hand: 2 of 4 are right."""
    alone(monkeypatch)
    run, policy = run_with()
    run.config = dataclasses.replace(run.config, evaluation=EvaluationConfig(every=5, suites=("s",)))
    path, answers, told = tmp_path / "step_000010.jsonl", [None, Need.WEIGHTS, None], []
    row = {"suite": "s", "tokens": 3, "finish_reason": "stop", "failure": None, "response": ""}
    rows = [{**row, "problem": n // 2, "sample": n % 2, "correct": n < 2} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Parts:
        """A sampler, a way to the engines, and a recorder."""

        def evaluated(self, step: int, wait_s: float) -> Any:
            assert step == 10
            return answers.pop(0) if answers else path

        def push(self, pushed: Any, step: int) -> None:
            assert (pushed, step, answers) == (policy, 10, [None])

        def evaluation(self, step: int, metrics: dict[str, Any]) -> None:
            told.append((step, metrics["eval/mean"], metrics["eval/s/problems"]))

    run.sampler = run.sync = run.recorder = Parts()  # type: ignore[assignment]
    evaluate_if_due(run, 9)
    evaluate_if_due(run, 10)
    assert told == [(10, 0.5, 2)]
    assert run.checkpoints.scores == {10: 0.5}  # type: ignore[attr-defined]


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other ranks to tell."""
    monkeypatch.setattr("bapo_megatron.trainer.flow_control.broadcast_from_main", lambda value: value)
    monkeypatch.setattr("bapo_megatron.trainer.flow_control.state_fingerprint", lambda *_: {})


def test_preemption_while_waiting_for_the_sampler_saves_first(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    run, _ = run_with()
    run.sampler = sampler = EndlessSampler(stops=False)  # type: ignore[assignment]
    run.preemption = Asked(at=2)  # type: ignore[assignment]
    with pytest.raises(Preempted, match="told to stop; saved after step 3$"):
        next_batch(run, 4)
    assert [moment for moment, _ in run.checkpoints.begun] == [(3, 0)]  # type: ignore[attr-defined]
    assert sampler.kept_from == [0], "the journal since the oldest checkpoint, not the newest"


def test_a_run_is_saved_at_its_interval_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    for name in ("evaluate_if_due", "give_gpus_to_engines", "next_batch", "give_gpus_to_policy", "train_on"):
        monkeypatch.setattr(f"bapo_megatron.train.{name}", Mock())
    for name in ("_record", "check_updates", "finalize_checkpoint"):
        monkeypatch.setattr(f"bapo_megatron.train.{name}", Mock())
    monkeypatch.setattr("bapo_megatron.train.profiled", lambda *_: nullcontext())
    monkeypatch.setattr("bapo_megatron.train.begin_checkpoint", lambda _run, step: saved.append(step))
    run = Mock(first_step=2)
    run.config.steps, run.config.checkpoint.every = 7, 3
    train(run)
    assert saved == [3, 6, 7]


def test_a_partly_trained_step_resumes_after_its_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two processes make of a step, one after the other, is what one makes of it."""
    alone(monkeypatch)
    several: dict[str, Any] = {"reuse_epochs": 2, "updates_per_epoch": 2}
    batch = in_memory(*(group([0.0, 1.0], [1, 1]) for _ in range(3)))
    whole, _ = run_with(**several)
    expected = train_on(whole, 5, batch)
    first, policy = run_with(**several)
    first.preemption = Asked(at=3)  # type: ignore[assignment]
    with pytest.raises(Preempted, match="saved after step 4 and 3 updates of the next"):
        train_on(first, 5, batch)
    [(moment, trainer)] = first.checkpoints.begun  # type: ignore[attr-defined]
    assert moment == (4, 3)
    second, fresh = run_with(**several)
    fresh.version = trainer["version"]
    second.partial_step = PartialStep(*json.loads(json.dumps(trainer["within"])))
    assert train_on(second, 5, batch) == expected
    assert len(fresh.losses) == 1
    assert len(policy.losses) == 3
    assert train_on(second, 6, batch)[0]["version"] == 15


def test_log_probs_of_the_trainer_belong_to_the_start_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a step that uses them is not cut."""
    monkeypatch.setattr("bapo_megatron.train.with_old_log_probs", lambda policy, groups, *_: groups)
    run, _ = run_with(updates_per_epoch=2, old_log_probs="trainer")
    run.preemption = Asked(at=1)  # type: ignore[assignment]
    assert len(train_on(run, 5, in_memory(*(group([0.0, 1.0], [1, 1]) for _ in range(3))))) == 2


@pytest.mark.parametrize("old_log_probs", ["rollout", "trainer"])
def test_every_update_resets_the_watchdog(monkeypatch: pytest.MonkeyPatch, old_log_probs: str) -> None:
    """``hang_minutes`` is of one update, also in a step that is never cut, which may take hours."""
    alone(monkeypatch)
    monkeypatch.setattr("bapo_megatron.train.with_old_log_probs", lambda policy, groups, *_: groups)
    run, policy = run_with(reuse_epochs=2, updates_per_epoch=2, old_log_probs=old_log_probs)
    beats: list[int] = []
    monkeypatch.setattr(run.watchdog, "beat", lambda: beats.append(policy.version))
    train_on(run, 5, in_memory(*(group([0.0, 1.0], [1, 1]) for _ in range(3))))
    assert set(beats) == {10, 11, 12, 13}  # the versions before each of the four updates


def test_a_step_makes_its_updates_and_counts_staleness() -> None:
    run, _ = run_with(reuse_epochs=2, updates_per_epoch=2)
    groups = tuple(group([0.0, 1.0], [1, 1]) for _ in range(3))
    updates = train_on(run, 1, in_memory(*groups))
    assert [row["version"] for row in updates] == [11, 12, 13, 14]
    assert [row["epoch"] for row in updates] == [0, 0, 1, 1]
    assert [row["staleness/mean"] for row in updates] == [2, 3, 4, 5]  # sampled at version 8
    assert [row["staleness/reuse_mean"] for row in updates] == [0, 1, 2, 3]
    assert [row["staleness/queue_mean"] for row in updates] == [2, 2, 2, 2]
    assert [row["staleness/2-3/tokens"] for row in updates] == [1, 1, 0, 0]
    assert train_on(run, 1, in_memory()) == []


def test_given_tokens_have_no_age_and_make_no_update_stale() -> None:
    """Version 10 trains on what it has sampled: the tokens of environments, of version -1, count nowhere."""
    run, policy = run_with()
    made = group([0.0, 1.0], [4, 6])
    rollouts = []
    for one in made.rollouts:
        mask_R = np.arange(len(one.token_ids_R)) % 3 != 1
        versions_R = np.where(mask_R, 10, GIVEN).astype(np.int32)
        rollouts.append(dataclasses.replace(one, versions_R=versions_R, loss_mask_R=mask_R))
    batch = in_memory(dataclasses.replace(made, rollouts=tuple(rollouts)))
    [metrics] = train_on(run, 1, batch)
    assert (metrics["staleness/max"], metrics["staleness/mean"]) == (0.0, 0.0)
    assert metrics["policy/tokens"] == 7.0
    assert (metrics["bapo/bounds_moved"], metrics["bapo/moved_tokens"]) == (None, None)
    assert policy.searched == []
    assert policy.old_calls == 1, "on-policy: no pass of the model measures the ratio"


@pytest.mark.parametrize(
    ("error", "step", "saved"),
    [
        (RunStopped("no engine"), 0, [0]),
        (RunStopped("no engine"), 7, [7]),
        (ConfigError("step_000008.npz is damaged"), 7, [7]),
        (ConfigError("step_000008.npz is damaged"), 5, [5]),
        (ConfigError("all scores of the first step failed"), 4, []),  # nothing was trained since the start
    ],
)
def test_an_error_of_the_sampler_ends_the_run_after_a_save(
    error: Exception, step: int, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    sent: list[Any] = []
    monkeypatch.setattr(flow_control, "stop_if_preempted", lambda *_: None)
    monkeypatch.setattr(flow_control, "finalize_checkpoint", lambda *_: None)
    monkeypatch.setattr(flow_control, "save_now", lambda _run, at: found.append(at))
    monkeypatch.setattr(flow_control, "broadcast_from_main", lambda one: sent.append(one) or one)

    def ask(_sampler: Any) -> Any:
        raise error

    with pytest.raises(type(error), match=str(error)):
        flow_control.wait_for_sampler(SimpleNamespace(sampler=object(), first_step=5), step, ask)  # type: ignore[arg-type]
    assert sent == [error], "the other ranks get it, too"
    assert found == saved
