r"""Words, units, dates and other texts in mathematical answers: all digits and words of a truth are compared.

``math_answers.jsonl`` has pairs of answers that are ``different`` or ``equal``, whichever is the truth, or
``wrong`` or ``right`` for the truth alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapo_megatron.reward import math_verify_compare
from bapo_megatron.reward.answer_words import canonical, reading, split_name
from bapo_megatron.reward.math import answers_equal, check_ground_truth

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "fixtures/math_answers.jsonl").read_text().splitlines()
]
REPLACED = {
    "7": "3",
    "2": "9",
    "hours": "days",
    "miles": "feet",
    "Monday": "Friday",
    "red": "green",
    "h": "k",
}


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
        *(
            r"7\text{ hours }2\text{ minutes}",
            "7 hours 2 minutes",
            r"\text{Monday }7",
            r"7\text{ red}, 2\text{ blue}",
        ),
        *(
            r"\frac{1}{3}\pi r^2 h",
            "72.7.2.7",
            "7-2-72",
            r"7^\circ 27'",
            "f(2)=7",
            "7:27 a.m.",
            r"(7,2), (2,7)",
        ),
        *("7 miles", r"72\text{ miles per hour}", "2 out of 7", r"7\text{ if }x>2", r"27_{\text{eight}}"),
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
    ("answer", "parts", "words"),
    [
        (r"2\text{ hours }30\text{ minutes}", ("2", "30", ""), ("h", "min")),
        (r"15 \mathrm{~km} / \mathrm{h}", ("15", ""), ("km/h",)),
        ("60 miles per hour", ("60", ""), ("mi/h",)),
        (r"9.8\text{ m/s}^2", ("9.8", ""), ("m/s^2",)),
        (r"12\text{ sq. cm}", ("12", ""), ("cm^2",)),
        (r"\$5\text{ million}", ("5", ""), ("million dollar",)),
        (r"x=3\text{ or }x=5", (r"x=3 or x=5",), ()),
        ("5 or more", ("5", ""), ("or more",)),
        ("2abc+mgh", ("2abc+mgh",), ()),
        (r"\frac{1}{2} mgh", (r"\frac{1}{2} mgh",), ()),
        (r"x_{\text{max}}", (r"x_{\text{max}}",), ()),
        ("2 sinx", ("2 sinx",), ()),
    ],
)
def test_an_answer_is_split_into_mathematics_and_words(
    answer: str, parts: tuple[str, ...], words: tuple[str, ...]
) -> None:
    found = reading(answer)
    assert (found.parts, found.words) == (parts, words)


def test_words_have_one_spelling() -> None:
    assert canonical("Square Feet") == canonical("ft^2") == "ft^2"
    assert canonical("degrees Celsius") == canonical("C")
    assert canonical("P.M.") == canonical("pm")


@pytest.mark.parametrize(
    ("answer", "split"),
    [
        ("f(2)=3", ("f(2)", "3")),
        ("P(X=2)=0.5", ("p(x=2)", "0.5")),
        (r"\text{Area}=5", ("area", "5")),
        ("x=3", ("", "x=3")),
        (r"9\text{ if }x=4", ("", r"9\text{ if }x=4")),
        ("f(1)=2, f(2)=3", ("", "f(1)=2, f(2)=3")),
    ],
)
def test_the_name_of_a_value(answer: str, split: tuple[str, str]) -> None:
    assert split_name(answer) == split


@pytest.mark.parametrize(
    "truth",
    [
        *("None", "NA", "nil", "unknown", "TODO", "see solution", "{}", r"\text{unknown}", "[]", "No answer"),
        *("FIXME", "unk", "See above", r"\text{not available}", "see the solution", "Refer to the solution."),
        *("see figure", "not given", "not_available", "notfound"),
    ],
)
def test_a_place_holder_is_no_truth(truth: str) -> None:
    assert "stands for no answer" in str(check_ground_truth(truth))


@pytest.mark.parametrize("truth", [r"\text{none}", "undefined", r"\emptyset", r"\text{no solution}"])
def test_an_answer_that_there_is_none_is_a_truth(truth: str) -> None:
    assert check_ground_truth(truth) is None


@pytest.mark.parametrize("answer", ["*73*", "_73_", "`73`", "***73***", "**73**.", "**73.**"])
def test_marks_of_markdown_do_not_count(answer: str) -> None:
    assert right("73", answer)
    assert not right("74", answer)


@pytest.mark.parametrize(
    ("truth", "same", "other"),
    [
        (r"x\equiv 5\mod 7", r"x\equiv 5\mod{7}", r"x\equiv 5\mod 8"),
        (r"5\mod 7", r"5\mod{ 7 }", r"5\mod{8}"),
    ],
)
def test_the_modulus_counts(truth: str, same: str, other: str) -> None:
    assert right(truth, same)
    assert not right(truth, other)


def test_wide_spaces_between_numbers_are_refused() -> None:
    assert "side by side" in str(check_ground_truth(r"5\quad 6"))
    assert not right("11", r"5\quad 6")
