"""`bapo data prepare`: the schemas of public datasets, and the normal forms of problems."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.data.prepare.command import prepare
from bapo_megatron.data.prepare.normal_form import key, ngrams, tokens, words
from bapo_megatron.data.prepare.options import DATA_FILE, PrepareOptions
from bapo_megatron.data.prepare.problems import CODE_INSTRUCTION, MATH_INSTRUCTION, problem_of
from bapo_megatron.data.prompts import load_prompts
from bapo_megatron.data.rows import RowError, read_rows
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from tests.support.preparation import GOATS, MODEL, TESTS, kept, prepared, questions, skywork


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (skywork(GOATS, '["19"]'), "19"),
        ({"problem": GOATS, "solution": "so", "answer": "19", "subject": "Algebra", "level": 2}, "19"),
        ({"ID": "2024-I-1", "Problem": GOATS, "Solution": "so", "Answer": 19}, "19"),
        ({"id": 60, "problem": GOATS, "solution": "12+7 is \\boxed{19}", "url": "none"}, "19"),
        ({"question": GOATS, "answer": "12 + 7 = <<12+7=19>>19\n#### 19"}, "19"),  # GSM8K
        ({"question": GOATS, "answer": "####  1,900 "}, "1,900"),
        ({"question": GOATS, "answer": "a #### b"}, "a #### b"),
        ({"question": GOATS, "answer": 19.0}, "19"),  # as pandas writes whole numbers of which one is missing
        ({"question": GOATS, "final_answer": "19", "r1_solution_1": "so"}, "19"),  # DeepMath
        ({"problem": GOATS, "generated_solution": "so", "expected_answer": "19"}, "19"),  # OpenMathReasoning
        ({"prompt": [{"role": "user", "content": GOATS}], "label": "19"}, "19"),  # slime
        ({"prompt": [{"role": "user", "content": GOATS}], "question": "", "answer": 19}, "19"),  # verifiers
        ({"prompt": GOATS, "solution": "$\\boxed{19}$", "reward_model": None}, "19"),  # TRL
        ({"prompt": GOATS, "reward_model": {"ground_truth": "19"}, "data_source": "math_dapo"}, "19"),
        ({"problem": GOATS, "answer": "19", "reward_model": "rule"}, "19"),  # a column of another meaning
    ],
)
def test_every_schema_gives_the_same_problem(row: dict[str, Any], answer: str) -> None:
    problem = problem_of(row, "a_set", 5)
    assert problem.messages == [{"role": "user", "content": f"{GOATS}\n\n{MATH_INSTRUCTION}"}]
    assert problem.question == GOATS
    assert problem.ground_truth == answer
    assert problem.extra_info["row"] == 5
    assert problem.ability == "math"
    assert problem_of(problem.row(), "again", 5).row() == problem.row()


QUESTIONS, ANSWERS = "prompt problem question", "answer solution final_answer expected_answer label tests"


@pytest.mark.parametrize("names", [QUESTIONS, ANSWERS])
def test_the_first_column_with_a_value_counts(names: str) -> None:
    """Rows of several datasets in one file have null in the columns of the others."""
    columns = names.split()
    given = {"question": "?", "answer": "19", "reward_model": None}
    values = {name: f"\\boxed{{{n}}}" if name == "solution" else str(n) for n, name in enumerate(columns)}
    for place in range(len(columns)):
        row = {**given, **values, **dict.fromkeys(columns[:place])}
        problem = problem_of(row, "a_set", 0)
        assert str(place) in (problem.question, problem.ground_truth)


def test_fields_beside_question_and_answer_are_kept() -> None:
    metadata = {"terms": [1, "+", 2], "difficulty": {"digits": 1}}
    row = {"problem": GOATS, "answer": 1, "level": 2, "steps": ["x"], "metadata": metadata, "none": None}
    info = problem_of({**row, "image": b"\x00", "solution": "so"}, "a_set", 0).extra_info
    assert info == {"level": 2, "steps": ["x"], "metadata": metadata, "row": 0}
    again = problem_of(problem_of({**row, "data_source": "sums"}, "a_set", 7).row(), "again", 7)
    assert (again.data_source, again.extra_info) == ("sums", {**info, "row": 7})
    assert problem_of(skywork(GOATS, "19"), "x", 0).data_source == "train-math-made-up"


@pytest.mark.parametrize(
    ("content", "is_the_judges"),
    [
        (
            "Solve the following math problem step by step. The last line is Answer: $Answer.\n\n"
            f'{GOATS}\n\nRemember to put your answer on its own line after "Answer:".',
            False,
        ),
        (f'{GOATS} Let\'s think step by step and output the final answer after "####".', False),
        (f"{GOATS} Let's think, and output the final answer within \\boxed{{}}.", True),
        (f"{GOATS} Put it into \\boxed{{ }}", True),
    ],
    ids=["dapo", "gsm8k", "boxed", "box"],
)
def test_the_form_that_a_dataset_asks_for(content: str, is_the_judges: bool) -> None:
    """It makes room for the judge's, and stays for a reward that reads it."""
    for options in ({}, {"instruct": False}, {"own_reward": True}):
        problem = problem_of(skywork(content, "19"), "x", 0, **options)
        assert problem.question == GOATS
        wanted = content if is_the_judges or options else f"{GOATS}\n\n{MATH_INSTRUCTION}"
        assert problem.messages[0]["content"] == wanted


