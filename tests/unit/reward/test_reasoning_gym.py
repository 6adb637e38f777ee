"""The reward of reasoning-gym's tasks: answers in responses, verifiers, and what may not reach them."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.reward import reasoning_gym
from bapo_megatron.reward.functions import extra_info_check, ground_truth_check
from bapo_megatron.reward.reasoning_gym import (
    answer_of,
    check_extra_info,
    extra_info_of_entry,
    is_harmless,
    score,
)
from bapo_megatron.types import Prompt
from tests.unit.reward.test_reward_pool import pooling

VALUES = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
ARITHMETIC = ("countdown", "puzzle24")
ALGEBRA = ("intermediate_integration", "polynomial_multiplication", "simple_integration")


def entry_of(task: str) -> dict[str, Any]:
    problems, options = reasoning_gym.tasks()[task]
    found: dict[str, Any] = problems(config=options(seed=7, size=10))[0]  # type: ignore[index]
    return found


def info_of(task: str, answer: str | None = None, **metadata: Any) -> dict[str, str]:
    return extra_info_of_entry(task, {}, {"answer": answer, "metadata": metadata})


@pytest.mark.parametrize(
    ("response", "expected", "answer"),
    [
        ("15", "15", "15"),
        ("7 + 8 = 15", "15", "15"),
        ("The sum is 1,234, I think", "15", "1,234"),
        ("12-5", "7", "5"),  # a difference, not -5
        ("it is -5", "7", "-5"),
        ("it is \u22125", "7", "-5"),
        ("1.5e-3", "0.0015", "1.5e-3"),
        ("no number", "15", None),
        ("7 + 8 = <answer> 15 </answer>, not 16", "15", "15"),
        ("<answer>1</answer> or <answer>2</answer>", "15", "2"),
        ("<answer></answer> 15", "15", None),
        ("it is \\boxed{15}, not 16", "15", "15"),
        ("<think>15", "15", None),
        ("15 <think>16", "15", "15"),
        ("  a b\nc ", "x y", "a b\nc"),
        ("it is 7", None, "it is 7"),
    ],
)
def test_the_answer_in_a_response(response: str, expected: str | None, answer: str | None) -> None:
    assert answer_of(response, expected) == answer


HOSTILE = [
    *("__import__('os').system('true')", "().__class__.__base__.__subclasses__()", "(lambda: 1)()", "f'{1}'"),
    *("[x for x in (1, 2)]", "'a' * 10**9", "9**9**9**9", "(((9**9)**9)**9)**9", "x.real", "(x := 1)"),
    *("1 if x else 2", "open('/etc/passwd').read()", "exit()", "S('x')", "N(x, 1000000000)", "(x).n(9)"),
    *("Integral(x, x)", "99999999!", "sympify('1')", "exp(x, evaluate=False)", "exit ()", "N (x)", "x.n"),
    *(
        "x[0]",
        "+".join("1" * 1001),
        "x**9 ** 9",
        "9**(9)**9",
        "9**9**x**9",
        "x**(9)(9)",
        "9 .real",
        "9**1000",
    ),
    *("9**(9*9*9)", "9**(9**9)", "exp(9).n(9)", "(9**20)** (20)+(9**20)**20", "(exp)(x, 9)", "x._y", "pi()"),
]


@pytest.mark.parametrize("answer", HOSTILE)
def test_what_is_not_evaluated(answer: str) -> None:
    for task in (*ARITHMETIC, *ALGEBRA):
        assert not is_harmless(task, answer), task
    if answer != "99999999!":  # no Python: eval cannot read it either
        for task in VALUES:
            assert not is_harmless(task, answer), task


@pytest.mark.parametrize(
    ("tasks", "answers"),
    [
        (
            VALUES,
            ["0 1\n1 0", "[[0, 1], [1, 0]]", "['_', 'Q']", "ABCDE", "[" * 300, "-1", "a b c", "", "{1: 2}"],
        ),
        (ARITHMETIC, ["(1 + 2) * 8", "6*4/1-0", "-3 + 27", "2.5 * 4"]),
        (ALGEBRA, ["-34*x**8/15 - 5*x/4 + C", "-4*(-2*x - 8)**(3/2)/3 + C", "exp(x)*sin(x)", "2*pi*sqrt(x)"]),
    ],
)
def test_what_is_evaluated(tasks: tuple[str, ...], answers: list[str]) -> None:
    for task in tasks:
        assert [answer for answer in answers if not is_harmless(task, answer)] == []


@pytest.mark.parametrize(
    ("task", "harmless", "harmful"),
    [
        ("simple_integration", ("(x + 1)**200", "9**200"), ("(x + 1)**201", "((9**20)**20)**20", "9" * 19)),
        ("countdown", ("+".join("1" * 50),), ("2**3", "x + 1", " " * 2001 + "1")),
        ("caesar_cipher", ("__import__('os')",), ("x" * 20_001,)),  # its verifier compares texts
        ("coin_flip", ("0.5",), ("1e999999999",)),
        ("rubiks_cube", ("U9",), ("U999999999",)),
        ("rush_hour", ("A+9",), ("A+999999999",)),
    ],
)
def test_the_size_of_what_is_evaluated_is_bounded(
    task: str, harmless: tuple[str, ...], harmful: tuple[str, ...]
) -> None:
    assert all(is_harmless(task, answer) for answer in harmless)
    assert not any(is_harmless(task, answer) for answer in harmful)


@pytest.mark.parametrize("task", [*VALUES, *ARITHMETIC, *ALGEBRA])
def test_no_answer_runs_code_in_a_real_verifier(task: str, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    info = extra_info_of_entry(task, {}, entry_of(task))
    call = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    for answer in (call, f"[{call}]", f"1 + {call}", f"(lambda: {call})()"):
        assert score(info, f"<answer>{answer}</answer>") < 0.1
    assert not trace.exists()


def test_an_answer_that_sympy_thinks_about_for_minutes_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "CPU_LIMIT_S", 0.2)
    about = {"integrand": "exp(x)*sin(x)", "variable": "x"}
    assert score(info_of("intermediate_integration", "x", **about), "<answer>(x+y+z+w+1)**30</answer>") == 0.0
    never_ends = lambda *_: sum(1 for _ in iter(int, 1))  # noqa: E731
    monkeypatch.setattr(reasoning_gym, "verifier", lambda *_: never_ends)
    assert score(info_of("chain_sum", "15"), "15") == 0.0


@pytest.mark.parametrize(
    ("task", "answer", "metadata"),
    [
        ("number_sorting", "__import__('os').getcwd()", {}),
        ("bitwise_arithmetic", "0x1", {"problem": "exit()"}),
        ("bitwise_arithmetic", "0x1", {"problem": "0x1 ** 0x9999"}),
        ("bitwise_arithmetic", "0x1", {"problem": "0x1 << 0x99999999"}),
        ("simple_integration", "x", {"integrand": "exit()", "variable": "x"}),
        ("intermediate_integration", "x", {"variable": "x"}),
        ("polynomial_multiplication", "().__class__", {}),
    ],
)
def test_a_row_whose_own_text_would_be_evaluated_is_refused(
    task: str, answer: str, metadata: dict[str, Any]
) -> None:
    problem = str(check_extra_info(info_of(task, answer, **metadata)))
    assert f"which {task}'s verifier would evaluate" in problem


@pytest.mark.parametrize(
    ("info", "scores"),
    [
        (info_of("chain_sum", "15"), {"15": 1, "+015.0": 1, "115": 0, "1": 0, "fifteen": 0}),
        # A text that contains the right one has its share of it.
        (info_of("caesar_cipher", "ABCD"), {"ABCD": 1, "x ABCD": 4 / 6, "ABC": 0}),
        # The verifier raises at what is not a number.
        (info_of("prime_factorization", "2 \u00d7 3"), {"3 \u00d7 2": 1, "1 \u00d7 6": 0.5, "two": 0}),
        # The verifier gives 1 for 0, and for all that the right answer begins with.
        (
            info_of("coin_flip", "0.9982910"),
            {"0.9982910": 1, "0.99829": 1, "0": 0, "0.9": 0, "1": 0, "0/1": 0},
        ),
        (info_of("complex_arithmetic", "1 + 2i", result=[1, 2]), {"1 + 2i": 1, "nan": 0}),
    ],
)
def test_scores_by_hand(info: dict[str, str], scores: dict[str, float]) -> None:
    assert {text: score(info, f"<answer>{text}</answer>" if text else "") for text in scores} == scores
    assert score(info_of("chain_sum", "15"), "7 + 8 = 15") == 1.0
    counted = info_of("rectangle_count", "3")  # near ones have a part
    assert score(counted, "3") == 1.0
    assert 0 < score(counted, "4") < 1


def test_settings_reach_the_verifier() -> None:
    entry = {"answer": "24", "metadata": {}}
    for most, right in ((8, 0.01), (10, 1.0)):
        info = extra_info_of_entry("puzzle24", {"max_value": most}, entry)
        assert score(info, "<answer>9 + 9 + 5 + 1</answer>") == right


@pytest.mark.parametrize("task", ["chain_sum", "rearc", "countdown", "tower_of_hanoi"])
def test_a_task_takes_its_own_answers_after_a_journey_through_json(task: str) -> None:
    problems, options = reasoning_gym.tasks()[task]
    random.seed(7)
    made = problems(config=options(seed=7, size=10))
    for number in range(1 if task in ("knight_swap", "sokoban") else 4):
        entry: dict[str, Any] = made[number]  # type: ignore[index]
        info = json.loads(json.dumps(extra_info_of_entry(task, {}, entry)))
        assert check_extra_info(info) is None
        for wrong in ("<answer>-</answer>", "<answer>[[[</answer>", "<answer>nan</answer>"):
            assert 0 <= score(info, wrong) <= 0.34
        if entry["answer"] is not None and "Integral" not in entry["answer"]:
            assert score(info, f"<think>1</think> <answer>{entry['answer']}</answer>") == 1.0


@pytest.mark.slow
def test_every_task_takes_its_own_answers() -> None:
    """But for one whose generator needs a compiler."""
    for task in reasoning_gym.tasks().keys() - {"zebra_puzzles"}:
        test_a_task_takes_its_own_answers_after_a_journey_through_json(task)


def test_tasks_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for task, says in (
        ("chain_sums", "no task 'chain_sums'; it has ab, .* chain_sum, "),
        ("game_of_life_halting", "game_of_life_halting cannot be used: its verifier calls every"),
    ):
        with pytest.raises(ConfigError, match=says):
            reasoning_gym.check_task(task)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"cannot be imported .*: pip install 'bapo-megatron\[real\]'"):
        reasoning_gym.tasks.__wrapped__()


def test_rows_are_checked_by_what_the_verifier_needs() -> None:
    check = extra_info_check("reasoning_gym")
    assert check is not None
    assert check(info_of("chain_sum", "15")) is None
    assert "extra_info.task is missing" in str(check({}))
    assert "no task 'chain_sums'" in str(check({**info_of("chain_sum", "15"), "task": "chain_sums"}))
    assert "unexpected keyword" in str(check({**info_of("chain_sum", "15"), "settings": '{"a": 1}'}))
    assert "none of reasoning-gym's" in str(check({**info_of("chain_sum", "15"), "entry": "{"}))
    assert ground_truth_check("reasoning_gym") is None
    assert extra_info_check("math") is None


@pytest.mark.integration
async def test_workers_score_with_the_rewards_of_the_run() -> None:
    asked = (("chain_sum", "15", False), ("chain_sum", "15", True), ("rectangle_count", "3", False))
    sums, opened, counted = (
        Prompt(0, np.zeros(1, np.int32), "15", "sums", dict(info_of(task, answer)), opens)
        for task, answer, opens in asked
    )
    async with pooling(function="reasoning_gym", correct=2.0, wrong=-1.0) as pool:
        found = [await pool.score(one, "15", 1) for one in (sums, opened)]  # a thought without an end
        found.append(await pool.score(counted, "<answer>4</answer>", 1))  # near, which is worth a part
    share = score(info_of("rectangle_count", "3"), "<answer>4</answer>")
    assert [one.reward for one in found] == [2.0, -1.0, pytest.approx(-1 + 3 * share)]
