r"""The reward of mathematical answers: numbers, words, units; what a truth may be; overlong responses.

``math_answers.jsonl`` has pairs of answers that are ``different`` or ``equal``, whichever is the truth, or
``wrong`` or ``right`` for the truth alone.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from math_verify import grader

from bapo_megatron.reward import math, math_verify_compare
from bapo_megatron.reward.answer_text import last_boxed
from bapo_megatron.reward.math import MathVerifyProcess, answer_is_right, answers_equal, check_ground_truth
from bapo_megatron.reward.pool import overlong_penalty
from bapo_megatron.runtime.child_process import ChildError


def judge(ground_truth: str, response: str) -> float:
    return 1.0 if answer_is_right(ground_truth, response) else -1.0


EQUAL: list[tuple[str, ...]] = [
    ("34", "34", " 34 ", "34.0", "+34", "x = 34", r"34\text{ cm}"),
    ("7", "007"),
    (r"\boxed{12}", "12"),
    ("12", r"\boxed{12}"),
    ("1" + "0" * 60, "1" + "0" * 60),
]


@pytest.mark.parametrize("row", EQUAL)
def test_equal_answers(row: tuple[str, ...]) -> None:
    truth, *answers = row
    for answer in answers:
        assert judge(truth, f"So it is \\boxed{{{answer}}}.") == 1.0


WRONG: list[tuple[str, ...]] = [
    ("34", "34", "", r"\boxed{34", r"\boxed", r"\boxed 34", "\\boxed{" * 3000 + "34"),
    *(
        ("34", f"\\boxed{{{answer}}}")
        for answer in (
            *("35", "-34", "3 4 5", "", "   ", r"\frac{34", "}}34", r"\\\\\frac{{{", "日本 34", "\x00\ud800"),
            *("34, 35", "3" * 100000, "(" * 900),
        )
    ),
    ("1/3", r"\boxed{0.33}"),
    (r"\{1,2\}", r"\boxed{\{1,3\}}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("1" + "0" * 60, r"\boxed{1" + "0" * 59 + "1}"),
]


@pytest.mark.parametrize("row", WRONG, ids=range(len(WRONG)))
def test_wrong_and_malformed_answers(row: tuple[str, ...]) -> None:
    truth, *responses = row
    for response in responses:
        assert judge(truth, response) == -1.0


@pytest.mark.parametrize(
    ("response", "boxed"),
    [
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{a}b}", "a"),
        (r"\\boxed{5}", "5"),
        (r"\\\boxed{5}", "5"),
        (r"\mbox{5}", None),
    ],
)
def test_last_boxed(response: str, boxed: str | None) -> None:
    assert last_boxed(response) == boxed


TRUTHS: dict[str, tuple[str, ...]] = {
    # A policy would learn to write \boxed{proof}.
    "stands for no answer": (
        *(r"\text{proof}", "Proof", "notfound", "not found", "NaN", "N/A", "None", "{}", "No answer"),
        *("See above", "see the solution", "Refer to the solution.", "not_available"),
    ),
    # Not raw: each has a form feed, a tab ... No right answer would match.
    "lost its backslash": ("\frac{1}{2}", "2\frac{1}{3}", "\binom{3}{2}", "\text{(A)}", "\theta", "x \neq 3"),
    # math-verify parses these as products of letters, or of 1 and 0: the right answer would be wrong.
    "a program or data": (
        "def check(c):\n    assert c(1) == 2",
        "\n\nMETADATA = 1\n\ndef check(candidate):\n    pass",
        '[{"input": "3", "output": "6"}]',
        "{'inputs': ['3'], 'outputs': ['6']}",
    ),
    "a list of answers": ("['3', '4']",),
    "side by side": ("1 00", "12 345 67", r"1\ 2", r"5\quad 6"),
    "cannot read": ("???", r"\frac{", "}{", "", "日本"),
    "may have 1000": ("7" * 2000,),
    "": (
        *("34", r"\frac{1}{2}", r"\{1,2\}", "x=3", r"\text{Monday}", r"\boxed{3}", r"3 \frac{1}{2}"),
        *("[0, 1)", r"\text{class A}", "(1, 2)", r"\log_2 3", r"\frac 1 2", r"\dfrac1 2", "2^3 3^2"),
        *("\\begin{pmatrix}1\\\\\n2\\end{pmatrix}\n", "\t34\r\n", "from 1", r"1\,000"),
        *(r"\text{none}", "undefined", r"\emptyset", r"\text{no solution}"),
    ),
}


@pytest.mark.parametrize("says", TRUTHS)
def test_ground_truths(says: str) -> None:
    found = {truth: check_ground_truth(truth) for truth in TRUTHS[says]}
    assert {
        truth: problem for truth, problem in found.items() if not (problem and says and says in problem)
    } == ({} if says else dict.fromkeys(TRUTHS[says]))


@pytest.mark.parametrize("bomb", [r"9^{9^{9^{9}}}", "(x+y)^{3000}", r"10000000!^{10000}"])
def test_an_answer_that_takes_for_ever_is_wrong(bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert judge("5", f"\\boxed{{{bomb}}}") == -1.0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 30
    assert judge("0.25", r"\boxed{\frac14}") == 1.0


def test_a_dead_child_costs_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = MathVerifyProcess()
    assert lone.ask("equal", "1/2", "0.5")
    assert lone._child is not None
    lone._child.kill()
    assert not lone.ask("equal", "1/2", "0.5")
    assert lone.ask("equal", "1/2", "0.5")
    lone.close()
    monkeypatch.setattr(math, "COMMAND", (sys.executable, "-c", ""))
    for _ in range(2):
        with pytest.raises(ChildError):
            lone.ask("equal", "1/2", "0.5")


def test_integers_are_judged_as_math_verify_does() -> None:
    """They take a short cut; it must lead to the same place."""
    lone = MathVerifyProcess()
    texts = ["0", "-0", "7", "007", "+7", "-7", "70", "1234567890123456789012"]
    for truth in texts:
        for answer in texts:
            assert answers_equal(truth, answer) == lone.ask("equal", truth, answer), (truth, answer)
    lone.close()


def test_a_busy_machine_calls_no_right_answer_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time on a clock does not count: of a comparison in a paused process none is CPU time."""
    compared = grader.sympy_expr_eq

    def late(*arguments: object) -> bool:
        time.sleep(2.5)
        return bool(compared(*arguments))

    assert math_verify_compare.CPU_LIMIT_S < 2.5
    monkeypatch.setattr(grader, "sympy_expr_eq", late)
    assert math_verify_compare.equal(r"\frac{5}{16}", "0.3125")
    monkeypatch.undo()  # a wait is enough
    assert not math_verify_compare.equal(r"\frac{5}{16}", "0.3135")


