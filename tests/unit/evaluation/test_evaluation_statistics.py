"""The statistics of an evaluation, by hand and brute force; examples of what two evaluations differ in."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.cli import run
from bapo_megatron.evaluation.command import examples_text
from bapo_megatron.evaluation.responses import FORMAT, RESPONSES, open_folder, read_responses, write_summary
from bapo_megatron.evaluation.scoring import (
    ScoredResponse,
    bootstrap_intervals,
    detectable_difference,
    majority_vote,
    pass_at_k,
    score,
    sign_flip_p_value,
    standard_deviation,
)


@given(samples=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_all_subsets(samples: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    subsets = list(itertools.combinations(range(samples), k))
    hits = sum(min(subset) < correct for subset in subsets)
    assert pass_at_k(samples, correct, k) == pytest.approx(hits / len(subsets))


@pytest.mark.parametrize(
    ("answers", "correct", "vote"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8"], [True, False], 0.5),
        (["7", "8", "9", None, None], [False, True, False, False, False], 1 / 3),
        ([None, None, "7"], [False, False, True], 1.0),  # no answer is not a vote
        ([None], [False], 0.0),
        (["7", "7", "8"], [False, True, False], 1.0),  # one judgement of two failed
        (["1/2", "0.5", "3", "3", "3"], [True, True, False, False, False], 0.0),
    ],
)
def test_majority_by_hand(answers: list[str | None], correct: list[bool], vote: float) -> None:
    assert majority_vote(answers, correct) == vote


def test_the_bootstrap_against_every_resample() -> None:
    """Three problems with 0, 0, 1 have 27 resamples; the mean is 0, 1/3, 2/3, 1 in 8, 12, 6, 1 of them."""
    values = np.array([0.0, 0.0, 1.0])
    exact = sorted(values[list(chosen)].mean() for chosen in itertools.product(range(3), repeat=3))
    for confidence in (0.2, 0.5, 0.9):  # 8/27 lie at 0, so tails of 0.4, 0.25, 0.05 end inside a step
        tail = (1 - confidence) / 2
        low, high = exact[math.floor(tail * 27)], exact[math.ceil((1 - tail) * 27) - 1]
        (found,) = bootstrap_intervals(values[:, None], 20_000, 1, confidence)
        assert found == pytest.approx((low, high))


def test_the_bootstrap_of_many_problems_is_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(size=(400, 2)) * [1.0, 3.0]
    for column, (low, high) in enumerate(bootstrap_intervals(values, seed=3)):
        error = 1.96 * values[:, column].std() / 20
        mean = values[:, column].mean()
        assert low == pytest.approx(mean - error, abs=0.06 * error)
        assert high == pytest.approx(mean + error, abs=0.06 * error)


def test_the_bootstrap_is_a_function_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(12.0)[:, None]
    first = bootstrap_intervals(values, 1000, 5)
    assert bootstrap_intervals(values, 1000, 5) == first
    assert bootstrap_intervals(values, 1000, 6) != first
    assert bootstrap_intervals(np.ones((7, 1)), 100) == [(1.0, 1.0)]
    monkeypatch.setattr("bapo_megatron.evaluation.scoring._ELEMENTS", 100)
    assert bootstrap_intervals(values, 1000, 5) == first, "drawn in pieces"


@given(st.lists(st.integers(-6, 6), max_size=9))
def test_sign_flips_against_all_of_them(differences: list[int]) -> None:
    observed = abs(sum(differences))
    signs = list(itertools.product((-1, 1), repeat=len(differences)))
    far = sum(abs(sum(s * d for s, d in zip(sign, differences, strict=True))) >= observed for sign in signs)
    assert sign_flip_p_value(differences) == pytest.approx(far / len(signs))


def test_sign_flips_of_ones_are_the_binomial_test() -> None:
    """70 of 100 problems better: twice the upper tail of a fair coin."""
    tail = Fraction(sum(math.comb(100, heads) for heads in range(70, 101)), 2**100)
    assert sign_flip_p_value([1] * 70 + [-1] * 30) == pytest.approx(float(2 * tail), rel=1e-9)


def test_the_detectable_difference_by_hand() -> None:
    """1.95996 + 0.84162 = 2.80158; AIME's 30 problems with a spread of 20 points: 10.2 points."""
    assert detectable_difference(0.2, 30) == pytest.approx(2.80158 * 0.2 / math.sqrt(30), rel=1e-5)
    assert detectable_difference(0.2, 30) == pytest.approx(0.102, abs=5e-4)
    assert detectable_difference(0.0, 30) is None  # problems that are all alike
    assert standard_deviation([1.0]) == 0  # of a single problem


def finished_sums(folder: Path, suite: Path, right: int, *texts: str) -> Path:
    """A finished evaluation of three sums with these first responses, stored in any order; the last is not
    judged."""
    digest = hashlib.sha256(suite.read_bytes()).hexdigest()
    about: dict[str, Any] = {
        "format": FORMAT,
        "suite": {"name": "sums", "path": str(suite), "sha256": digest, "problems": 3},
        "sampling": {"temperature": 1.0},
        "samples": 2,
    }
    with open_folder(folder / "sums", about) as log:
        for problem, sample in itertools.product((2, 0, 1), (1, 0)):
            is_right, failure = (problem, sample) == (right, 0), "time" if problem == 2 else None
            judged = ScoredResponse(problem, sample, is_right, None, 3, "stop", failure)
            log.append_all([{**asdict(judged), "text": "another" if sample else texts[problem]}])
    write_summary(folder / "sums", about, score(read_responses(folder / "sums" / RESPONSES, 2)))
    return folder


FIRST = "sums, problem 0: 1 + 1 =\n  A, wrong: perhaps\n  B, right: surely\n"
SECOND = "sums, problem 1: 2 + 2 =\n  A, right: perhaps so\n  B, wrong: surely so\n"
THIRD = "sums, problem 2: 3 + 3 =\n  A, unjudged: one \u23ce two \\x1b[2J\n  B, unjudged: {} [...] {}\n"


def test_examples_of_first_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text is one line, however long and whatever it holds."""
    suite, system = tmp_path / "data.jsonl", {"role": "system", "content": "Be brief."}
    asked = [[system, {"role": "user", "content": f"{n} + {n} ="}] for n in (1, 2, 3)]
    suite.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))
    a = finished_sums(tmp_path / "a", suite, 1, "perhaps", "perhaps so", "one\ntwo \x1b[2J")
    b = finished_sums(tmp_path / "b", suite, 0, "surely", "surely so", "x" * 300 + "MIDDLE" + "y" * 300)
    assert examples_text(a, b / "sums", 99) == FIRST + SECOND + THIRD.format("x" * 250, "y" * 250)
    command = ["eval", "compare", str(a), str(b)]
    (b / "more").symlink_to("sums")
    assert run([*command, "--examples", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith(f"\n{FIRST}")
    assert printed.err == "left out, since not finished in both: more\n"
    suite.write_text(suite.read_text() + "\n")
    assert run([*command, "--examples", "1"]) == 2
    assert f"{suite} is gone or has changed since {a}/sums was asked" in capsys.readouterr().err
