"""What the loop hands to the policy (advantages, weights, bounds, versions), and saves before an error."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.algo.bapo import balanced
from bapo_megatron.checkpoint.store import Saved
from bapo_megatron.config import AlgorithmConfig, EvaluationConfig
from bapo_megatron.errors import ConfigError, Preempted, RunStopped, StorageFailed
from bapo_megatron.interfaces import Need
from bapo_megatron.train import next_batch, train_on
from bapo_megatron.trainer import flow_control
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.flow_control import evaluate_if_due, give_gpus_to_engines, give_gpus_to_policy
from bapo_megatron.trainer.resume import PartialStep
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import GIVEN, StepHeader
from tests.support.batches import NO_FILE, MemoryBatch, in_memory
from tests.support.runs import Asked, run_of
from tests.support.small_steps import NotedPolicy, group, rollout, run_config

HEADER = StepHeader((), {}, NO_FILE)


def pairs(count: int = 3) -> MemoryBatch:
    """Groups of two responses, one right and one wrong, of one token each."""
    return batch_of(*([1, 1] for _ in range(count)))


def batch_of(*lengths: Sequence[int]) -> MemoryBatch:
    """A group for each two lengths, that of a wrong response and that of a right one."""
    return in_memory(*(group(rollout(0.0, wrong), rollout(1.0, right)) for wrong, right in lengths))


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


def run_with(**algorithm: Any) -> tuple[Run, NotedPolicy]:
    policy = NotedPolicy()
    config = run_config(AlgorithmConfig(**algorithm), pack_tokens=8)
    return run_of(config, policy, UpdateLoss(config.algorithm), Store()), policy


def begun_of(run: Run) -> list[tuple[int, int]]:
    """The moments whose checkpoints the run has begun."""
    return [moment for moment, _ in run.checkpoints.begun]  # type: ignore[attr-defined]


def test_bounds_are_searched_over_the_whole_update() -> None:
    """Ratio 2 everywhere. Positive tokens are dead until c_high passes 2.0: 17 moves from 1.2 to 2.05."""
    run, policy = run_with(bounds=balanced(), advantage="dr_grpo")
    [metrics] = train_on(run, 1, batch_of([3, 3], [4, 4]))
    assert len(policy.packs[0]) > 1
    assert metrics["bapo/clip_high"] == pytest.approx(2.05)
    assert metrics["bapo/clip_low"] == 0.6
    assert metrics["bapo/rounds"] == 17
    assert (metrics["bapo/bounds_moved"], metrics["bapo/moved_tokens"]) == (1.0, 1.0)
    assert metrics["bapo/reached"] == 1.0
    # The loss was made with them: half of the 14 tokens at -0.5 * 2, half at +0.5 * 2.
    assert float(policy.losses[0][0]) == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy/kl"] == pytest.approx(2 - 1 - np.log(2), rel=1e-5)


class EndlessSampler:
    """Has nothing twice, then a batch; or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked, self._error = 0, error
        self.kept_from: list[int] = []

    def next_batch(self, step: int, wait_s: float) -> StepHeader | None:
        self.asked += 1
        if self.asked < 3:
            return None
        if self._error:
            raise self._error
        return HEADER

    def state(self) -> dict[str, Any]:
        return {"place": 7}

    def checkpointed(self, oldest: int) -> None:
        self.kept_from.append(oldest)


def test_ranks_meet_regularly_while_rank_0_waits_for_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    met, opened = [], []
    monkeypatch.setattr(flow_control, "broadcast_from_main", lambda value: met.append(value) or value)
    monkeypatch.setattr(flow_control, "on_all_ranks", opened.append)
    run, _ = run_with()
    run.sampler = EndlessSampler()  # type: ignore[assignment]
    batch = next_batch(run, 4)
    assert batch.header is HEADER
    assert met == [None, None, HEADER]
    assert opened == [batch.open]


ENGINES, DAMAGED = RunStopped("no engine is left"), ConfigError("step_000008.npz is damaged")


