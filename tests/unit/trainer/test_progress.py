"""What a run says of its steps."""

from __future__ import annotations

from io import StringIO

import pytest

from bapo_megatron.trainer.records.progress import Progress, evaluation_line, notes, plain_line
from bapo_megatron.types import Metrics

METRICS: Metrics = {
    "reward/mean": 0.531,
    "reward/correct_fraction": 0.542,
    "policy/entropy": 1.204,
    "bapo/clip_low": 0.66,
    "bapo/clip_high": 1.45,
    "bapo/contribution": 0.412,
    "time/tokens_per_s": 12345.6,
    "time/step_s": 18.0,
}


def test_log_has_one_plain_line_a_step() -> None:
    stream = StringIO()
    progress = Progress(60, stream)
    progress.update(1, METRICS)
    progress.update(12, METRICS)
    first, second = stream.getvalue().splitlines()
    assert second == (
        "step 12/60  reward  0.531  right  54.2%  entropy  1.204  clip 0.66..1.45  contribution  0.412  "
        "tokens/s  12346  step_s   18.0  eta 0:14:24"
    )
    assert first.startswith("step  1/60  reward")
    assert "\x1b" not in stream.getvalue()


NO_GROUP = {"rollout/groups_sampled": 4.0, "rollout/groups": 0.0, "policy/updates": 0.0}
TWELVE = {"rollout/groups_sampled": 12.0, "rollout/groups_failed": 1.0, "sampled/reward/failures": 5.0}
RIGHT = "sampled/reward/correct_fraction"


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"sampled/reward/failures": 0.0}, []),
        (
            {"sampled/reward/failures": 9.0, "sampled/environment/failures": 8.0},
            ["1 scores failed", "8 environments failed"],
        ),
        (
            {**NO_GROUP, "sampled/reward/failures": 32.0, "sampled/reward/failed_fraction": 1.0},
            ["32 scores failed", "no update"],
        ),
        ({"rollout/groups": 4.0, "policy/updates": 0.0}, ["no update: all responses rejected"]),
        (
            {**TWELVE, "rollout/groups_dropped": 11.0, "policy/updates": 0.0},
            ["5 scores failed", "11 uniform groups", "1 groups with too few scores", "no update"],
        ),
        (
            {
                "rollout/groups_sampled": 8.0,
                "rollout/groups_dropped": 6.0,
                "rollout/groups_stale": 1.0,
                RIGHT: 0.8125,
            },
            ["6 uniform groups", "1 groups too old", "2 of 8 groups kept (of all: right 81.2%)"],
        ),
    ],
)
def test_a_step_without_an_update_says_why(metrics: Metrics, says: list[str]) -> None:
    assert notes({"policy/updates": 4.0, **metrics}) == says
    line = plain_line(3, 60, {**METRICS, "policy/updates": 4.0, **metrics}, 60.0)
    assert line == "  ".join([plain_line(3, 60, METRICS, 60.0), *says])


def test_held_out_results_have_a_line() -> None:
    aime: Metrics = {
        "eval/aime24/problems": 30.0,
        "eval/aime24/avg@4": 0.25,
        "eval/aime24/avg@4_low": 0.2,
        "eval/aime24/avg@4_high": 0.3,
        "eval/aime24/unjudged": 0.0,
    }
    start = "held-out problems after step 40: aime24 avg@4 25.0% (20.0% to 30.0%)"
    assert evaluation_line(40, aime) == start
    both: Metrics = {**aime, "eval/sums/avg@4": None, "eval/sums/unjudged": 1.0, "eval/mean": 0.25}
    assert evaluation_line(40, both) == f"{start}; sums avg@4 -, 100.0% not judged; mean 25.0%"
