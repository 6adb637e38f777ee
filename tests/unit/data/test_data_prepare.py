"""`bapo data prepare`: schemas, normal forms, filters, and the folder that comes out.

All problems here were made up for these tests; the fields are those of the public datasets.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from bapo_megatron.cli import run
from bapo_megatron.data.prepare import sources
from bapo_megatron.data.prepare.card import Card, summary
from bapo_megatron.data.prepare.command import prepare
from bapo_megatron.data.prepare.filters import COMMON, Contamination, EvaluationProblem
from bapo_megatron.data.prepare.normal_form import key, ngrams, tokens, words
from bapo_megatron.data.prepare.options import CARD_FILE, CARD_TEXT, DATA_FILE, PrepareOptions
from bapo_megatron.data.prepare.problems import CODE_INSTRUCTION, MATH_INSTRUCTION, problem_of
from bapo_megatron.data.prompts import load_prompts
from bapo_megatron.data.rows import RowError, read_rows
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.functions import ground_truth_check

MODEL = Path(__file__).parents[3] / "recipes/demo/policy"
SEVEN = "model_difficulty.DeepSeek-R1-Distill-Qwen-7B"
GOATS = "A farmer has 12 goats and buys 7 more. How many goats has he now?"
TESTS = json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})


def skywork(content: str, truth: str, index: int = 0, failures: int = 8) -> dict[str, Any]:
    models = ("1.5B", "7B", "32B")
    return {
        "data_source": "train-math-made-up",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {
            "index": index,
            "model_difficulty": {f"DeepSeek-R1-Distill-Qwen-{size}": failures for size in models},
        },
    }


def write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(tmp_path: Path, rows: list[Any], name: str = "rows.jsonl", **options: Any) -> Card:
    source = write(tmp_path / name, rows)
    return prepare(PrepareOptions((source,), tmp_path / "out", **{"max_invalid": 1.0, **options}))


def kept(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / DATA_FILE).read_text().splitlines()]


def questions(tmp_path: Path) -> list[str]:
    return [row["prompt"][-1]["content"].split("\n\n")[0] for row in kept(tmp_path)]


# --- schemas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (skywork(GOATS, '["19"]'), "19"),
        ({"problem": GOATS, "answer": "19", "solution": "12 + 7 = 19"}, "19"),  # DeepScaleR
        ({"problem": GOATS, "solution": "so", "answer": "19", "subject": "Algebra", "level": 2}, "19"),
        ({"ID": "2024-I-1", "Problem": GOATS, "Solution": "so", "Answer": 19}, "19"),
        ({"id": 60, "problem": GOATS, "solution": "12+7 is \\boxed{19}", "url": "none"}, "19"),
        ({"question": GOATS, "answer": "019"}, "019"),
        ({"question": GOATS, "final_answer": "19", "r1_solution_1": "so"}, "19"),  # DeepMath
        ({"problem": GOATS, "generated_solution": "so", "expected_answer": "19"}, "19"),  # OpenMathReasoning
        ({"prompt": [{"role": "user", "content": GOATS}], "label": "19"}, "19"),  # slime
        ({"problem": GOATS, "solutions": ["s"], "tests": "19"}, "19"),  # the columns of DeepCoder
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
    assert not problem.is_code
    assert problem_of(problem.row(), "again", 5).row() == problem.row()


@pytest.mark.parametrize(
    "names",
    [
        ("prompt", "problem", "question"),
        ("answer", "solution", "final_answer", "expected_answer", "label", "tests"),
    ],
    ids=lambda names: names[0],
)
def test_the_first_column_with_a_value_counts(names: tuple[str, ...]) -> None:
    """Rows of several datasets in one file have null in the columns of the others."""
    for place in range(len(names)):
        values = {name: f"\\boxed{{{n}}}" if name == "solution" else str(n) for n, name in enumerate(names)}
        row = {
            "question": "?",
            "answer": "19",
            "reward_model": None,
            **values,
            **dict.fromkeys(names[:place]),
        }
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


OTHER_FORMS = pytest.mark.parametrize(
    "content",
    [
        "Solve the following math problem step by step. The last line is Answer: $Answer.\n\n"
        f'{GOATS}\n\nRemember to put your answer on its own line after "Answer:".',
        f'{GOATS} Let\'s think step by step and output the final answer after "####".',
    ],
    ids=["dapo", "gsm8k"],
)


@OTHER_FORMS
def test_the_form_that_a_dataset_asks_for_is_not_the_judges(content: str) -> None:
    problem = problem_of(skywork(content, "19"), "x", 0)
    assert problem.question == GOATS
    assert problem.messages[0]["content"] == f"{GOATS}\n\n{MATH_INSTRUCTION}"


@OTHER_FORMS
def test_the_form_that_a_dataset_asks_for_stays_for_a_reward_that_reads_it(content: str) -> None:
    for options in ({"instruct": False}, {"own_reward": True}):
        problem = problem_of(skywork(content, "19"), "x", 0, **options)
        assert problem.question == GOATS
        assert problem.messages[0]["content"] == content


@pytest.mark.parametrize(
    "request_", ["Let's think, and output the final answer within \\boxed{}.", "Put it into \\boxed{ }"]
)
def test_a_prompt_that_asks_for_a_box_stays(request_: str) -> None:
    problem = problem_of(skywork(f"{GOATS} {request_}", "19"), "x", 0)
    assert problem.messages[0]["content"] == f"{GOATS} {request_}"
    assert problem.question == GOATS


def test_prompts_stay_as_they_are_for_a_model_without_instructions(tmp_path: Path) -> None:
    prepared(tmp_path, [skywork(GOATS, "19"), skywork("Double it.", TESTS)], instruct=False)
    assert [row["prompt"][-1]["content"] for row in kept(tmp_path)] == [GOATS, "Double it."]
    assert json.loads((tmp_path / "out" / CARD_FILE).read_text())["options"]["instruct"] is False


def test_programs_are_asked_for_as_a_block() -> None:
    row = skywork("Double the number that you read.", TESTS)
    problem = problem_of(row, "x", 0)
    assert problem.is_code
    assert problem.row()["ability"] == "code"
    assert problem.messages[0]["content"].endswith(CODE_INSTRUCTION)
    fenced = skywork("Double it. Answer in\n```python\n# here\n```", TESTS)
    assert problem_of(fenced, "x", 0).messages[0] == fenced["prompt"][0] | {"role": "user"}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "hello"}, "its columns are text; a row has"),
        ({"problem": " ", "answer": "1"}, "the problem is ' '"),
        ({"problem": GOATS}, "it has neither an answer nor a solution"),
        ({"problem": GOATS, "answer": ""}, "its answer is ''; it must be one text"),
        ({"problem": GOATS, "answer": 1.5}, "its answer is 1.5; it must be one text"),
        ({"problem": GOATS, "answer": None}, "its answer has no value: leave the row out, or name another"),
        ({"problem": GOATS, "tests": {"in": ["1"]}}, "tests of a program have one of the forms of docs"),
        ({"problem": GOATS, "solution": "none"}, "no \\boxed"),
        ({"problem": GOATS, "answer": True}, "True"),
        (skywork(GOATS, '["1", "2"]'), "2 answers"),
        (skywork("", "1"), "content is ''"),
        (
            {"prompt": [{"role": "assistant", "content": "x"}], "reward_model": {"ground_truth": "1"}},
            "user's",
        ),
        ({"prompt": GOATS}, "its columns are prompt: name that of the answer"),
        ({"prompt": None, "answer": "19"}, "the problem is None"),
        ({"prompt": GOATS, "answer": "19", "reward_model": "19"}, "reward_model"),
        ({"problem": GOATS, "answer": "19", "reward_model": {"ground_truth": "5"}}, "prompt is"),
    ],
)
def test_what_is_wrong_with_a_row(row: dict[str, Any], why: str) -> None:
    with pytest.raises(RowError) as caught:
        problem_of(row, "x", 0)
    assert why in str(caught.value)


# --- answers that are not mathematics, other columns ------------------------------------------------


def test_gsm8k() -> None:
    """Its answer is a solution that ends with a line of its own."""
    assert (
        problem_of({"question": GOATS, "answer": "12 + 7 = <<12+7=19>>19\n#### 19"}, "x", 0).ground_truth
        == "19"
    )
    assert problem_of({"question": GOATS, "answer": "####  1,900 "}, "x", 0).ground_truth == "1,900"
    assert problem_of({"question": GOATS, "answer": "a #### b"}, "x", 0).ground_truth == "a #### b"


@pytest.mark.parametrize("answer", ["Paris, the city of light", "it is not possible"])
def test_words_are_no_mathematics(tmp_path: Path, answer: str) -> None:
    """math-verify reads a product of letters, and finds none like it in what a policy writes."""
    rows = [{"question": "The capital?", "answer": answer}, {"question": GOATS, "answer": "19"}]
    card = prepared(tmp_path, rows, max_invalid=1.0)
    assert card.kept == 1
    assert "has the words" in card.invalid[0].why
    assert "--reward module:function" in card.invalid[0].why


@pytest.mark.parametrize(
    "answer",
    [
        r"\text{all of the above}",
        "x = 3 or x = 5",
        r"\frac{1}{2} \text{ cups of tea}",
        r"\sin x \cos y \tan z",
        "AB, BC, CA",
        r"\frac{ab}{cd} \cdot ef gh ij",
    ],
)
def test_mathematics_with_words_stays(tmp_path: Path, answer: str) -> None:
    assert prepared(tmp_path, [{"question": "What?", "answer": answer}]).kept == 1


def test_a_reward_of_ones_own_takes_any_text(tmp_path: Path) -> None:
    """The module is on the machines of the run; prompts stay as they are."""
    rows = [{"question": "The capital?", "answer": "Paris, the city of light"}]
    card = prepared(tmp_path, rows, reward="my_rewards:same_words")
    assert card.by_ability == {"other": 1}
    options = json.loads((tmp_path / "out" / CARD_FILE).read_text())["options"]
    assert not options["instruct"]  # no sentence is added
    [row] = [json.loads(line) for line in (tmp_path / "out" / DATA_FILE).read_text().splitlines()]
    assert row["prompt"] == [{"role": "user", "content": "The capital?"}]
    assert row["reward_model"]["ground_truth"] == "Paris, the city of light"
    assert row["ability"] == "other"


def test_columns_of_ones_own(tmp_path: Path) -> None:
    row = {"Title": "t", "Body": GOATS, "problem": "no", "Target": 19}
    card = prepared(tmp_path, [row], question_column="Body", answer_column="Target")
    assert card.kept == 1
    [made] = [json.loads(line) for line in (tmp_path / "out" / DATA_FILE).read_text().splitlines()]
    assert made["prompt"][0]["content"].startswith(GOATS)
    assert made["reward_model"]["ground_truth"] == "19"
    assert made["extra_info"] == {"row": 0, "title": "t"}


def test_columns_of_ones_own_beside_those_of_a_chat_row(tmp_path: Path) -> None:
    """They are what the user asked for."""
    row = {**skywork("Another question?", "5"), "q2": GOATS, "a2": "19"}
    card = prepared(tmp_path, [row], question_column="q2", answer_column="a2")
    assert card.kept == 1
    [made] = [json.loads(line) for line in (tmp_path / "out" / DATA_FILE).read_text().splitlines()]
    assert made["prompt"][0]["content"].startswith(GOATS)
    assert made["reward_model"]["ground_truth"] == "19"
    text = {"prompt": GOATS, "solution": "so \\boxed{19}", "gold": 20, "reward_model": {"ground_truth": "5"}}
    capital = {"Problem": GOATS, "gold": 19, "Prompt": "Another?", "reward_model": {"ground_truth": "5"}}
    for names in ({"answer_column": "gold"}, {"question_column": "Problem", "answer_column": "gold"}):
        prepared(tmp_path, [capital], overwrite=True, **names)
        assert [*questions(tmp_path), kept(tmp_path)[0]["reward_model"]["ground_truth"]] == [GOATS, "19"]
    for names, answer in (({"question_column": "prompt"}, "19"), ({"answer_column": "gold"}, "20")):
        dropped = () if "question_column" in names else ("solution", "reward_model")  # the latter by itself
        prepared(tmp_path, [text], overwrite=True, drop_columns=dropped, **names)
        [made] = kept(tmp_path)
        assert made["reward_model"]["ground_truth"] == answer


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    for names in ({"question_column": "body"}, {"drop_columns": ("body",)}):
        with pytest.raises(
            ConfigError, match="row 0: it has no column body; its columns are answer, question"
        ):
            prepared(tmp_path, [{"question": GOATS, "answer": "19"}], **names)


def test_long_columns_are_told_and_can_be_left_out(tmp_path: Path) -> None:
    """DeepMath has three solutions of a model in each row: five gigabytes, that a run would hold."""
    row = {"question": GOATS, "final_answer": "19", "r1_solution_1": "so " * 4000, "topic": "goats"}
    card = prepared(tmp_path, [row])
    assert "r1_solution_1 (12,000 characters a row): --drop-columns" in summary(card)
    card = prepared(tmp_path, [row], drop_columns=("r1_solution_1",), overwrite=True)
    assert "--drop-columns" not in summary(card)
    assert kept(tmp_path)[0]["extra_info"] == {"row": 0, "topic": "goats"}


def test_a_run_says_how_raw_rows_are_prepared(tmp_path: Path) -> None:
    source = write(tmp_path / "raw.jsonl", [{"Question": GOATS, "answer": "19"}])
    with pytest.raises(
        ConfigError, match="has Question, answer: `bapo data prepare FILE --output DIR` converts"
    ):
        load_prompts(Path(source), load_tokenizer(MODEL), 64)


# --- normal forms and n-grams --------------------------------------------------------------------


def test_what_two_typesetters_write_is_equal() -> None:
    one = key("Find  $\\dfrac{1}{2}\\left(x + 1\\right)$.")
    assert one == key("find \\frac{1}{2} (x+1)")
    assert one != key("find \\frac{1}{2} (x-1)")
    assert key("Add 1 2") != key("Add 12")
    assert tokens("What is $x^2$?") == ["what", "is", "x", "^", "2"]
    assert tokens("\\left[1\\right]\\leftarrow") == ["[", "1", "]", "\\leftarrow"]
    assert words("Let $\\alpha + 3$ be 4.5") == ["let", "alpha", "3", "be", "4", "5"]
    assert words("求x的值") == ["求", "x", "的", "值"]


def test_ngrams() -> None:
    assert ngrams(["a", "b", "c"], 2) == {"a b", "b c"}
    assert ngrams(["a"], 2) == set()


ENDING = "can be written as m/n where m and n are relatively prime positive integers. Find m+n."
BAKER = "A baker bakes 40 loaves each morning and sells 31 of them before noon so how many are left then?"


def contaminated(question: str, problems: list[str], size: int = 8, share: float = 0.3) -> Any:
    return Contamination([EvaluationProblem("s", n, p) for n, p in enumerate(problems)], size, share).match(
        question
    )


def test_the_share_of_a_problem_is_counted_by_hand() -> None:
    """'one two three four five six seven' has the 2-grams 12 to 67; the question has four of them."""
    problem = "one two three four five six seven"
    found = contaminated("zero one two three four five eight", [problem], size=2, share=2 / 3)
    assert found.share == 2 / 3
    assert contaminated("one two three four five eight", [problem], size=2, share=0.67) is None


def test_a_share_rests_on_four_ngrams() -> None:
    """The 2-grams 12, 23, 34 are all that the problem has, and are in the question."""
    assert contaminated("zero one two three four", ["one two three four"], size=2, share=0.1) is None
    assert contaminated("One two three four.", ["one two three four"], size=2).share == 1


def test_a_problem_that_many_questions_hold_is_no_template_of_theirs() -> None:
    """25 rephrasings around one evaluation problem: its n-grams are those of 20 questions or more."""
    problem = (
        "Let x and y be real numbers such that x squared plus y squared equals nineteen and their product is "
        "seven. Find the sum of their fourth powers."
    )
    index = Contamination([EvaluationProblem("s", 0, problem)], 8, 0.3)
    held = [f"Student {number} of {number + 40} was asked this: {problem}" for number in range(25)]
    other = held[0].replace("nineteen", "twenty")
    for question in [*held, other]:
        index.show(question)
    index.settle()
    assert [match.share for one in held if (match := index.match(one))] == [1.0] * 25
    assert index.match(other) is None


def test_problems_of_one_template_do_not_contaminate_each_other() -> None:
    """Made-up sums, as reasoning-gym writes them: none is lost but those of the numbers that are held out
    (signs are not words)."""
    template = "State the final answer to the following arithmetic problem: {} {} {} ="
    sums = [(a, sign, b) for a in range(2, 12) for sign in "+-" for b in range(12, 24)]
    held_out = [(7, "+", 13), (9, "-", 21)]
    index = Contamination([EvaluationProblem("s", 0, template.format(*one)) for one in held_out], 8, 0.3)
    lost = [one for one in sums if index.match(template.format(*one))]
    assert lost == [one for one in sums if (one[0], one[2]) in ((7, 13), (9, 21))]


def test_a_disguised_problem_is_found_and_a_common_ending_is_not() -> None:
    assert contaminated(f"Solve this one: {BAKER.upper()} Thanks!", [GOATS, BAKER]).problem.row == 1
    contest = [f"The chance that {animal} wins {ENDING}" for animal in ("a cat", "a dog", "an ox", "a hen")]
    assert len(contest) >= COMMON
    honest = f"The sum of the first terms of a made up series {ENDING}"
    assert contaminated(honest, contest) is None
    assert contaminated(honest, contest[:1]) is not None, "one problem's ending is its own"


def test_a_short_problem_must_be_equal() -> None:
    assert contaminated("Compute $1+1$", ["compute 1 + 1."]).share == 1
    assert contaminated("Compute $1+1$ and then 2", ["compute 1 + 1."]) is None


def test_a_problem_in_two_sets_does_not_make_itself_common() -> None:
    assert contaminated(f"{BAKER} Say it.", [BAKER] * COMMON) is not None


# --- filters -------------------------------------------------------------------------------------


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
    card = prepared(
        tmp_path,
        rows,
        against=("held_out",),
        suites=tmp_path / "suites",
        tokenizer=MODEL,
        max_prompt_tokens=400,
        difficulty=SEVEN,
        min_difficulty=1,
        max_difficulty=15,
    )
    assert questions(tmp_path) == [GOATS]
    assert card.dropped == {
        "duplicate": 1,
        "conflicting answers": 2,
        "difficulty": 3,
        "contaminated": 1,
        "too long": 1,
        "invalid": 2,
    }
    assert [one.row for one in card.invalid] == [9, 10]
    assert sum(card.dropped.values()) + card.kept == len(rows)
    assert card.examples["contaminated"][0].why == "has 100% of held_out, row 0"
    text = (tmp_path / "out" / CARD_TEXT).read_text()
    for reason in card.dropped:
        assert f"## Examples: {reason}" in text


def test_the_same_tests_of_a_program_are_no_conflict(tmp_path: Path) -> None:
    other = json.dumps({"inputs": ["3\n"], "outputs": ["6\n"]})
    card = prepared(tmp_path, [skywork("Double it.", TESTS), skywork("Double it.", other)])
    assert card.dropped == {"duplicate": 1}
    assert card.by_ability == {"code": 1}


def test_rows_that_a_program_can_forge_are_counted(tmp_path: Path) -> None:
    loop = json.dumps(["assert all(f(i) == i for i in range(3))"])
    card = prepared(tmp_path, [skywork("Return it.", loop), skywork("Double it.", TESTS)])
    assert card.forgeable == 1
    assert card.as_json()["forgeable_rows"] == 1
    assert "a program can forge (docs/rewards.md#programs): 1" in (tmp_path / "out" / CARD_TEXT).read_text()


# --- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_a_run_can_read_it_whatever_it_was(tmp_path: Path, name: str) -> None:
    card = prepared(tmp_path, [skywork(GOATS, '["19"]', 7), skywork("Double it.", TESTS, 8)], name)
    path = tmp_path / "out" / DATA_FILE
    found = load_prompts(path, load_tokenizer(MODEL), 500, ground_truth_check("math_or_code")).prompts
    assert [prompt.ground_truth for prompt in found] == ["19", TESTS]
    assert [prompt.extra_info["index"] for prompt in found] == [7, 8]
    assert card.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert card.sources == [{"name": name, "sha256": digest, "rows": 2}]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    rows = [skywork(f"What is {n} more than 1?", str(n + 1), n) for n in range(20)]
    names = (DATA_FILE, CARD_FILE, CARD_TEXT)
    prepared(tmp_path, rows, tokenizer=MODEL)
    first = [(tmp_path / "out" / name).read_bytes() for name in names]
    prepared(tmp_path, rows, tokenizer=MODEL, overwrite=True)
    assert [(tmp_path / "out" / name).read_bytes() for name in names] == first
    lengths = json.loads(first[1])["prompt_tokens"]
    assert lengths["smallest"] == lengths["median"] == lengths["largest"] - 1  # 10 to 19 have a digit more


def test_nothing_is_written_for_a_wrong_schema(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"2 of 2 rows are invalid(.|\n)*row 0: its columns are text; .*--answer-column$",
    ):
        prepared(tmp_path, [{"text": "a"}, {"text": "b"}], max_invalid=0.05)
    with pytest.raises(ConfigError, match=r"no row of 1 is left \(invalid 1\)"):
        prepared(tmp_path, [{"text": "a"}])
    games = [{"question": "Guess my number.", "answer": answer} for answer in ("7", "8")]
    with pytest.raises(ConfigError, match=r"conflicting answers 2\); .*write something of the row into each"):
        prepared(tmp_path, games)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_an_output_is_kept(tmp_path: Path) -> None:
    prepared(tmp_path, [skywork(GOATS, "19")])
    with pytest.raises(ConfigError, match="overwrite"):
        prepared(tmp_path, [skywork(GOATS, "19")])
    (tmp_path / "out/notes.md").touch()
    with pytest.raises(ConfigError, match=r"holds notes\.md, which was put there by something else"):
        prepared(tmp_path, [skywork(GOATS, "19")], overwrite=True)
    (tmp_path / "out/notes.md").unlink()
    (tmp_path / "out" / CARD_FILE).unlink()
    with pytest.raises(ConfigError, match="not a prepared dataset"):
        prepared(tmp_path, [skywork(GOATS, "19")], overwrite=True)


def test_types_that_arrow_could_not_join(tmp_path: Path) -> None:
    """Several data sets in one file: runs read JSON, which has no columns of one type."""
    one = write(tmp_path / "one.jsonl", [skywork(GOATS, "19")])
    other = write(tmp_path / "two.jsonl", [{**skywork("Add.", "1"), "extra_info": {"index": "a-1"}}])
    prepare(PrepareOptions((one, other), tmp_path / "out"))
    found = read_rows(tmp_path / "out" / DATA_FILE)
    assert [row["extra_info"]["index"] for row in found] == [0, "a-1"]


def test_broken_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            prepare(PrepareOptions((text,), tmp_path / "out"))

    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(skywork(GOATS, "1")) + "\n{oops\n")
    refused(str(bad), r"bad\.jsonl, row 1 .*not JSON")
    bad.write_text("[1]\n")
    refused(str(bad), "row 0 .*not an object")
    parquet = tmp_path / "bad.parquet"
    parquet.write_bytes(b"PAR1 not")
    refused(str(parquet), "cannot be read as parquet")
    single = tmp_path / "bad.json"
    single.write_text('{\n"a": 1')
    refused(str(single), "row 0 .*not JSON: .*; a file of rows has one object a line, or is one list of obj")
    refused("nowhere.jsonl", "no such file")
    refused(str(tmp_path), "no such file")
    (tmp_path / "x.csv").write_text("a")
    refused(str(tmp_path / "x.csv"), "unknown ending")

    def no_hub(*_: Any, **__: Any) -> None:
        raise OSError("no network here")

    monkeypatch.setattr("datasets.load_dataset", no_hub)
    refused("someone/some-set", "no network here")


def test_a_dataset_of_the_hub_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    dataset = datasets.Dataset.from_list([skywork(GOATS, "19")])

    def hub(name: str, config: str | None, split: str, revision: str | None) -> datasets.Dataset:
        asked.append((name, config, split, revision))
        return dataset

    monkeypatch.setattr("datasets.load_dataset", hub)
    options = PrepareOptions(("someone/a-set:part",), tmp_path / "out", split="math", revision="abc")
    card = prepare(options)
    assert asked == [("someone/a-set", "part", "math", "abc")]
    assert card.sources[0]["name"] == "someone/a-set:part, split math"
    assert card.sources[0]["sha256"] == sources.HubSource("", dataset).digest()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ngram_share": 0.0}, "ngram_share=0.0"),
        ({"ngram_words": 0}, "ngram_words=0"),
        (
            {"reward": "mine"},
            "reward=mine must be one of math, .*llm_judge, reward_model, or your own as module:",
        ),
        ({"max_invalid": 2.0}, "max_invalid=2.0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
        ({"min_difficulty": 1.0}, "need difficulty"),
        ({"difficulty": "x", "min_difficulty": 3.0, "max_difficulty": 2.0}, "is above"),
        ({"against": ("nothing",)}, "neither a file nor a suite"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prepared(tmp_path, [skywork(GOATS, "19")], **options)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "set.jsonl", [skywork(GOATS, "19"), skywork(GOATS, "19")])
    assert run(["data", "prepare", source, "--output", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "1 of 2 rows are in" in told
    assert "left out: 1 duplicate" in told
    assert run(["data", "prepare", source, "--output", str(tmp_path / "out")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run(["data", "prepare", source, "--output", str(tmp_path / "out"), "--overwrite"]) == 0
    assert run(["data"]) == 2


# --- what a user gets wrong --------------------------------------------------------------------------


def test_all_prompts_are_too_long(tmp_path: Path) -> None:
    rows = [skywork("x" * length, "1") for length in (500, 600, 900)]
    expected = r"too long 3\).*shortest has 5\d\d, the median 6\d\d, the longest 9\d\d: raise --max-p"
    with pytest.raises(ConfigError, match=expected):
        prepared(tmp_path, rows, tokenizer=MODEL, max_prompt_tokens=400)


def test_an_empty_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl: the file has no rows"):
        prepared(tmp_path, [])


@pytest.mark.parametrize("dropped", [(), ("Images",)])
def test_prompts_about_images_are_invalid(tmp_path: Path, dropped: tuple[str, ...]) -> None:
    """Else a policy would be trained on questions about what it cannot see, also without their column."""
    rows = [
        {"Images": ["a.png"], "problem": "<image>How many?", "answer": "7"},
        {"Images": ["a.png"], "problem": "3 + 4 = ?", "answer": "7"},
        {"Images": [], "problem": "<image> is a tag of which language?", "answer": "7"},
    ]
    card = prepared(tmp_path, rows, drop_columns=dropped)
    assert [(one.row, one.why.partition(":")[0]) for one in card.invalid] == [
        (0, "its prompt is about its images, and models here read text alone")
    ]
    assert card.kept == 2


def test_a_reason_is_told_once(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b"}, {"other": "c"}]
    with pytest.raises(ConfigError, match="nothing was written") as error:
        prepared(tmp_path, rows, max_invalid=0.0)
    assert [line.split(":")[0] for line in str(error.value).splitlines()[1:]] == [
        "rows.jsonl, row 0",
        "rows.jsonl, row 2",
    ]


def test_a_typo_in_the_reward_ends_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prepare_rewards.py").write_text(
        "def same_words(prompt, response):\n    return 1.0\ndef one_argument(prompt):\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for reward, says in (
        ("prepare_rewards:same_word", "did you mean prepare_rewards:same_words?"),
        ("prepare_rewards:one_argument", "which cannot be called with a prompt and a response"),
        ("prepare_rewards:", "is not a module:function"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)) as error:
            PrepareOptions(("absent.jsonl",), tmp_path / "out", reward=reward).check()
        assert f"did you mean {reward}?" not in str(error.value)
    PrepareOptions(("absent.jsonl",), tmp_path / "out", reward="prepare_rewards:same_words").check()
    PrepareOptions(("absent.jsonl",), tmp_path / "out", reward="elsewhere.of_the_cluster:score").check()


def test_a_reward_that_only_the_cluster_can_import_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_cluster_rewards.py").write_text("import a_package_of_the_cluster\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for reward, says in (
        (
            "math_cluster_rewards:score",
            "warning: reward=math_cluster_rewards:score: there is no module math_",
        ),
        ("my_cluster_rewards:score", "a_package_of_the_cluster"),
    ):
        PrepareOptions(("absent.jsonl",), tmp_path / "out", reward=reward).check()
        assert says in capsys.readouterr().err


# --- columns that reach a run -----------------------------------------------------------------------


def test_columns_and_sources_reach_a_run(tmp_path: Path) -> None:
    """Values of several types in one column are not an obstacle: Arrow refuses them, JSON does not."""
    rows = [
        {"question": f"{n}+1?", "answer": str(n + 1), "task": f"task {n}", "metadata": {"terms": terms}}
        for n, terms in enumerate(([1, "+", 1], [{"a": 2}], "none"))
    ]
    for row in rows[:2]:
        row["metadata"]["kind"] = True
    prepared(tmp_path, rows, source_column="task")
    found = load_prompts(tmp_path / "out" / DATA_FILE, load_tokenizer(MODEL), 400).prompts
    assert [one.data_source for one in found] == ["task 0", "task 1", "task 2"]
    assert [one.extra_info["metadata"] for one in found] == [row["metadata"] for row in rows]
    with pytest.raises(ConfigError, match="--source-column tasks is None; its columns are answer, m"):
        prepared(tmp_path, rows, source_column="tasks", max_invalid=0.0, overwrite=True)


def test_several_answers_are_a_text_for_a_reward_of_ones_own(tmp_path: Path) -> None:
    rows = [{"question": GOATS, "answer": '["1", "2"]'}, {"question": "Both?", "answer": ["1", "2"]}]
    assert prepared(tmp_path, rows, reward="my_rewards:any_of").kept == 2
    found = load_prompts(tmp_path / "out" / DATA_FILE, load_tokenizer(MODEL), 400).prompts
    assert [one.ground_truth for one in found] == ['["1", "2"]'] * 2
    with pytest.raises(ConfigError, match="2 answers; give one"):
        load_prompts(tmp_path / "out" / DATA_FILE, load_tokenizer(MODEL), 400, ground_truth_check("math"))


def test_answers_that_are_operations_are_counted(tmp_path: Path) -> None:
    answers = ["120", r"\binom{10}{3}", "2^{10}", r"\sqrt{2}", "n(n+1)", "12-7"]
    rows = [skywork(f"Question {n}?", answer) for n, answer in enumerate(answers)]
    card = prepared(tmp_path, rows)
    assert card.as_json()["operation_rows"] == card.operations == 3
    assert "is an operation (docs/rewards.md#mathematics): 3" in (tmp_path / "out" / CARD_TEXT).read_text()


@pytest.mark.parametrize("tokenizer", [None, MODEL])
def test_prompts_that_were_rendered_already_are_counted(tmp_path: Path, tokenizer: Path | None) -> None:
    """Control tokens of another model count, too; comparisons and tags do not."""
    asked = ["<|im_start|>user\n1+1?<|im_end|>", "[INST] 1+2? [/INST]", "Is 1 <|x| and |y|> 2?", "1 <s 2> 3?"]
    rows = [skywork(text, str(number)) for number, text in enumerate(asked)]
    card = prepared(tmp_path, rows, tokenizer=tokenizer)
    assert card.as_json()["control_token_rows"] == card.control_tokens == 2
    assert "(docs/data.md#which-fields-are-understood): 2" in (tmp_path / "out" / CARD_TEXT).read_text()


def test_a_card_has_the_options_that_something_was_done_with(tmp_path: Path) -> None:
    unused = {"max_prompt_tokens", "ngram_words", "ngram_share", "min_difficulty", "max_difficulty", "seed"}
    card = prepared(tmp_path, [skywork("1+1?", "2")])
    assert not unused & card.as_json()["options"].keys()
    card = prepared(tmp_path, [skywork("1+1?", "2")], tokenizer=MODEL, overwrite=True)
    assert card.as_json()["options"]["max_prompt_tokens"] == 2048


def test_the_kind_of_problem_that_a_row_names_stays_for_a_reward_of_ones_own(tmp_path: Path) -> None:
    card = prepared(tmp_path, [skywork(GOATS, "19")], reward="my:score")
    assert kept(tmp_path)[0]["ability"] == "math"
    assert card.by_ability == {"math": 1}
    prepared(tmp_path, [{**skywork(GOATS, TESTS), "ability": "math"}], overwrite=True)
    assert kept(tmp_path)[0]["ability"] == "code"


def test_fields_of_messages_are_kept_and_rendered(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "1", "name": None},
        {"role": "user", "content": "b", "name": "bob"},
    ]
    prepared(tmp_path, [{**skywork("", "19"), "prompt": messages}], instruct=False)
    (row,) = kept(tmp_path)
    expected = [
        messages[0],
        {**messages[1], "content": ""},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
        messages[3],
    ]
    assert row["prompt"] == expected
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    (prompt,) = load_prompts(tmp_path / "out" / DATA_FILE, tokenizer, 400).prompts
    assert prompt.messages == expected
    assert '"arguments": {"b": 1, "a": 2}' in tokenizer.decode(prompt.token_ids_P)


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
    rows = [
        conversation("1", long, "270.", "And half of it?"),
        conversation("2", "x=5. What is x+1?", "6", "And twice that?"),
    ]
    card = prepared(tmp_path, rows, against=(against,))
    assert card.dropped == {"contaminated": 1}
    assert [row["extra_info"]["row"] for row in kept(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("one", "other"), [("0.5", r"\frac{1}{2}"), ("1,000", "1000"), (r"\boxed{7}", "7"), ("1024", "2^{10}")]
)
def test_answers_that_the_reward_calls_equal_are_no_conflict(tmp_path: Path, one: str, other: str) -> None:
    card = prepared(
        tmp_path, [skywork(GOATS, one), skywork(GOATS, other), skywork("2?", "1"), skywork("2?", "3")]
    )
    assert card.dropped == {"duplicate": 1, "conflicting answers": 2}
    assert kept(tmp_path)[0]["reward_model"]["ground_truth"] == one


def test_answers_of_a_reward_of_ones_own_are_compared_as_texts(tmp_path: Path) -> None:
    card = prepared(
        tmp_path, [skywork(GOATS, "0.5"), skywork(GOATS, "1/2"), skywork("2?", "1")], reward="my:score"
    )
    assert card.dropped == {"conflicting answers": 2}


@pytest.mark.parametrize("empty", ["", "  ", None, float("nan")])
def test_an_empty_answer_leaves_it_to_the_solution(tmp_path: Path, empty: Any) -> None:
    prepared(tmp_path, [{"problem": empty, "question": GOATS, "answer": empty, "solution": r"\boxed{19}"}])
    (row,) = kept(tmp_path)
    assert row["reward_model"]["ground_truth"] == "19"
    assert row["extra_info"] == {"row": 0}


def test_a_column_named_row_is_kept(tmp_path: Path) -> None:
    prepared(tmp_path, [{"problem": GOATS, "answer": "19", "row": 17}])
    assert kept(tmp_path)[0]["extra_info"] == {"row": 0, "source_row": 17}
    prepare(PrepareOptions((str(tmp_path / "out" / DATA_FILE),), tmp_path / "again"))
    (row,) = read_rows(tmp_path / "again" / DATA_FILE)
    assert row["extra_info"] == {"row": 0, "source_row": 17}


def test_a_lone_surrogate_is_an_invalid_row(tmp_path: Path) -> None:
    """Half of a pair, as texts have it that were cut between its halves."""
    half = "Half a smile \ud83d"
    rows = [
        skywork(half, "1"),
        skywork("a", half),
        {**skywork("b", "1"), "extra_info": {"note": [half]}},
        {**skywork("c", "1"), "data_source": half},
        {"problem": "d", "answer": "1", "note": half},
        skywork(GOATS, "19"),
    ]
    card = prepared(tmp_path, rows)
    assert card.kept == 1
    assert [one.why.partition(" ")[0] for one in card.invalid] == [
        "prompt",
        "reward_model.ground_truth",
        "extra_info",
        "data_source",
        "extra_info",
    ]
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
    assert [one.why for one in card.invalid] == [
        "extra_info has Infinity, which JSON has not: write a number, or leave it out"
    ]


def test_whole_numbers_in_a_column_of_floats(tmp_path: Path) -> None:
    """So pandas writes whole numbers of which one is missing."""
    rows = [{"problem": f"{n}?", "answer": value} for n, value in enumerate((34.0, 7.0, None, 2.5))]
    card = prepared(tmp_path, rows, "rows.parquet")
    assert [row["reward_model"]["ground_truth"] for row in kept(tmp_path)] == ["34", "7"]
    assert [one.row for one in card.invalid] == [2, 3]


@pytest.mark.parametrize(
    "tests", [{"inputs": ["2\n"], "outputs": ["4\n"]}, [{"input": "2\n", "output": "4\n"}]], ids=str
)
def test_tests_in_a_column_of_objects_are_tests(tmp_path: Path, tests: Any) -> None:
    """As parquet has them."""
    chat = {**skywork("Double it.", ""), "reward_model": {"ground_truth": tests}}
    for row in ({"problem": "Double it.", "tests": tests}, chat):
        prepared(tmp_path, [row], "rows.parquet", overwrite=True)
        (found,) = kept(tmp_path)
        assert found["ability"] == "code"
        assert json.loads(found["reward_model"]["ground_truth"]) == tests
