"""`bapo data prepare`: what its filters leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.data.prepare.filters import COMMON, Contamination, EvaluationProblem
from bapo_megatron.data.prepare.options import CARD_TEXT, DATA_FILE
from tests.support.preparation import GOATS, MODEL, TESTS, kept, prepared, questions, skywork, write

SEVEN = "model_difficulty.DeepSeek-R1-Distill-Qwen-7B"


ENDING = "can be written as m/n where m and n are relatively prime positive integers. Find m+n."
BAKER = "A baker bakes 40 loaves each morning and sells 31 of them before noon so how many are left then?"
SEVEN_WORDS, FOUR_WORDS, SUM = "one two three four five six seven", "one two three four", "compute 1 + 1."
CONTEST = [f"The chance that {animal} wins {ENDING}" for animal in ("a cat", "a dog", "an ox", "a hen")]
HONEST = f"The sum of the first terms of a made up series {ENDING}"


@pytest.mark.parametrize(
    ("question", "problems", "size", "least", "share"),
    [
        # The problem has the 2-grams 12 to 67; the questions have four of them.
        ("zero one two three four five eight", [SEVEN_WORDS], 2, 2 / 3, 2 / 3),
        ("one two three four five eight", [SEVEN_WORDS], 2, 0.67, None),
        # A share rests on four n-grams: 12, 23 and 34 are all that it has. A short one must be equal.
        ("zero one two three four", [FOUR_WORDS], 2, 0.1, None),
        ("One two three four.", [FOUR_WORDS], 2, 0.3, 1),
        ("Compute $1+1$", [SUM], 8, 0.3, 1),
        ("Compute $1+1$ and then 2", [SUM], 8, 0.3, None),
        ("The final answer: 4 + 3 =", ["The final answer: 3 + 4 ="], 8, 0.3, None),
        (f"Solve this one: {BAKER.upper()} Thanks!", [GOATS, BAKER], 8, 0.3, 1),
        (f"{BAKER} Say it.", [BAKER] * COMMON, 8, 0.3, 1),  # in several sets it is not common
        (HONEST, CONTEST, 8, 0.3, None),  # an ending of COMMON problems is
        (HONEST, CONTEST[:1], 8, 0.3, 11 / 17),
    ],
)
def test_the_share_of_a_problem_that_a_question_has(
    question: str, problems: list[str], size: int, least: float, share: float | None
) -> None:
    found = Contamination([EvaluationProblem("s", n, p) for n, p in enumerate(problems)], size, least)
    match = found.match(question)
    assert (match and match[1]) == share
    assert match is None or match[0].row == len(problems) - 1 or problems[0] == problems[-1]


def test_each_filter_leaves_out_what_it_must(tmp_path: Path) -> None:
    suite = tmp_path / "suites/held_out"
    suite.mkdir(parents=True)
    write(suite / DATA_FILE, [{"problem": BAKER, "answer": "9"}])
    rows = [
        skywork(GOATS, '["19"]'),
        skywork(GOATS.replace("12", "$12$"), '["+19"]'),
        skywork("One box holds 3 balls.", "3"),
        skywork("one box holds 3 balls", "4"),
        skywork("What is left?", "5", failures=0),
        skywork("What is right?", "5", failures=16),
        {**skywork("No number.", "5"), "extra_info": {"index": 1}},
        skywork(f"{BAKER} Hurry.", "9"),
        skywork("x" * 500, "1"),
        skywork("Unreadable.", "?!"),
        skywork("Two answers.", '["1","2"]'),
    ]
    options = {"against": ("held_out",), "suites": tmp_path / "suites", "tokenizer": MODEL}
    options |= {"max_prompt_tokens": 400, "difficulty": SEVEN, "min_difficulty": 1, "max_difficulty": 15}
    card = prepared(tmp_path, rows, **options)
    assert questions(tmp_path) == [GOATS, "One box holds 3 balls."]
    dropped = {"duplicate": 2, "difficulty": 3}
    assert card.dropped == {**dropped, "contaminated": 1, "too long": 1, "invalid": 2}
    assert [one.row for one in card.invalid] == [9, 10]
    assert sum(card.dropped.values()) + card.kept == len(rows)
    assert card.examples["contaminated"][0].why == "has 100% of held_out, row 0"
    assert card.as_json()["examples"].keys() == card.dropped.keys()
    text = (tmp_path / "out" / CARD_TEXT).read_text()
    assert all(f"left out: {count} {reason}\n" in text for reason, count in card.dropped.items())


def test_other_tests_of_a_program_are_a_duplicate(tmp_path: Path) -> None:
    other = json.dumps({"inputs": ["3\n"], "outputs": ["6\n"]})
    row = {**skywork("Double it.", TESTS), "ability": "math"}  # which tests correct
    card = prepared(tmp_path, [row, skywork("Double it.", other)])
    assert card.dropped == {"duplicate": 1}
    assert [one["ability"] for one in kept(tmp_path)] == ["code"]


@pytest.mark.parametrize(
    ("first", "options", "dropped"),
    [
        ({"extra_info": {}}, {"difficulty": SEVEN}, {"difficulty": 1, "duplicate": 1}),
        ({"reward_model": {"ground_truth": '{"inputs": ["3"]}'}}, {}, {"invalid": 1, "duplicate": 1}),
    ],
)
def test_a_row_that_is_left_out_hides_no_later_one(
    tmp_path: Path, first: dict[str, Any], options: dict[str, Any], dropped: dict[str, int]
) -> None:
    """As of two datasets with the same problems, of which one has no difficulties, or unknown tests."""
    row = skywork("Double it.", TESTS, failures=3)
    card = prepared(tmp_path, [{**row, **first}, row, row], **options)
    assert card.dropped == dropped
    assert [one["extra_info"]["row"] for one in kept(tmp_path)] == [1]


@pytest.mark.parametrize("dropped", [(), ("Images",)])
def test_prompts_about_images_are_invalid(tmp_path: Path, dropped: tuple[str, ...]) -> None:
    """Else a policy would be trained on questions about what it cannot see, also without their column."""
    rows = [
        {"Images": ["a.png"], "problem": "<image>How many?", "answer": "7"},
        {"Images": ["a.png"], "problem": "3 + 4 = ?", "answer": "7"},
        {"Images": [], "problem": "<image> is a tag of which language?", "answer": "7"},
    ]
    card = prepared(tmp_path, rows, drop_columns=dropped)
    assert [(one.row, "about its images" in one.why) for one in card.invalid] == [(0, True)]
    assert card.kept == 2


def conversation(truth: str, *turns: str, system: str = "") -> dict[str, Any]:
    roles = ("user", "assistant")
    said = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return {**skywork("", truth), "prompt": [{"role": "system", "content": system}] * bool(system) + said}


def test_duplicates_are_those_of_the_whole_conversation(tmp_path: Path) -> None:
    rows = [
        conversation("6", "x=2. What is x+1?", "3", "And doubled?"),
        conversation("12", "x=5. What is x+1?", "6", "And doubled?"),
        conversation("12", "X=5. What is x+1?", "6", "And doubled?"),
        conversation("2", "Solve it.", system="Problem: 1+1"),
        conversation("3", "Solve it.", system="Problem: 2+1"),
    ]
    card = prepared(tmp_path, rows)
    assert [row["extra_info"]["row"] for row in kept(tmp_path)] == [0, 1, 3, 4]
    assert card.dropped == {"duplicate": 1}


def test_earlier_turns_count_in_decontamination(tmp_path: Path) -> None:
    long = "A train leaves the old station at noon and drives north for three hours at ninety miles an hour."
    against = write(tmp_path / "suite.jsonl", [conversation("6", long, "270 miles.", "And twice that?")])
    rows = [("1", long, "270.", "And half of it?"), ("2", "x=5. What is x+1?", "6", "And twice that?")]
    card = prepared(tmp_path, [conversation(*row) for row in rows], against=(against,))
    assert card.dropped == {"contaminated": 1}
    assert [row["extra_info"]["row"] for row in kept(tmp_path)] == [1]


def test_an_evaluation_set_has_its_own_columns(tmp_path: Path) -> None:
    """The flags name those of the sources."""
    against = write(tmp_path / "suite.jsonl", [{"problem": BAKER, "answer": "9"}])
    rows = [{"body": BAKER, "out": "9", "of": "a"}, {"body": GOATS, "out": "19", "of": "b"}]
    named = {"question_column": "body", "answer_column": "out", "source_column": "of"}
    card = prepared(tmp_path, rows, against=(against,), drop_columns=("of",), **named)
    assert card.dropped == {"contaminated": 1}
    assert questions(tmp_path) == [GOATS]


@pytest.mark.parametrize(
    ("answers", "dropped"),
    [
        (("notfound", "19"), {"invalid": 1}),  # NuminaMath's
        (("19", "see solution", "19"), {"duplicate": 2}),
        (("proof", "19", "20"), {"invalid": 1, "duplicate": 1}),
    ],
)
def test_the_first_row_with_an_answer_is_kept(
    tmp_path: Path, answers: tuple[str, ...], dropped: dict[str, int]
) -> None:
    card = prepared(tmp_path, [*(skywork(GOATS, answer) for answer in answers), skywork("3?", "1")])
    assert card.dropped == dropped
    assert [row["reward_model"]["ground_truth"] for row in kept(tmp_path)] == ["19", "1"]