def test_an_operation_that_no_signal_interrupts_ends_the_child() -> None:
    """A power of big integers is one call of C code: the limit of CPU time within it must be the kernel's."""
    program = (
        "from bapo_megatron.reward import worker\n"
        "worker.COMPARISON_CPU_LIMIT_S = 1\n"
        "worker._limited(lambda: 3**1_000_000_000 == 0)([])"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=300)
    assert ended.returncode == -signal.SIGXCPU
    before = "import time\nwhile time.process_time() < 2.5: pass\n"  # of other comparisons
    program = before + program.replace("3**1_000_000_000 == 0", "sum(range(1_000_000)) == 0")
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 0


@pytest.mark.parametrize(
    ("tokens", "longest", "zone", "penalty", "taken"),
    [
        # A zone of 20 tokens before 100, penalty 0.5: half of Eq. 13, with the other sign.
        (0, 100, 20, 0.5, 0.0),
        (80, 100, 20, 0.5, 0.0),  # L_max - L_cache = 100 - 20: the zone begins after it
        (81, 100, 20, 0.5, 0.5 * 1 / 20),
        (90, 100, 20, 0.5, 0.25),
        (99, 100, 20, 0.5, 0.475),
        (100, 100, 20, 0.5, 0.5),
        (130, 100, 20, 0.5, 0.5),
        # The paper's: expected length 16,384 and a cache of 4,096 on top.
        (16384, 20480, 4096, 1.0, 0.0),
        (18432, 20480, 4096, 1.0, 0.5),
        (20480, 20480, 4096, 1.0, 1.0),
        (100, 100, 0, 0.5, 0.0),  # without a zone length is free
    ],
)
def test_the_overlong_penalty_of_dapo(
    tokens: int, longest: int, zone: int, penalty: float, taken: float
) -> None:
    assert overlong_penalty(tokens, longest, zone, penalty) == pytest.approx(taken, abs=1e-15)


PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "fixtures/math_answers.jsonl").read_text().splitlines()
]
REPLACED = {"7": "3", "2": "9", "hours": "days", "miles": "feet", "Monday": "May", "red": "green", "h": "k"}


def right(truth: str, answer: str) -> bool:
    return answers_equal(truth, answer, math_verify_compare.equal)


def test_pairs_of_answers() -> None:
    """One test for all: a thousand would take longer to name than to run."""
    wrong = []
    for pair in PAIRS:
        truth, answer, verdict = pair["truth"], pair["answer"], pair["verdict"]
        both_ways = verdict in ("different", "equal")
        for one, other in [(truth, answer), (answer, truth)][: 1 + both_ways]:
            if right(one, other) != (verdict in ("equal", "right")):
                wrong.append((verdict, one, other))
    assert wrong == []
    assert len(PAIRS) > 900


@pytest.mark.parametrize(
    "truth",
    [
        *(r"7\text{ hours }2\text{ minutes}", "7 hours 2 minutes", r"\text{Monday }7", r"(7,2), (2,7)"),
        *(r"7\text{ red}, 2\text{ blue}", r"\frac{1}{3}\pi r^2 h", "72.7.2.7", "7-2-72", r"7^\circ 27'"),
        *("7 miles", r"72\text{ miles per hour}", "2 out of 7", r"7\text{ if }x>2", r"27_{\text{eight}}"),
        *("f(2)=7", "7:27 a.m."),
    ],
)
def test_each_part_of_a_truth_counts(truth: str) -> None:
    assert check_ground_truth(truth) is None
    assert right(truth, truth)
    for part, other in REPLACED.items():
        start = truth.find(part)
        while start >= 0:
            changed = truth[:start] + other + truth[start + len(part) :]
            is_whole = not truth[start - 1 : start].isalpha() and not truth[start + len(part) :][:1].isalpha()
            if is_whole or part.isdigit():
                assert not right(truth, changed), changed
            start = truth.find(part, start + 1)


@pytest.mark.parametrize(
    ("truth", "same", "other"),
    [
        ("73", "***73***", "***74***"),
        ("73", "`73`", "`74`"),
        ("73", "**73.**", "**74.**"),
        ("73", "__73__.", "__74__."),
        (r"x\equiv 5\mod 7", r"x\equiv 5\mod{ 7 }", r"x\equiv 5\mod{8}"),
        ("56", "56", r"5\quad 6"),
    ],
)
def test_marks_do_not_count_and_numbers_do(truth: str, same: str, other: str) -> None:
    assert right(truth, same)
    assert not right(truth, other)
