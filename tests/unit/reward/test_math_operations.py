r"""Mathematics as a calculator: operations that a policy leaves to the judge, and answers that stay right.

``equal`` is called in this process, so that a table costs no child.
"""

from __future__ import annotations

import pytest

from bapo_megatron.reward import math_verify_compare
from bapo_megatron.reward.answer_text import final_answer, named_operations
from bapo_megatron.reward.math import answers_equal


def right(truth: str, answer: str, allow_operations: bool = False) -> bool:
    return answers_equal(truth, answer, math_verify_compare.equal, allow_operations)


RESTATED: list[tuple[str, ...]] = [
    ("5050", r"\sum_{k=1}^{100} k"),
    ("120", r"\prod_{k=1}^{5} k", r"\binom{10}{3}", r"{10 \choose 3}", "5!"),
    (r"\frac{1}{3}", r"\int_0^1 x^2 dx"),
    ("1", r"\lim_{x\to 0} \frac{\sin x}{x}", r"\frac{1+2}{3}"),
    ("2x", r"\frac{d}{dx} x^2", r"\frac{\mathrm{d}}{\mathrm{d}x} x^2"),
    ("2", r"2^{100} \mod 7", r"\max(1,2)", "|3-5|", r"\frac{\sqrt{8}}{\sqrt{2}}"),
    ("4", r"\gcd(12,8)", r"\sqrt{16}"),
    ("14", r"\lfloor\sqrt{200}\rfloor", "2(3+4)"),
    ("-2", r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    ("3", r"\log_2 8", "x-x+3"),
    (r"\frac{1}{2}", r"\cos\frac{\pi}{3}"),
    ("906", "578+328", "x = 578+328"),
    ("5", r"\frac{10}{2}", "10:2"),
    (r"\frac{1}{6}", r"\frac{1}{2}\cdot\frac{1}{3}"),
    (r"7\sqrt{2}", r"\sqrt{50}+\sqrt{8}"),
    ("7", "3 4"),
    ("(3,4)", "(1+2,4)"),
    (r"\begin{pmatrix}2\\2\end{pmatrix}", r"\begin{pmatrix}1+1\\2\end{pmatrix}"),
]
"""Questions whose text is their own value; each row begins with it."""


@pytest.mark.parametrize("row", RESTATED)
def test_a_question_is_not_its_own_answer(row: tuple[str, ...]) -> None:
    truth, *answers = row
    for answer in answers:
        assert not right(truth, answer)
        assert right(truth, answer, allow_operations=True), "or the test would be about something else"


@pytest.mark.parametrize(
    "row",
    [
        (r"\binom{10}{3}", r"\binom{10}{7}", "120"),
        (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
        ("1/3^{40}", r"\frac{1}{3^{40}}"),
        # shown, and carried out
        ("5050", r"\sum_{k=1}^{100} k = 5050"),
        ("906", "578+328=906"),
        # numbers
        ("3/4", r"\frac{3}{4}"),
        (r"10\sqrt{2}", r"\sqrt{200}"),
        (r"\frac{4\pi}{3}", r"\frac{4}{3}\cdot\pi"),
        (r"\frac{\sqrt{6}+\sqrt{2}}{4}", r"\frac{\sqrt{2}+\sqrt{6}}{4}"),
        ("1000000", "10^{6}"),
        ("1500", r"1.5\times 10^3"),
        ("7/2", r"3\frac{1}{2}"),
        ("3.14159265", r"\pi"),
        # formulas have many forms
        ("x^2+x-2", "(x-1)(x+2)"),
        ("3x+6", "3(x+2)", r"3x+2\cdot 3"),
        # many values
        ("1,2", "(1,2)"),
        (r"\pm 3", "3, -3"),
        # shown in an equation, with a unit, as bounds
        ("5", "2+3=5", "x=2+3=5", r"5\text{ min}"),
        (r"\frac{1}{3}", r"0.33=\frac{1}{3}"),
        ("45", r"45\,\mathrm{min}"),
        # bounds, which math-verify compares in this direction only
        ("-1<x<1", "(-1,1)"),
        ("x<3", r"(-\infty,3)"),
        # near enough
        (r"\frac{1}{19}", "0.052632"),
        (r"20\%", "20", "0.2"),
        ("0.2", r"20\%"),
        (r"\{2,1\}", r"\left\{1,2\right\}"),
        ("0", "0.0"),
        ("e^{-40}", r"\frac{1}{e^{40}}"),
    ],
)
def test_an_answer_stays_an_answer(row: tuple[str, ...]) -> None:
    truth, *answers = row
    for answer in answers:
        assert right(truth, answer)


@pytest.mark.parametrize(
    "row",
    [
        # words, with a font and without
        (r"\text{Yes}", "Yes", "yes"),
        (r"\text{no solution}", "no solution", "No solution"),
        ("12", r"\mathbf{12}", r"\text{12}"),
        # equations with the same solutions
        ("2x+3y=6", "4x+6y=12", r"y=2-\frac23x"),
        ("xy=1", "y=1/x"),
        ("y=0.5x+1", "x-2y+2=0"),
        ("(x-1)^2+(y-2)^2=9", "x^2+y^2-2x-4y-4=0"),
        # other spellings
        ("5000", r"5\,000", "5,000", "5 000", r"5\ 000", "5000."),
        ("0.002", "2E-3"),
        ("7/2", "3½"),
        (r"\sqrt{x+1}", "√(x+1)"),
        (r"(0, \infty)", "(0, ∞)"),
        ("x^{12}", "x¹²"),
        ("34", "\uff13\uff14", r"\underline{34}"),
        (r"30^\circ", "30°"),
        (r"\log_{2}3", r"\log_2 3"),
        ("0.5", r"\frac 1 2"),
        # the same text, which math-verify cannot read
        ("6:00 PM", r"6:00 \text{ PM}"),
    ],
)
def test_two_forms_of_one_answer(row: tuple[str, ...]) -> None:
    truth, *answers = row
    for answer in answers:
        assert right(truth, answer)
        assert right(answer, truth)


@pytest.mark.parametrize(
    "row",
    [
        ("x=906", "x-578=328"),
        ("x+y=3", "y=4-x"),
        ("y=e^{-40}x", "y=e^{-41}x", "y-e^{-41}x=0"),
        ("-1<x<1", "[-1,1]", "(-1,2)"),
        ("0<x<e^{-40}", "(0,e^{-41})"),
        ("5", "6=5", "5=6=5", "x=6=5", "6=x=5", r"2\cdot 3=5"),
        ("1,5", "1,6=5"),
        # other numbers and words
        ("5000", r"5\,00", "5 00"),
        ("22", "2²"),
        ("1010_{2}", "1010_3"),
        (r"\text{odd}", "even"),
        ("34", r"\text{3 4}"),
        ("72", "2^3 3^2"),
        ("3.5", r"\frac 1 2 3"),
    ],
)
def test_another_answer_is_wrong(row: tuple[str, ...]) -> None:
    truth, *answers = row
    for answer in answers:
        assert not right(truth, answer)


@pytest.mark.parametrize(
    "row",
    [
        ("e^{-40}", "e^{-41}"),
        ("1/3^{40}", "1/3^{41}"),
        (r"\{1, e^{-40}\}", r"\{1, e^{-41}\}"),
        ("4e-7", "1e-7"),
        ("0", "e^{-41}"),
        ("5", r"5\%"),
        (r"\{1,2\}", "(1,2)"),
    ],
)
def test_what_is_near_or_alike_is_not_equal(row: tuple[str, ...]) -> None:
    truth, *answers = row
    for answer in answers:
        assert not right(truth, answer, allow_operations=True)
        assert right(truth, truth)
        assert right(answer, answer)


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (r"\binom{x=10}{3}", {"combinatorics"}),
        (r"\binom{10}{3} = 120, \gcd(4, 6) = 2", set()),
        (r"5\!", set()),
        (r"\mathrm{ gcd }(4, 6)", {"divisor"}),
        (r"5\,\mathrm{min}", set()),
        (r"\mathrm{min}(4, 6)", {"extremum"}),
        (r"2\mathrm{min}(4, 6)", {"extremum"}),
        (r"12 \operatorname{mod} 5", {"modulo"}),
    ],
)
def test_the_operations_that_a_text_names(answer: str, kinds: set[str]) -> None:
    assert named_operations(answer) == kinds


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1}", "1"),
        (r"<think>\boxed{2}</think> \boxed{1}", "1"),
        (r"\boxed{2}</think> \boxed{1}", "1"),
        (r"<think>\boxed{2}", None),
        (r"\boxed{2}</think>", None),
        (r"<think>a</think> \boxed{1} <think>\boxed{2}", "1"),
    ],
)
def test_a_box_counts_behind_the_thinking_part(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer
    assert final_answer(response.removeprefix("<think>"), response.startswith("<think>")) == answer
