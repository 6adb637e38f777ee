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
    difficulty = {f"DeepSeek-R1-Distill-Qwen-{size}": failures for size in ("1.5B", "7B", "32B")}
    return {
        "data_source": "train-math-made-up",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": index, "model_difficulty": difficulty},
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


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (skywork(GOATS, '["19"]'), "19"),
        ({"problem": GOATS, "answer": "19", "solution": "12 + 7 = 19"}, "19"),  # DeepScaleR
        ({"problem": GOATS, "solution": "so", "answer": "19", "subject": "Algebra", "level": 2}, "19"),
        ({"ID": "2024-I-1", "Problem": GOATS, "Solution": "so", "Answer": 19}, "19"),
        ({"id": 60, "problem": GOATS, "solution": "12+7 is \\boxed{19}", "url": "none"}, "19"),
        ({"question": GOATS, "answer": "019"}, "019"),
        ({"question": GOATS, "answer": "12 + 7 = <<12+7=19>>19\n#### 19"}, "19"),  # GSM8K
        ({"question": GOATS, "answer": "####  1,900 "}, "1,900"),
        ({"question": GOATS, "answer": "a #### b"}, "a #### b"),
        ({"question": GOATS, "answer": 19.0}, "19"),  # as pandas writes whole numbers of which one is missing
        *(
            ({"problem": empty, "question": GOATS, "answer": empty, "solution": r"\boxed{19}"}, "19")
            for empty in ("", "  ", None, float("nan"))
        ),
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
    assert problem.is_code
    assert problem.row()["ability"] == "code"
    assert problem.messages[0]["content"].endswith(CODE_INSTRUCTION)
    lists = {"inputs": ["2\n"], "outputs": ["4\n"]}
    for tests in (lists, [{"input": "2\n", "output": "4\n"}]):  # objects, as parquet has them
        chat = {**row, "reward_model": {"ground_truth": tests}}
        for asked in ({"problem": "Double it.", "tests": tests}, chat):
            assert problem_of(asked, "x", 0).is_code
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
        ({"problem": GOATS}, "neither an answer nor a solution"),
        ({"problem": GOATS, "answer": ""}, "its answer is ''"),
        ({"problem": GOATS, "answer": 1.5}, "its answer is 1.5"),
        ({"problem": GOATS, "answer": None}, "its answer has no value"),
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


def test_a_reward_of_ones_own_takes_any_text(tmp_path: Path) -> None:
    """The module is on the machines of the run; prompts stay as they are."""
    asked, text, listed = "The capital?", "Paris, the city of light", '["1", "2"]'
    rows = [{"question": asked, "answer": text}, {"question": "Two?", "answer": listed}]
    rows += [{"question": "Both?", "answer": ["1", "2"]}, skywork(GOATS, "19")]
    card = prepared(tmp_path, rows, reward="my_rewards:same_words")
    assert card.by_ability == {"other": 3, "math": 1}  # a kind that a row names stays
    assert not card.as_json()["options"]["instruct"]  # no sentence is added
    row, _, _, named = kept(tmp_path)
    assert (row["prompt"], row["ability"]) == ([{"role": "user", "content": asked}], "other")
    assert named["ability"] == "math"
    data = tmp_path / "out" / DATA_FILE
    found = load_prompts(data, load_tokenizer(MODEL), 400).prompts
    assert [one.ground_truth for one in found] == [text, listed, listed, "19"]
    with pytest.raises(ConfigError, match="2 answers; give one"):
        load_prompts(data, load_tokenizer(MODEL), 400, ground_truth_check("math"))


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
    with pytest.raises(ConfigError, match="Question, answer: `bapo data prepare FILE --output DIR`"):
        load_prompts(Path(source), load_tokenizer(MODEL), 64)


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
        ("The final answer: 4 + 3 =", ["The final answer: 3 + 4 ="], 8, 0.3, 1),
        ("The final answer: 4 + 5 =", ["The final answer: 3 + 4 ="], 8, 0.3, None),
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
    assert (match and match.share) == share
    assert match is None or match.problem.row == len(problems) - 1 or problems[0] == problems[-1]


def test_a_problem_that_many_questions_hold_is_no_template_of_theirs() -> None:
    """25 rephrasings around one evaluation problem: its n-grams are those of 20 questions or more."""
    numbers = "Let x and y be real numbers such that x squared plus y squared equals nineteen"
    problem = f"{numbers} and their product is seven. Find the sum of their fourth powers."
    index = Contamination([EvaluationProblem("s", 0, problem)], 8, 0.3)
    held = [f"Student {number} of {number + 40} was asked this: {problem}" for number in range(25)]
    other = held[0].replace("nineteen", "twenty")
    for question in [*held, other]:
        index.show(question)
    index.settle()
    assert [match.share for one in held if (match := index.match(one))] == [1.0] * 25
    assert index.match(other) is None


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
    assert questions(tmp_path) == [GOATS]
    dropped = {"duplicate": 1, "conflicting answers": 2, "difficulty": 3}
    assert card.dropped == {**dropped, "contaminated": 1, "too long": 1, "invalid": 2}
    assert [one.row for one in card.invalid] == [9, 10]
    assert sum(card.dropped.values()) + card.kept == len(rows)
    assert card.examples["contaminated"][0].why == "has 100% of held_out, row 0"
    text = (tmp_path / "out" / CARD_TEXT).read_text()
    for reason in card.dropped:
        assert f"## Examples: {reason}" in text


def test_the_same_tests_of_a_program_are_no_conflict(tmp_path: Path) -> None:
    other = json.dumps({"inputs": ["3\n"], "outputs": ["6\n"]})
    row = {**skywork("Double it.", TESTS), "ability": "math"}  # which tests correct
    card = prepared(tmp_path, [row, skywork("Double it.", other)])
    assert card.dropped == {"duplicate": 1}
    assert card.by_ability == {"code": 1}


LOOP = json.dumps(["assert all(f(i) == i for i in range(3))"])
OPERATIONS = ["120", r"\binom{10}{3}", "2^{10}", r"\sqrt{2}", "n(n+1)", "12-7"]
RENDERED = ["<|im_start|>user\n1+1?<|im_end|>", "[INST] 1+2? [/INST]"]
"""With control tokens of another model, too; comparisons and tags are none."""
NOT_RENDERED = ["Is 1 <|x| and |y|> 2?", "1 <s 2> 3?"]


@pytest.mark.parametrize(
    ("rows", "field", "count", "told"),
    [
        ([skywork("f", LOOP), skywork("g", TESTS)], "forgeable", 1, "forge (docs/rewards.md#programs)"),
        ([skywork(f"{n}?", one) for n, one in enumerate(OPERATIONS)], "operation", 3, "operation (docs/rew"),
        ([skywork(one, "1") for one in RENDERED + NOT_RENDERED], "control_token", 2, "(docs/data.md#which-"),
    ],
    ids=["forgeable", "operations", "rendered"],
)
def test_rows_to_look_at_are_counted(
    tmp_path: Path, rows: list[Any], field: str, count: int, told: str
) -> None:
    for tokenizer in (None, MODEL):
        card = prepared(tmp_path, rows, tokenizer=tokenizer, overwrite=True)
        assert card.as_json()[f"{field}_rows"] == count
        text = (tmp_path / "out" / CARD_TEXT).read_text()
        assert re.search(rf"{re.escape(told)}.*: {count}\n", text)


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


GAMES = [{"question": "Guess my number.", "answer": answer} for answer in ("7", "8")]
LONG = [skywork("x" * length, "1") for length in (500, 600, 900)]
LENGTHS = r"too long 3\).*shortest has 5\d\d, the median 6\d\d, the longest 9\d\d: raise --max-p"


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([{"text": "a"}] * 2, {"max_invalid": 0.05}, "2 of 2 rows are invalid(.|\n)*its columns are text"),
        ([{"text": "a"}], {}, r"no row of 1 is left \(invalid 1\)"),
        (GAMES, {}, r"conflicting answers 2\); .*write something of the row into each"),
        (LONG, {"tokenizer": MODEL, "max_prompt_tokens": 400}, LENGTHS),
        ([], {}, r"rows\.jsonl: the file has no rows"),
        (GAMES[:1], {"source_column": "task", "max_invalid": 0.0}, "--source-column task is None"),
        # a reason is told once
        (
            [{"text": "a"}, {"text": "b"}, {"other": "c"}],
            {"max_invalid": 0.0},
            r"nothing was written.*\n.*rows\.jsonl, row 0: .*\n.*rows\.jsonl, row 2: .*$",
        ),
    ],
)
def test_nothing_is_written_without_rows(
    tmp_path: Path, rows: list[Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        prepared(tmp_path, rows, **options)
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


def test_broken_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hub(*_: Any, **__: Any) -> None:
        raise OSError("no network here")

    monkeypatch.setattr("datasets.load_dataset", no_hub)
    for source in ("nowhere.jsonl", str(tmp_path), "someone/some-set"):
        with pytest.raises(ConfigError, match="no network here" if "someone" in source else "no such file"):
            prepare(PrepareOptions((source,), tmp_path / "out"))


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
        ({"reward": "mine"}, "reward=mine must be one of math, "),
        ({"max_invalid": 2.0}, "max_invalid=2.0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
        ({"min_difficulty": 1.0}, "need difficulty"),
        ({"difficulty": "x", "min_difficulty": 3.0, "max_difficulty": 2.0}, "is above"),
        ({"against": ("nothing",)}, "neither a file nor a suite"),
        ({"question_column": "body"}, "row 0: it has no column body"),
        ({"drop_columns": ("body",)}, "row 0: it has no column body"),
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


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("prepare_rewards:same_word", "did you mean prepare_rewards:same_words?"),
        ("prepare_rewards:one_argument", "which cannot be called with a prompt and a response"),
        ("prepare_rewards:", "is not a module:function"),
        # What only the cluster can import is a warning.
        ("math_cluster_rewards:score", "warning: reward=math_cluster_rewards:score: there is no module"),
        ("my_cluster_rewards:score", "a_package_of_the_cluster"),
        ("prepare_rewards:same_words", ""),
    ],
)
def test_a_typo_in_the_reward_ends_before_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reward: str,
    told: str,
) -> None:
    functions = "def same_words(prompt, response): return 1.0\ndef one_argument(prompt): return 1.0\n"
    (tmp_path / "prepare_rewards.py").write_text(functions)
    (tmp_path / "my_cluster_rewards.py").write_text("import a_package_of_the_cluster\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = PrepareOptions(("absent.jsonl",), tmp_path / "out", reward=reward)
    if reward.startswith("prepare_rewards:") and told:
        with pytest.raises(ConfigError, match=re.escape(told)) as error:
            options.check()
        assert f"did you mean {reward}?" not in str(error.value)
    else:
        options.check()
        warning = capsys.readouterr().err
        assert told in warning
        assert bool(told) is bool(warning)


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


def test_a_card_has_the_options_that_something_was_done_with(tmp_path: Path) -> None:
    unused = {"max_prompt_tokens", "ngram_words", "ngram_share", "min_difficulty", "max_difficulty", "seed"}
    card = prepared(tmp_path, [skywork("1+1?", "2")])
    assert not unused & card.as_json()["options"].keys()
    card = prepared(tmp_path, [skywork("1+1?", "2")], tokenizer=MODEL, overwrite=True)
    assert card.as_json()["options"]["max_prompt_tokens"] == 2048


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


@pytest.mark.parametrize(
    ("one", "other", "reward", "dropped"),
    [
        ("0.5", r"\frac{1}{2}", None, {"duplicate": 1, "conflicting answers": 2}),
        ("1,000", "1000", None, {"duplicate": 1, "conflicting answers": 2}),
        (r"\boxed{7}", "7", None, {"duplicate": 1, "conflicting answers": 2}),
        ("1024", "2^{10}", None, {"duplicate": 1, "conflicting answers": 2}),
        ("0.5", "1/2", "my:score", {"conflicting answers": 4}),  # compared as texts
    ],
)
def test_answers_that_the_reward_calls_equal_are_no_conflict(
    tmp_path: Path, one: str, other: str, reward: str | None, dropped: dict[str, int]
) -> None:
    pairs = ((GOATS, one), (GOATS, other), ("2?", "1"), ("2?", "3"), ("3?", "1"))
    card = prepared(tmp_path, [skywork(*pair) for pair in pairs], reward=reward)
    assert card.dropped == dropped
    assert reward or kept(tmp_path)[0]["reward_model"]["ground_truth"] == one


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
