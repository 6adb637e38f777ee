"""The metrics of an evaluation, and comparisons of two, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.cli import run
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.command import compare, comparison_text, results_text
from bapo_megatron.evaluation.responses import RESPONSES, SUMMARY, open_folder, read_responses, write_summary
from bapo_megatron.evaluation.scoring import score, vote_for
from tests.unit.evaluation.test_evaluation import judged, row, settings


def test_the_metrics_by_hand() -> None:
    """Two problems, two responses: A has one right (7 against 8), B has both."""
    found = score(
        [
            judged(0, 0, True, "7", tokens=10),
            judged(0, 1, False, "8", tokens=40, finish_reason="length"),
            judged(1, 0, True, "5", tokens=20),
            judged(1, 1, True, "5", tokens=30),
        ],
        pass_at=(1, 2),
    )
    assert (found["problems"], found["samples"]) == (2, 2)
    assert found["avg@2"] == found["pass@1"] == 0.75
    assert found["pass@2"] == 1.0
    assert found["maj@2"] == 0.75
    assert (found["avg@2_low"], found["avg@2_high"]) == (0.5, 1.0)
    assert (found["pass@2_low"], found["pass@2_high"]) == (1.0, 1.0)
    assert (found["truncated"], found["unanswered"], found["unjudged"]) == (0.25, 0.0, 0.0)
    assert found["response_tokens/mean"] == found["response_tokens/median"] == 25
    # Means 0.5 and 1 have a standard deviation of 0.5 / sqrt 2; two such models differ by sqrt 2 of it.
    assert found["detectable_difference"] == pytest.approx(2.80158 * 0.5 / 2**0.5, rel=1e-5)


def test_a_response_that_could_not_be_scored_is_neither_right_nor_wrong() -> None:
    """Problem 0: one of one is right, and one is not judged. 1: one of two. 2: none is judged."""
    failed = {"failure": "endpoint", "tokens": 40}
    found = score(
        [judged(0, 0, True), judged(0, 1, False, **failed), judged(1, 0, True), judged(1, 1, False)]
        + [judged(2, sample, False, **failed) for sample in (0, 1)],
        pass_at=(1, 2),
    )
    assert (found["problems"], found["unjudged"]) == (3, 0.5)
    assert found["avg@2"] == found["pass@1"] == 0.75
    assert found["pass@2"] == 1.0, "of problem 1 alone"
    assert (found["pass@2_low"], found["pass@2_high"]) == (1.0, 1.0)
    nothing = score([judged(0, 0, False, **failed)], pass_at=(1,))
    assert (nothing["avg@1"], nothing["pass@1"], nothing["detectable_difference"]) == (None, None, None)


def test_missing_and_repeated_samples() -> None:
    one = judged(0, 0, True)
    for responses in ([], [one, one], [one, judged(1, 0, True), judged(1, 1, True)]):
        with pytest.raises(ValueError, match="equally many samples"):
            score(responses)


def test_what_an_answer_votes_for() -> None:
    assert [vote_for(answer) for answer in (" 007 ", " ", None)] == ["7", None, None]
    assert vote_for("\\dfrac{1}{2}") == vote_for("\\frac{1}{2}")


def finished(folder: Path, correct: list[list[bool]], **more: Any) -> Path:
    """An evaluation of one suite with those outcomes."""
    about = settings(len(correct[0])) | {
        "suite": {"name": folder.name, "sha256": "1", "problems": len(correct)}
    }
    about |= more
    rows = [row(p, s, right) for p, outcomes in enumerate(correct) for s, right in enumerate(outcomes)]
    with open_folder(folder, about) as log:
        log.append_all(rows)
    write_summary(folder, about, score(read_responses(folder / RESPONSES, len(correct[0]))))
    return folder


def test_a_model_that_solves_none_is_not_said_to_be_measured_exactly(tmp_path: Path) -> None:
    """0 of 30 has an interval of width 0 and a spread of 0: neither finds every difference."""
    metrics = score([judged(problem, sample, False) for problem in range(30) for sample in (0, 1)])
    assert metrics["detectable_difference"] is None
    text = results_text({"s": (tmp_path, metrics)})
    assert "intervals have no width" in text
    assert "must differ by" not in text
    [found] = compare(*(finished(tmp_path / name / "s", [[False]] * 4) for name in "ab"))
    assert found.detectable is None
    assert "  detectable in 4 of 5 comparisons like this: - points\n" in comparison_text([found], "a", "b")


def test_a_setting_that_one_evaluation_alone_has_is_told_either_way(tmp_path: Path) -> None:
    """An environment is among the settings only where there is one."""
    with_tools = {"temperature": 1.0, "environment": {"function": "calculator", "settings": {}}}
    a = finished(tmp_path / "a/s", [[True]])
    b = finished(tmp_path / "b/s", [[True]], sampling=with_tools)
    for left, right in ((a, b), (b, a)):
        (told,) = compare(left, right)[0].other_settings
        assert told.startswith("sampling.environment: ")


def test_a_comparison_by_hand(tmp_path: Path) -> None:
    """A: 1/2, 0, 1/2, 1. B, with four responses: 1, 1/2, 1/2, 3/4. Differences 1/2, 1/2, 0, -1/4.

    In quarters 2, 2, 0, -1: of the eight choices of signs |sum| >= 3 in four.
    """
    a = finished(tmp_path / "a/s", [[True, False], [False, False], [False, True], [True, True]])
    b = finished(
        tmp_path / "b/s",
        [[True] * 4, [True, True, False, False], [False, True, True, False], [True, True, True, False]],
        sampling={"temperature": 0.5},
    )
    for left, right in ((tmp_path / "a", tmp_path / "b"), (a, b)):
        (found,) = compare(left, right)
        assert (found.suite, found.problems, found.samples) == ("s", 4, (2, 4))
        assert (found.a, found.b, found.difference) == (0.5, 0.6875, 0.1875)
        assert found.p_value == 4 / 8
        assert (found.better, found.worse) == (2, 1)
        assert found.interval.low < 0.1875 < found.interval.high
        spread = np.std([0.5, 0.5, 0, -0.25], ddof=1)
        assert found.detectable == pytest.approx(2.80158 * spread / 2, rel=1e-5)
        assert found.other_settings == ("sampling.temperature: 1.0, 0.5",)
    (other_way,) = compare(tmp_path / "b", tmp_path / "a")
    assert (other_way.difference, other_way.p_value) == (-0.1875, 0.5)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    finished(tmp_path / "a/s", [[True]])
    finished(tmp_path / "b/t", [[True]])
    finished(tmp_path / "c/s", [[True]], suite={"name": "s", "sha256": "other", "problems": 1})
    finished(tmp_path / "d/s", [[True]])
    (tmp_path / "d/s" / SUMMARY).unlink()
    for other, says in (("b", "no suite"), ("c", "asked different problems"), ("d", "no finished eval")):
        with pytest.raises(ConfigError, match=says):
            compare(tmp_path / "a", tmp_path / other)


def test_the_comparison_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(finished(tmp_path / "a/s", [[False]] * 8))
    b = str(finished(tmp_path / "b/s", [[True]] * 8))
    assert run(["eval", "compare", "--json", a, b]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["difference"], found["p_value"]) == (1.0, 2 / 2**8)
