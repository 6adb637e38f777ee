"""The row of a step, by what its updates say together, and the notice that a search is idle."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.algo.bapo import BoundsConfig, balanced, fixed, grpo, paper, published_code
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.config import (
    AlgorithmConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceKlConfig,
    RewardConfig,
    RunConfig,
)
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.trainer.checks import check_one_sign
from bapo_megatron.trainer.records.recorder import MOVED, IdleSearch, Recorder, StepClock, step_metrics
from bapo_megatron.types import Metrics, StepHeader
from tests.support.bapo_objective import objective
from tests.support.batches import NO_FILE

NAMES = objective(grpo()).metric_names()


def test_a_step_has_the_means_of_its_updates_and_of_maxima_the_largest() -> None:
    gap, clipped = "rollout/engine_gap_max", "staleness/8-15/clipped"
    updates = [
        {"epoch": 0, "version": 1, "policy/kl": 1.0, "staleness/max": 3, gap: 0.25, clipped: None},
        {"epoch": 1, "version": 2, "policy/kl": 2.0, "staleness/max": 7, gap: None, clipped: 0.5},
    ]
    row = step_metrics(StepHeader((), {"rollout/tokens": 9.0}, NO_FILE), updates, StepClock(), NAMES)
    assert row["policy/kl"] == 1.5
    assert row["staleness/max"] == 7
    assert row[clipped] == 0.5
    assert row[gap] == 0.25
    assert row["policy/updates"] == 2
    assert "version" not in row


def test_an_update_without_a_response_is_none() -> None:
    updates = [{"version": 1, "policy/tokens": 5.0}, {"version": 1, "policy/tokens": 0.0}]
    assert step_metrics(StepHeader((), {}, NO_FILE), updates, StepClock(), NAMES)["policy/updates"] == 1


@pytest.mark.parametrize("name", ["staleness/mean", "staleness/max", "staleness/16+/entropy", "policy/loss"])
def test_a_step_without_updates_has_the_same_columns(name: str) -> None:
    assert name in NAMES
    assert step_metrics(StepHeader((), {}, NO_FILE), [], StepClock(), NAMES)[name] is None


class OneSignNotes:
    """Stands for the recorder."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, str]] = []

    def warning(self, kind: str, step: int, message: str) -> None:
        assert kind == "one_sign"
        self.taken.append((step, message))


@pytest.mark.parametrize(
    ("shares", "noted"),
    [([0.9, 0.3], True), ([0.5, 0.5], False), ([0.9, None, 0.9], True), ([None], False), ([], False)],
)
def test_one_sign_searches_are_an_event(shares: list[float | None], noted: bool) -> None:
    """Where more than half of a step's tokens had such a search; on rank 0."""
    notes, updates = OneSignNotes(), [{"bapo/one_sign_tokens": share} for share in shares]
    check_one_sign(7, updates, notes)  # type: ignore[arg-type]
    check_one_sign(7, [{}], notes)  # type: ignore[arg-type]  # a loss without searches
    check_one_sign(7, updates, None)
    assert bool(notes.taken) == noted
    if noted:
        assert notes.taken[0][1].startswith("step 7: ")
        assert (
            f"{0.6 if 0.3 in shares else 0.9:.0%} of the tokens had bounds from searches" in notes.taken[0][1]
        )


