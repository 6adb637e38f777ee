"""A run whose reward raises: it stops before the first update, and continues once the reward is mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.short_runs import finish, output_of, start

pytestmark = pytest.mark.e2e

BROKEN = "def score(prompt, response):\n    return float(prompt.truth in response)\n"


def test_a_reward_that_raises_stops_the_run_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards, run_dir = tmp_path / "own_rewards.py", tmp_path / "run"
    rewards.write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ["--reward.function=own_rewards:score", "--steps=1", "--parallel.data=2"]
    command = lambda: start(run_dir, *flags)  # noqa: E731
    process = command()
    output = output_of(process)
    assert process.returncode == 2, output[-3000:]
    assert "error: all 24 scores of the first step failed" in output
    assert "AttributeError: 'Prompt' object has no attribute 'truth'" in output
    assert "return float(prompt.truth in response)" in output
    assert not (run_dir / "metrics.jsonl").read_text()
    failures = [row for row in read_jsonl(run_dir / "events.jsonl") if row["kind"] == "reward_failed"]
    assert [row["count"] for row in failures] == [1, 10]
    assert "return float(prompt.truth in response)" in failures[0]["traceback"]

    rewards.write_text(BROKEN.replace("truth", "ground_truth"))
    assert "reward failed" not in finish(command())
    [row] = read_jsonl(run_dir / "metrics.jsonl")
    assert row["reward/failures"] == 0
