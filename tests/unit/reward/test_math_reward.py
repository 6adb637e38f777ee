"""The reward of mathematical answers that policies and datasets produce; the penalty of overlong ones."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
from math_verify import grader

from bapo_megatron.reward import math_verify_compare
from bapo_megatron.reward.answer_text import last_boxed
from bapo_megatron.reward.math import MathVerifyProcess, answer_is_right, answers_equal, check_ground_truth
from bapo_megatron.reward.pool import overlong_penalty


def judge(ground_truth: str, response: str) -> float:
    return 1.0 if answer_is_right(ground_truth, response) else -1.0


@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [
        ("0.5", r"\frac{1}{2}"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", "1/2"),
        ("34", "34"),
        ("34", " 34 "),
        ("34", "34.0"),
        ("34", "+34"),
        ("7", "007"),
        ("34", "x = 34"),
        ("34", r"34\text{ cm}"),
        ("1000", "1,000"),
        ("-3", "-3.0"),
        (r"\{1, 2\}", r"\{2, 1\}"),
        ("1,2", "2, 1"),
        ("[0, 1)", r"\left[0,1\right)"),
        ("x^2+2x", "x(x+2)"),
        (r"2\pi", r"\pi \cdot 2"),
        (r"\sqrt{2}", r"\frac{2}{\sqrt{2}}"),
        (r"10\%", "0.1"),
        (r"\boxed{12}", "12"),
        ("12", r"\boxed{12}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("1" + "0" * 60, "1" + "0" * 60),
    ],
)
def test_equal_answers(ground_truth: str, answer: str) -> None:
    assert judge(ground_truth, f"So it is \\boxed{{{answer}}}.") == 1.0


@pytest.mark.parametrize(
    ("ground_truth", "response"),
    [
        ("34", r"\boxed{35}"),
        ("34", r"\boxed{-34}"),
        ("34", r"\boxed{3 4 5}"),
        ("34", "34"),
        ("34", ""),
        ("34", r"\boxed{}"),
        ("34", r"\boxed{   }"),
        ("34", r"\boxed{34"),
        ("34", r"\boxed"),
        ("34", r"\boxed 34"),
        ("34", r"\boxed{\frac{34}"),
        ("34", r"\boxed{}}34}"),
        ("34", r"\boxed{\\\\\frac{{{}}}}"),
        ("34", r"\boxed{日本 34}"),
        ("34", "\\boxed{\x00\ud800}"),
        ("34", r"\boxed{34, 35}"),
        ("34", "\\boxed{" + "3" * 100000 + "}"),
        ("34", "\\boxed{" * 3000 + "34"),
        ("34", "\\boxed{" + "(" * 900 + "}"),
        ("1/3", r"\boxed{0.33}"),
        (r"\{1,2\}", r"\boxed{\{1,3\}}"),
        ("(1,2)", r"\boxed{(2,1)}"),
        ("1" + "0" * 60, r"\boxed{1" + "0" * 59 + "1}"),
    ],
)
def test_wrong_and_malformed_answers(ground_truth: str, response: str) -> None:
    assert judge(ground_truth, response) == -1.0


@pytest.mark.parametrize(
    ("response", "boxed"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\{1}", r"\{1"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{a}b}", "a"),
        (r"{ \boxed{5}", "5"),
        (r"}}} \boxed{5}", "5"),
        (r"\\boxed{5}", "5"),
        (r"\\\boxed{5}", "5"),
        (r"\mbox{5}", None),
        ("none", None),
        ("", None),
    ],
)
def test_last_boxed(response: str, boxed: str | None) -> None:
    assert last_boxed(response) == boxed


def test_finding_the_box_takes_linear_time() -> None:
    start = time.process_time()  # other programs may have the processor
    assert last_boxed("\\boxed{" * 100_000) is None
    assert last_boxed("\\" * 500_000 + " \\boxed{1}") == "1"
    assert time.process_time() - start < 10  # quadratic would be hours


def test_the_last_box_counts() -> None:
    assert judge("2", r"\boxed{1} no, \boxed{2}") == 1.0
    assert judge("1", r"\boxed{1} no, \boxed{2}") == -1.0


@pytest.mark.parametrize("truth", ["34", r"\frac{1}{2}", r"\{1,2\}", "x=3", r"\text{Monday}", r"\boxed{3}"])
def test_ground_truths_that_are_fine(truth: str) -> None:
    assert check_ground_truth(truth) is None


@pytest.mark.parametrize("truth", ["???", r"\frac{", "}{", "", "日本", "7" * 2000])
def test_ground_truths_that_nothing_could_match(truth: str) -> None:
    problem = check_ground_truth(truth)
    assert problem
    assert "answer" in problem or "mend" in problem


@pytest.mark.parametrize(
    "truth", ["proof", r"\text{proof}", "Proof", "notfound", "not found", "nan", "NaN", "null", "N/A"]
)
def test_a_ground_truth_that_stands_for_no_answer_is_none(truth: str) -> None:
    r"""A policy would learn to write ``\boxed{proof}``."""
    assert "stands for no answer" in str(check_ground_truth(truth))


@pytest.mark.parametrize(
    "truth", ["\frac{1}{2}", "2\frac{1}{3}", "\binom{3}{2}", "\text{(A)}", "\theta", "\right)", "x \neq 3"]
)
def test_a_ground_truth_that_has_lost_its_backslash_is_refused(truth: str) -> None:
    """These are not raw strings: each has a form feed, a tab ... No right answer would match."""
    assert not truth.isprintable()
    assert "lost its backslash" in str(check_ground_truth(truth))


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        ("def check(c):\n    assert c(1) == 2", "a program or data"),
        ("\n\nMETADATA = 1\n\ndef check(candidate):\n    pass", "a program or data"),
        ('[{"input": "3", "output": "6"}]', "a program or data"),
        ("{'inputs': ['3'], 'outputs': ['6']}", "a program or data"),
        ("['3', '4']", "a list of answers"),
        ("1 00", "side by side"),
        ("12 345 67", "side by side"),
        (r"1\ 2", "side by side"),
    ],
)
def test_a_ground_truth_that_math_verify_misreads_is_refused(truth: str, says: str) -> None:
    """It parses these as products of letters, or of 1 and 0: the right answer would be wrong."""
    assert says in str(check_ground_truth(truth))


@pytest.mark.parametrize(
    "truth",
    [
        *(r"3 \frac{1}{2}", r"1\,000", r"\{1, 2\}", "[0, 1)", r"\text{class A}", "from 1", "(1, 2)"),
        *(r"\log_2 3", r"\frac 1 2", r"\dfrac1 2", "2^3 3^2"),
    ],
)
def test_a_ground_truth_that_only_looks_so_is_fine(truth: str) -> None:
    assert check_ground_truth(truth) is None


def test_white_space_in_a_ground_truth_is_none_of_a_command() -> None:
    assert check_ground_truth("\\begin{pmatrix}1\\\\\n2\\end{pmatrix}\n") is None
    assert check_ground_truth("\t34\r\n") is None


@pytest.mark.parametrize("bomb", [r"9^{9^{9^{9}}}", "(x+y)^{3000}", r"10000000!^{10000}"])
def test_an_answer_that_takes_for_ever_is_wrong(bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert judge("5", f"\\boxed{{{bomb}}}") == -1.0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 30
    assert judge("0.25", r"\boxed{\frac14}") == 1.0


def test_works_in_any_thread(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[float] = []
    cases = [(f"0.{n}25", rf"\boxed{{\frac{{{n}25}}{{1000}}}}") for n in range(1, 7)]
    threads = [threading.Thread(target=lambda case=case: seen.append(judge(*case))) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [1.0] * len(cases)
    assert capfd.readouterr() == ("", "")


def test_a_dead_child_costs_one_question() -> None:
    lone = MathVerifyProcess()
    assert lone.ask("equal", "1/2", "0.5")
    assert lone._child is not None
    lone._child.kill()
    assert not lone.ask("equal", "1/2", "0.5")
    assert lone.ask("equal", "1/2", "0.5")
    lone.close()


def test_integers_are_judged_as_math_verify_does() -> None:
    """They take a short cut; it must lead to the same place."""
    lone = MathVerifyProcess()
    texts = ["0", "-0", "7", "007", "+7", "-7", "70", "1234567890123456789012"]
    for truth in texts:
        for answer in texts:
            assert answers_equal(truth, answer) == lone.ask("equal", truth, answer), (truth, answer)
    lone.close()


def test_thousands_of_judgements_a_second() -> None:
    responses = [rf"\boxed{{\frac{{{n % 7 + 1}}}{{8}}}}" for n in range(4000)]
    for response in responses[:7]:
        judge("0.25", response)
    start = time.monotonic()
    assert sum(judge("0.25", response) == 1.0 for response in responses) > 500
    assert time.monotonic() - start < 2


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
        "worker.COMPARISON_CPU_LIMIT_S = 0.2\n"
        "worker._limited(lambda: 3**1_000_000_000 == 0)([])"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=300)
    assert ended.returncode == -signal.SIGPROF


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (0, 0.0),
        (79, 0.0),
        (80, 0.0),  # L_max - L_cache = 100 - 20: the zone begins after it
        (81, 0.5 * 1 / 20),
        (85, 0.5 * 5 / 20),
        (90, 0.25),
        (99, 0.475),
        (100, 0.5),
        (130, 0.5),
    ],
)
def test_the_overlong_penalty_of_dapo(tokens: int, penalty: float) -> None:
    """Zone of 20 tokens before 100, penalty 0.5: half of Eq. 13, with the other sign."""
    ours = overlong_penalty(tokens, max_response_tokens=100, zone_tokens=20, penalty=0.5)
    assert ours == pytest.approx(penalty, abs=1e-15)


def test_the_papers_numbers() -> None:
    """Expected length 16,384 and a cache of 4,096 on top: at 18,432 tokens half the way is gone."""
    assert overlong_penalty(16384, 20480, 4096, 1.0) == 0.0
    assert overlong_penalty(18432, 20480, 4096, 1.0) == 0.5
    assert overlong_penalty(20480, 20480, 4096, 1.0) == 1.0


def test_without_a_zone_length_is_free() -> None:
    assert overlong_penalty(100, max_response_tokens=100, zone_tokens=0, penalty=0.5) == 0.0