def config(run_dir: Path, reward: RewardConfig) -> RunConfig:
    algorithm = AlgorithmConfig(bounds=paper())
    parts = {"reward": reward, "algorithm": algorithm, "run_dir": run_dir}
    return RunConfig("t", ModelConfig(Path("m")), DataConfig(Path("d")), **parts)  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(
    ("function", "failed", "warned"),
    [("math", 0.0, True), ("math", -1.0, False), ("math", -2.0, False), ("mine.reward:score", 0.0, False)],
)
def test_a_failed_reward_above_the_wrong_reward_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, failed: float, warned: bool
) -> None:
    reward = RewardConfig(function=function, wrong=-1.0, failed=failed)
    Recorder(config(tmp_path, reward), 1, True).close()
    said = "warning: reward.failed=0 is above reward.wrong=-1: a response that hangs its scorer gets more"
    assert (said in capsys.readouterr().out) == warned


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"data": DataConfig(Path("data.jsonl"), min_difficulty=0.25)},
            "warning: data.min_difficulty=0.25 leaves nothing out without data.difficulty: say there where",
        ),
        ({"data": DataConfig(Path("data.jsonl"), difficulty="level", max_difficulty=8)}, ""),
        (
            {"optimizer": OptimizerConfig(min_lr=1e-7)},
            "warning: optimizer.min_lr=1e-07 is where a decay ends",
        ),
        ({"optimizer": OptimizerConfig(min_lr=1e-7, decay="cosine")}, ""),
        ({"reward": RewardConfig(format_pattern=".*")}, "warning: reward.format_pattern changes no reward"),
        ({"reward": RewardConfig(format_pattern=".*", format_penalty=0.1)}, ""),
        ({"reward": RewardConfig(overlong_tokens=9)}, "warning: reward.overlong_tokens=9 changes no reward"),
        ({"reward": RewardConfig(overlong_tokens=9, overlong_penalty=0.1)}, ""),
        ({"evaluation": EvaluationConfig(5, ("s",), 4, 0.0)}, "warning: evaluation.samples=4 responses to a"),
        ({"evaluation": EvaluationConfig(0, ("s",), 4, 0.0)}, ""),
        ({"evaluation": EvaluationConfig(5, ("s",), 1, 0.0)}, ""),
        (
            {"algorithm": AlgorithmConfig(bounds=balanced(), loss_mean="sequence")},
            "warning: algorithm.loss_mean=sequence gives positive tokens half of the gradient at ratios of "
            "1, and algorithm.bounds.target=0.4 is no more: a search over an update has nothing to balance (",
        ),
        (
            {"algorithm": AlgorithmConfig(bounds=paper(), loss_mean="sequence")},
            "nothing to balance, and those of its parts move by which responses they see (docs",
        ),
        ({"algorithm": AlgorithmConfig(bounds=replace(paper(), target=0.6), loss_mean="sequence")}, ""),
        ({"algorithm": AlgorithmConfig(bounds=grpo(), loss_mean="sequence")}, ""),
        ({"algorithm": AlgorithmConfig(bounds=published_code(), loss_mean="sequence")}, ""),
        ({"algorithm": AlgorithmConfig(loss="gspo", loss_mean="sequence")}, ""),
        (
            {"algorithm": AlgorithmConfig(polarity=PapoConfig(enabled=True), loss_mean="sequence")},
            "",
        ),
    ],
)
def test_a_setting_that_does_nothing_is_warned_of(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Recorder(replace(config(tmp_path, RewardConfig()), **change), 1, True).close()
    out = capsys.readouterr().out
    assert said in out
    assert ("warning:" in out) == bool(said)


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(
    ("settings", "warned"),
    [((0.1, "k1"), True), ((0.1, "k2"), False), ((0.1, "k1", "reward"), False), ((0.0, "k1"), False)],
)
def test_a_penalty_that_holds_nothing_is_warned_of(
    settings: tuple[Any, ...], warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config(tmp_path, RewardConfig())
    algorithm = AlgorithmConfig(reference_kl=ReferenceKlConfig(*settings))
    Recorder(replace(run, algorithm=algorithm), 1, True).close()
    said = "warning: algorithm.reference_kl.estimator=k1 in the loss has a gradient that does not depend on"
    assert (said in capsys.readouterr().out) == warned


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(("logged", "goes_on"), [(None, False), (b"", False), (b"records", True)])
def test_a_start_says_whether_the_journal_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logged: bytes | None, goes_on: bool
) -> None:
    """A run that was killed before its first checkpoint starts at step 1, and keeps what it had sampled."""
    if logged is not None:
        (tmp_path / "journal").mkdir()
        (tmp_path / "journal/segments-000001.log").write_bytes(logged)
    Recorder(config(tmp_path, RewardConfig()), 1, True).close()
    [event] = read_jsonl(tmp_path / "events.jsonl")
    assert (event["kind"], event.get("segments")) == ("start", "kept" if goes_on else None)
    kept = ", with the responses of its journal" if goes_on else ""
    assert re.search(rf": start at step 1 of \d+, processes: 1{kept}\n", capsys.readouterr().out)


def test_an_idle_search_is_an_event_and_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(config(tmp_path, RewardConfig()), 1, True)
    stale = {MOVED: 0.0, "bapo/contribution": 0.5}
    for step in (1, 2, 3):
        recorder.step(step, [stale] * 8, {"reward/mean": 0.0})
    recorder.close()
    [event] = [row for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "bounds_idle"]
    assert event["step"] == 2
    assert event["message"].startswith("the bounds have not moved in the first 16 stale updates (steps 1 to")
    assert capsys.readouterr().out.count("note: the bounds have not moved") == 1


FRESH: Metrics = {MOVED: None, "bapo/contribution": 0.1}


def stale(moved: float = 0.0, share: float = 0.52) -> Metrics:
    return {MOVED: moved, "bapo/contribution": share}


def test_sixteen_stale_updates_without_a_move_give_one_notice() -> None:
    idle = IdleSearch(paper(), first_step=1)
    assert [idle.observe(step, [FRESH, *[stale()] * 7]) for step in (1, 2)] == [None, None]
    assert idle.observe(3, [FRESH, *[stale(share=0.5)] * 2]) == (
        "the bounds have not moved in the first 16 stale updates (steps 1 to 3): so far this run equals "
        "fixed(0.6, 1.2), because positive tokens hold 0.52 of the gradient, above the target of 0.4 "
        "(docs/algorithm.md#which-preset)"
    )
    assert idle.observe(4, [stale()] * 100) is None


@pytest.mark.parametrize(
    "updates",
    [
        [*[stale()] * 10, stale(1.0), *[stale()] * 20],
        [{"bapo/contribution": 0.5}] * 50,  # fixed bounds, or a loss without them
        [FRESH] * 50,
        [stale()] * 15,
    ],
)
def test_runs_whose_bounds_move_get_no_idle_notice(updates: list[Metrics]) -> None:
    assert IdleSearch(paper(), first_step=1).observe(1, updates) is None


def test_a_resumed_run_gives_no_idle_notice() -> None:
    assert IdleSearch(paper(), first_step=101).observe(101, [stale()] * 16) is None


@pytest.mark.parametrize("config", [paper(), BoundsConfig()])
def test_a_search_has_the_metric(config: BoundsConfig) -> None:
    assert MOVED in objective(config).metric_names()


def test_fixed_bounds_have_none() -> None:
    assert MOVED not in objective(fixed(0.8, 1.2)).metric_names()