def test_programs_are_asked_for_as_a_block() -> None:
    row = skywork("Double the number that you read.", TESTS)
    problem = problem_of(row, "x", 0)
    assert problem.ability == "code"
    assert problem.row()["ability"] == "code"
    assert problem.messages[0]["content"].endswith(CODE_INSTRUCTION)
    lists = {"inputs": ["2\n"], "outputs": ["4\n"]}
    for tests in (lists, [{"input": "2\n", "output": "4\n"}]):  # objects, as parquet has them
        chat = {**row, "reward_model": {"ground_truth": tests}}
        for asked in ({"problem": "Double it.", "tests": tests}, chat):
            assert problem_of(asked, "x", 0).ability == "code"
            assert json.loads(problem_of(asked, "x", 0).ground_truth) == tests
    fenced = skywork("Double it. Answer in\n```python\n# here\n```", TESTS)
    for asked, instruct in ((row, False), (fenced, True)):
        assert problem_of(asked, "x", 0, instruct=instruct).messages[0] == asked["prompt"][0] | {
            "role": "user"
        }


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "hello"}, "its columns are text;"),
        ({"problem": " ", "answer": "1"}, "the problem is ' '"),
        ({"problem": GOATS, "answer": None}, "it has no value of an answer"),
        ({"problem": GOATS, "answer": ""}, "its answer is ''"),
        ({"problem": GOATS, "answer": 1.5}, "its answer is 1.5"),
        ({"problem": GOATS, "tests": {"in": ["1"]}}, "tests of a program"),
        ({"problem": GOATS, "solution": "none"}, "no \\boxed"),
        ({"problem": GOATS, "answer": True}, "True"),
        (skywork(GOATS, '["1", "2"]'), "2 answers"),
        (skywork("", "1"), "content is ''"),
        ({**skywork("x", "1"), "prompt": [{"role": "assistant", "content": "x"}]}, "user's"),
        ({"prompt": GOATS}, "its columns are prompt: name that of the answer"),
        ({"prompt": None, "answer": "19"}, "the problem is None"),
        ({"prompt": GOATS, "answer": "19", "reward_model": "19"}, "reward_model"),
        ({"problem": GOATS, "answer": "19", "reward_model": {"ground_truth": "5"}}, "prompt is"),
    ],
)
def test_what_is_wrong_with_a_row(row: dict[str, Any], why: str) -> None:
    with pytest.raises(RowError, match=re.escape(why)):
        problem_of(row, "x", 0)


@pytest.mark.parametrize(
    ("answer", "is_mathematics"),
    [
        ("Paris, the city of light", False),
        ("it is not possible", False),
        (r"\text{all of the above}", True),
        ("x = 3 or x = 5", True),
        (r"\frac{1}{2} \text{ cups of tea}", True),
        (r"\sin x \cos y \tan z", True),
        ("AB, BC, CA", True),
        (r"\frac{ab}{cd} \cdot ef gh ij", True),
    ],
)
def test_words_are_no_mathematics(tmp_path: Path, answer: str, is_mathematics: bool) -> None:
    """math-verify reads a product of letters, and finds none like it in what a policy writes."""
    card = prepared(tmp_path, [{"question": "What?", "answer": answer}, {"question": GOATS, "answer": "19"}])
    assert card.kept == 1 + is_mathematics
    assert ["--reward module:function" in one.why for one in card.invalid] == [True] * (not is_mathematics)


Q2_A2 = {"question_column": "q2", "answer_column": "a2"}
TEXT = {"prompt": GOATS, "solution": "so \\boxed{19}", "gold": 20, "reward_model": {"ground_truth": "5"}}
CAPITAL = {"Problem": GOATS, "gold": 19, "Prompt": "Another?", "reward_model": {"ground_truth": "5"}}


