"""What a run with ``--rollout-only`` says of its steps."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config import DataConfig, LoggingConfig, ModelConfig, RunConfig
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.trainer import rollout_only
from bapo_megatron.trainer.records.recorder import StepClock
from bapo_megatron.trainer.records.rollouts import RolloutRecord, step_line, summary
from bapo_megatron.types import Group, Prompt, Rollout, StepBatch
from tests.support.batches import header_in_memory

METRICS: dict[str, float | None] = {
    "reward/mean": 0.25,
    "reward/correct_fraction": 0.5,
    "rollout/length_mean": 17.6,
    "rollout/length_max": 64.0,
    "rollout/truncated_fraction": 0.125,
    "rollout/groups_sampled": 9.0,
    "rollout/groups_uniform": 3.0,
    "time/tokens_per_s": 1234.5,
    "reward/failures": 2.0,
    "reward/timeouts": 1.0,
}


def test_the_line_of_a_step() -> None:
    assert step_line(3, 12, METRICS) == (
        "step  3/12  reward 0.250  right 50.0%  length 18 (max 64, cut off 12.5%)  uniform 3 of 9 groups  "
        "tokens/s 1234  failed 2 (timed out 1)"
    )
    assert "reward -  right -  length - (max -, cut off -)" in step_line(1, 1, {})


def test_the_table() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, **METRICS},
        {"step": 2, **METRICS, "reward/mean": 0.75, "reward/failures": 5.0},
        {"step": 3, **dict.fromkeys(METRICS)},  # a step without a group
    ]
    events = [{"kind": kind} for kind in ("start", "engine_ready", "engine_lost", "resume", "engine_lost")]
    cells = [re.split(r" {2,}", line) for line in summary(rows, events)]
    lines = {name: values for name, *values in cells}
    assert lines["3 steps"] == ["mean", "lowest", "highest"]
    assert lines["reward"] == ["0.500", "0.250", "0.750"]
    assert lines["cut off"] == ["12.5%", "12.5%", "12.5%"]
    assert lines["rewards failed"] == ["3.5", "2", "5"]
    assert [*summary(rows, events)][-1] == "events: engine_lost 2"
    assert not any("events" in line for line in summary(rows, events[:2]))


def test_uniform_groups_are_those_dropped_and_those_kept(tmp_path: Path) -> None:
    config = RunConfig(
        name="x",
        model=ModelConfig(tmp_path),
        data=DataConfig(tmp_path),
        steps=2,
        run_dir=tmp_path,
        logging=LoggingConfig(tensorboard=False),
    )
    groups = tuple(group(*rewards) for rewards in ((1, 1), (0, 1), (0, 0)))
    record = RolloutRecord(config, 1)
    batch = StepBatch(groups, {"rollout/groups_dropped": 4.0, "rollout/tokens": 6.0})
    record.step(1, header_in_memory(batch), StepClock())
    record.close()
    [row] = read_jsonl(tmp_path / "metrics.jsonl")
    assert row["rollout/groups_uniform"] == 4 + 2
    assert "policy/updates" not in row


def group(*rewards: float) -> Group:
    column = np.zeros(1)
    rollouts = [Rollout(column, column, column, "stop", reward) for reward in rewards]
    return Group(Prompt(0, np.zeros(1, np.int32), "", "test"), tuple(rollouts))


@pytest.mark.parametrize(
    ("rows", "files", "expected"),
    [([], [], 1), ([1, 2], [1, 2], 3), ([1, 2], [1, 2, 3], 3), ([1, 2, 3], [1, 3], 2), ([1], [], 1)],
)
def test_a_step_is_done_with_its_file_and_its_metrics(
    rows: list[int], files: list[int], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "journal").mkdir()
    for step in files:
        (tmp_path / f"journal/step_{step:06d}.npz").touch()
    if rows:
        (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in rows))
    config: Any = SimpleNamespace(directory=tmp_path)
    assert rollout_only.next_step(config) == expected