@pytest.mark.parametrize(
    ("error", "step", "newest", "first_step", "saved"),
    [  # there is a checkpoint of that moment, or nothing that was trained since the start
        (ENGINES, 1, 0, 1, []),
        (ENGINES, 11, 10, 1, []),
        (ENGINES, 13, 10, 1, [(12, 0)]),
        (DAMAGED, 8, 4, 5, [(7, 0)]),
        (DAMAGED, 6, 4, 5, [(5, 0)]),
        (ConfigError("all scores of the first step failed"), 5, 3, 5, []),
    ],
)
def test_an_error_of_the_sampler_ends_the_run_after_a_save(
    error: Exception,
    step: int,
    newest: int,
    first_step: int,
    saved: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    alone(monkeypatch, sent)
    run, _ = run_with()
    run.checkpoints.newest, run.first_step = (newest, 0), first_step
    run.sampler = EndlessSampler(error)  # type: ignore[assignment]
    with pytest.raises(type(error), match=str(error)):
        next_batch(run, step)
    assert error in sent, "the other ranks get it, too"
    assert begun_of(run) == saved


def test_a_step_whose_file_a_rank_does_not_see_is_saved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(call: object) -> None:
        raise StorageFailed("rank 3: journal/step_000013.npz on node-7: no such file")

    alone(monkeypatch)
    monkeypatch.setattr(flow_control, "on_all_ranks", fails)
    run, _ = run_with()
    run.checkpoints.newest = (10, 0)
    run.sampler = EndlessSampler()  # type: ignore[assignment]
    with pytest.raises(StorageFailed, match="rank 3"):
        next_batch(run, 13)
    assert begun_of(run) == [(12, 0)]


@pytest.mark.parametrize(
    ("to", "policy_has_gpus", "saved"),
    [
        ("to_engines", True, [(12, 0)]),
        ("to_engines", False, [(12, 0)]),  # since a save brings the policy back
        ("to_policy", True, [(12, 0)]),
        ("to_policy", False, []),  # a lost policy has no state
    ],
)
def test_a_handover_that_fails_saves_what_can_be_saved(
    to: str, policy_has_gpus: bool, saved: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch)
    run, _ = run_with()
    run.checkpoints.newest = (10, 0)
    asked: list[str] = []

    class Handover:
        def __init__(self) -> None:
            self.policy_has_gpus = policy_has_gpus

        def to_policy(self) -> None:
            if to == "to_policy" and not asked:  # the save asks once more
                asked.append(to)
                raise RunStopped("failed")

        def to_engines(self) -> None:
            raise RunStopped("failed")

    run.handover = Handover()  # type: ignore[assignment]
    give = give_gpus_to_engines if to == "to_engines" else give_gpus_to_policy
    with pytest.raises(RunStopped, match="failed"):
        give(run, 12)
    assert begun_of(run) == saved


def test_training_waits_for_an_evaluation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def alone(monkeypatch: pytest.MonkeyPatch, sent: list[Any] | None = None) -> None:
    """No other ranks to tell; what they would get is in ``sent``."""
    told: list[Any] = [] if sent is None else sent
    monkeypatch.setattr(flow_control, "broadcast_from_main", lambda one: told.append(one) or one)
    monkeypatch.setattr(flow_control, "on_all_ranks", lambda call: told.append(call()))
    monkeypatch.setattr(flow_control, "state_fingerprint", lambda *_: {})


def test_preemption_while_waiting_for_the_sampler_saves_first(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch, sent := [])
    run, _ = run_with()
    run.sampler = sampler = EndlessSampler()  # type: ignore[assignment]
    run.preemption = Asked(at=2)  # type: ignore[assignment]
    with pytest.raises(Preempted, match="told to stop; saved after step 3$"):
        next_batch(run, 4)
    assert begun_of(run) == [(3, 0)]
    assert sampler.kept_from == [0], "the journal since the oldest checkpoint, not the newest"
    assert sent[-1] is None, "the other ranks get its error, too"


def test_a_partly_trained_step_resumes_after_its_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two processes make of a step, one after the other, is what one makes of it."""
    alone(monkeypatch)
    several: dict[str, Any] = {"reuse_epochs": 2, "updates_per_epoch": 2}
    batch = pairs()
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


@pytest.mark.parametrize("old_log_probs", ["rollout", "trainer"])
def test_every_update_resets_the_watchdog(monkeypatch: pytest.MonkeyPatch, old_log_probs: str) -> None:
    """``hang_minutes`` is of one update, also in a step that is never cut: log-probs of the trainer belong to
    its start."""
    alone(monkeypatch)
    monkeypatch.setattr("bapo_megatron.train.with_old_log_probs", lambda policy, groups, *_: groups)
    run, policy = run_with(reuse_epochs=2, updates_per_epoch=2, old_log_probs=old_log_probs)
    if old_log_probs == "trainer":
        run.preemption = Asked(at=1)  # type: ignore[assignment]
    beats: list[int] = []
    monkeypatch.setattr(run.watchdog, "beat", lambda: beats.append(policy.version))
    assert len(train_on(run, 5, pairs())) == 4
    assert set(beats) == {10, 11, 12, 13}  # the versions before each of the four updates


def test_a_step_makes_its_updates_and_counts_staleness() -> None:
    run, _ = run_with(reuse_epochs=2, updates_per_epoch=2)
    updates = train_on(run, 1, pairs())
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
    rollouts = []
    for reward, length in ((0.0, 4), (1.0, 6)):
        mask_R = np.arange(length) % 3 != 1
        versions_R = np.where(mask_R, 10, GIVEN).astype(np.int32)
        one = dataclasses.replace(rollout(reward, length), versions_R=versions_R, loss_mask_R=mask_R)
        rollouts.append(one)
    [metrics] = train_on(run, 1, in_memory(group(*rollouts)))
    assert (metrics["staleness/max"], metrics["staleness/mean"]) == (0.0, 0.0)
    assert metrics["policy/tokens"] == 7.0
    assert (metrics["bapo/bounds_moved"], metrics["bapo/moved_tokens"]) == (None, None)
    assert policy.searched == []
    assert policy.calls == ["old_sums", "update"], "on-policy: no pass of the model measures the ratio"