@pytest.mark.parametrize(
    ("row", "options", "answer"),
    [
        (
            {"Title": "t", "Body": GOATS, "problem": "no", "Target": 19},
            {"question_column": "Body", "answer_column": "Target"},
            "19",
        ),
        ({**skywork("Another?", "5"), "q2": GOATS, "a2": "19"}, Q2_A2, "19"),
        (CAPITAL, {"answer_column": "gold"}, "19"),
        (CAPITAL, {"question_column": "Problem", "answer_column": "gold"}, "19"),
        (TEXT, {"question_column": "prompt"}, "19"),
        # A column of another meaning is left out with the answer's.
        (TEXT, {"answer_column": "gold", "drop_columns": ("solution", "reward_model")}, "20"),
    ],
)
def test_columns_of_ones_own(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], answer: str
) -> None:
    """Also beside those of a chat row: they are what the user asked for."""
    assert prepared(tmp_path, [row], **options).kept == 1
    [found] = kept(tmp_path)
    assert (questions(tmp_path), found["reward_model"]["ground_truth"]) == ([GOATS], answer)
    assert "Title" not in row or found["extra_info"] == {"row": 0, "title": "t"}


def test_what_two_typesetters_write_is_equal() -> None:
    one = key("Find  $\\dfrac{1}{2}\\left(x + 1\\right)$.")
    assert one == key("find \\frac{1}{2} (x+1)")
    assert one != key("find \\frac{1}{2} (x-1)")
    assert key("Add 1 2") != key("Add 12")
    assert tokens("What is $x^2$?") == ["what", "is", "x", "^", "2"]
    assert tokens("\\left[1\\right]\\leftarrow") == ["[", "1", "]", "\\leftarrow"]
    assert words("Let $\\alpha + 3$ be 4.5") == ["let", "alpha", "3", "be", "4", "5"]
    assert words("求x的值") == ["求", "x", "的", "值"]
    assert ngrams(["a", "b", "c"], 2) == {"a b", "b c"}
    assert ngrams(["a"], 2) == set()


def test_fields_of_messages_are_kept_and_rendered(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "1", "name": None},
        {"role": "user", "content": "b", "name": "bob"},
    ]
    card = prepared(tmp_path, [{**skywork("", "19"), "prompt": messages}], instruct=False)
    assert card.as_json()["options"]["instruct"] is False
    (row,) = kept(tmp_path)
    answered = {"role": "tool", "content": "7", "tool_call_id": "1"}
    expected = [messages[0], {**messages[1], "content": ""}, answered, messages[3]]
    assert row["prompt"] == expected
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    (prompt,) = load_prompts(tmp_path / "out" / DATA_FILE, tokenizer, 400).prompts
    assert prompt.messages == expected
    assert '"arguments": {"b": 1, "a": 2}' in tokenizer.decode(prompt.token_ids_P)


def test_a_column_named_row_is_kept(tmp_path: Path) -> None:
    prepared(tmp_path, [{"problem": GOATS, "answer": "19", "row": 17}])
    assert kept(tmp_path)[0]["extra_info"] == {"row": 0, "source_row": 17}
    prepare(PrepareOptions((str(tmp_path / "out" / DATA_FILE),), tmp_path / "again"))
    (row,) = read_rows(tmp_path / "again" / DATA_FILE)
    assert row["extra_info"] == {"row": 0, "source_row": 17}


def test_a_lone_surrogate_is_an_invalid_row(tmp_path: Path) -> None:
    """Half of a pair, as texts have it that were cut between its halves."""
    half = "Half a smile \ud83d"
    rows = [skywork(half, "1"), skywork("a", half), {**skywork("b", "1"), "extra_info": {"note": [half]}}]
    rows += [{**skywork("c", "1"), "data_source": half}, {"problem": "d", "answer": "1", "note": half}]
    rows.append(skywork(GOATS, "19"))
    card = prepared(tmp_path, rows)
    assert card.kept == 1
    fields = ["prompt", "reward_model.ground_truth", "extra_info", "data_source", "extra_info"]
    assert [one.why.partition(" ")[0] for one in card.invalid] == fields
    assert "half of a character" in card.invalid[0].why
    with pytest.raises(ConfigError, match=r"row 0 .*prompt has '\\ud83d', half of a character"):
        load_prompts(tmp_path / "rows.jsonl", load_tokenizer(MODEL), 400)


def test_what_json_has_no_number_for(tmp_path: Path) -> None:
    nan, infinite = float("nan"), float("inf")
    rows = [
        {"problem": GOATS, "answer": "19", "score": nan, "more": {"a": [nan], "b": 1}},
        {"problem": "2?", "answer": "1", "score": infinite},
    ]
    card = prepared(tmp_path, rows)
    assert kept(tmp_path)[0]["extra_info"] == {"more": {"a": [None], "b": 1}, "row": 0}
    assert "NaN" not in (tmp_path / "out" / DATA_FILE).read_text()
    assert ["extra_info has Infinity" in one.why for one in card.invalid] == [True]
