"""Code blocks of responses, the forms of ground truth that are tests of programs, and equal outputs."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest

from bapo_megatron.config import RewardConfig
from bapo_megatron.data.prompts import load_prompts
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.code import last_code_block, same_output, same_value
from bapo_megatron.reward.code_tests import (
    Asserted,
    Called,
    Printed,
    check_tests,
    forgeable_tests,
    is_tests,
    read_tests,
)
from bapo_megatron.reward.expressions import Split
from bapo_megatron.reward.functions import built_in, ground_truth_check

POLICY = Path(__file__).parents[3] / "recipes/demo/policy"
ADD = json.dumps({"inputs": ["1 2\n", "10 -3\n"], "outputs": ["3\n", "7\n"]})
CALL = json.dumps({"inputs": [[[3, 1, 2]], [[]]], "outputs": [[1, 2, 3], []], "fn_name": "order"})
ASSERTS = json.dumps(["assert double(2) == 4", "assert double('a') == 'aa', 't'", "assert double(0.1) < 0.3"])
CHECK = json.dumps(
    {
        "import_prefix": "import math\n",
        "test_code": "def check(candidate):\n"
        "    assert candidate(nums = [1, 4], target = 5) == [0, 1]\n"
        "    assert candidate(nums = [2, 2], target = 4) == [0, 1]\n",
        "entry_point": "Solution().two",
    }
)


PYTEST = """import pytest
from solution import double, shift

BASE = 3

def test_double():
    '''What it does.'''
    assert double(2) == 4
    assert double('a') == 'aa'

def test_shift():
    items = [1, 2]
    shift(items)
    if not items:
        return
    assert items == [2, 1]

if __name__ == "__main__":
    pytest.main()
"""
FUNCTIONAL = json.dumps(
    {
        "functional": "def check(candidate):\n"
        "    assert is_same_list(candidate(head = list_node([1, 2, 3])), list_node([3, 2, 1]))\n"
        "    assert is_same_list(candidate(head = list_node([])), list_node([]))\n\n\n"
        "check(Solution().turned)"
    }
)


@pytest.mark.parametrize(
    ("block", "responses"),
    [
        (
            "a",
            (
                *("```python\na\n```", "```python\na\n```\n```python\nb", "\t```python\n\ta\n\t```"),
                *("```python\na\n`````", '```python title="a.py"\na\n```', "```python {linenums=1}\na\n```"),
                *("```{.python .numbered}\na\n```", "``` Python 3\na\n```", "```python3.11\na\n```"),
                *("\ufeff```python\n\ufeffa\n```", "```python\na\n```\n```\noutput\n```"),
            ),
        ),
        ("b\nc", ("```python\na\n```\n```py\nb\nc\n```\nend",)),
        ("\n  a", ("```Python3 \n\n  a\n```",)),
        ("if a:\n\n    b\nc", ("- item\n   ```python\n   if a:\n\n       b\n  c\n   ```",)),
        ("```python\na\n```", ("````python\n```python\na\n```\n````",)),
        ("b", ("```python\nlost\n```python\nb\n```",)),
        ("s = '\x0b\u2028'", ("```python\ns = '\x0b\u2028'\n```",)),
        ("", ("```python a\n```",)),
        (
            None,
            (
                *("````python\na\n```\n", "```python-repl\na\n```", "```pythonic\na\n```"),
                *("```python`a`\nb\n```", "```\na\n```", "```pycon\na\n```", "```cpp\na\n```", "no code", ""),
            ),
        ),
    ],
)
def test_the_last_closed_python_block_counts(block: str | None, responses: tuple[str, ...]) -> None:
    assert {response: last_code_block(response) for response in responses} == dict.fromkeys(responses, block)


def test_the_forms_of_ground_truth() -> None:
    assert read_tests(ADD).cases == (Printed("1 2\n", "3\n"), Printed("10 -3\n", "7\n"))
    nested = {"inputs": [["1", "2"]], "outputs": [["3", ""]], "fn_name": None}
    assert read_tests(json.dumps(nested)).cases == (Printed("1\n2", "3\n"),)
    assert read_tests(CALL).cases == (Called("order", [[3, 1, 2]], [1, 2, 3]), Called("order", [[]], []))
    as_text = json.dumps({"inputs": ['[1]\n"a"'], "outputs": ["true"], "fn_name": "f"})
    assert read_tests(as_text).cases == (Called("f", [[1], "a"], True),)
    listed = [{"input": "[1]\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "f"}}]
    assert read_tests(json.dumps(listed)).cases == (Called("f", [[1], 2], 3),)  # DeepCoder, LiveCodeBench
    scripts = {"test_cases": [{"type": "stdin_stdout", "fn_name": None, "input": "1\n", "output": "2\n"}] * 2}
    assert read_tests(json.dumps(scripts)).cases == (Printed("1\n", "2\n"),) * 2  # SYNTHETIC
    assert is_tests(json.dumps(scripts["test_cases"]))
    both = {"inputs": ["1"], "outputs": ["2"], **scripts}
    assert read_tests(json.dumps(both)).cases == (Printed("1", "2"),)
    for other in ([*listed, {"input": "", "output": ""}], [{**listed[0], "metadata": {}}]):
        assert "they must be of one" in str(check_tests(json.dumps(other)))
    no_name = [{"input": "1", "output": "2", "fn_name": ["f"], "type": {}}]
    assert "it must be the name of a function" in str(check_tests(json.dumps(no_name)))
    streams = [{"input": {"stdin": "1\n"}, "output": {"stdout": "2\n"}}]  # SandboxFusion's code_contests
    assert read_tests(json.dumps(streams)).cases == (Printed("1\n", "2\n"),)
    assert read_tests('{"input": ["1"], "output": [2.5]}').cases == (Printed("1", "2.5"),)  # rLLM
    for inner in (CALL, json.loads(CALL)):  # TACO, LiveCodeBench
        assert read_tests(json.dumps({"input_output": inner})) == read_tests(CALL)
    assert read_tests(ASSERTS).cases == (
        Asserted("", "double(2)", True, 4),
        Asserted("", "double('a')", True, "aa"),
        Asserted("", "double(0.1) < 0.3", False, split=Split(("double(0.1)",), "ARGUMENTS[0] < 0.3")),
    )
    assert read_tests("assert 4 == double(2)").cases == (Asserted("", "double(2)", True, 4),)
    assert read_tests('{"assert_case": ["assert f() == []"]}').cases == (Asserted("", "f()", True, []),)
    checked = read_tests(CHECK)
    assert checked.prelude == "import math\n"
    assert checked.cases[1] == Asserted(
        "candidate = Solution().two", "candidate(nums=[2, 2], target=4)", True, [0, 1]
    )


@pytest.mark.parametrize(
    ("ground_truth", "problem"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"inputs": [], "outputs": []}', "not empty"),
        ('{"inputs": ["1"], "outputs": []}', '1 "inputs" but 0 "outputs"'),
        ('{"inputs": [[1]], "outputs": [1], "fn_name": "f()"}', "\"fn_name\" is 'f()'"),
        ('{"inputs": [1], "outputs": [1], "fn_name": "f"}', "the input 1 of f must be a list"),
        ('{"inputs": ["a b"], "outputs": ["1"], "fn_name": "f"}', "not one JSON value a line"),
        ('{"assert_case": []}', '"assert_case" must be a list of assert statements'),
        ('{"test_code": "def check(f): assert f() == 1"}', '"entry_point" is None'),
        ('{"test_code": "x = 1", "entry_point": "f"}', "defines no function check"),
        ('{"functional": "def check(f): assert f()"}', '"functional" must be text that defines check('),
        ('{"inputs": [{"a": 1}], "outputs": ["1"]}', 'a script has {"a": 1} as stdin'),
        ('{"inputs": ["1"], "outputs": [["1", ["2"]]]}', 'a script has ["2"] as stdout'),
        ('[{"input": {"stdin": "1", "a.txt": ""}, "output": {"stdout": "1"}}]', '"a.txt": ""} as stdin'),
        ('{"public_test_cases": "[]", "private_test_cases": "eJ"}', "its keys are 'public_test_cases', "),
        ("from solution import f\ndef test_a(capsys): assert f()", "def test_a(capsys):"),
        ("from solution import f\ndef test_a():\n with pytest.raises(OSError): f()", "needs pytest (raises,"),
        ("from solution import f as g\ndef test_a(): assert g()", "more than `from solution import NAME`"),
        ("import solution\ndef test_a(): assert solution.f()", "'import solution' needs pytest"),
        ("def f():\n  def test(): pass", "no function test_...() of pytest"),
    ],
)
def test_broken_tests_are_named(ground_truth: str, problem: str) -> None:
    found = check_tests(ground_truth)
    assert found is not None
    assert problem in found
    assert "mend it or leave the row out" in found


def test_code_and_mathematics_are_told_apart() -> None:
    assert all(map(is_tests, (ADD, CALL, ASSERTS, CHECK, PYTEST, "assert f(1) == 2", "{}")))
    assert not any(map(is_tests, ("34", r"\{1, 2\}", "[1, 2]", '"text"', "{1, 2}", "", "[" * 100_000)))


def test_a_reward_refuses_the_ground_truths_of_the_other() -> None:
    for function, truth, said in (
        ("math", ASSERTS, "it holds the tests of a program; set reward.function=math_or_code"),
        ("code", "5", "it must be an object"),
        ("math_or_code", "-", "'-' stands for no answer"),
    ):
        check = ground_truth_check(function)
        assert check is not None
        assert str(check(truth)).startswith(said)
    for function, score in (("math", 0.0), ("math_or_code", 1.0)):
        judge = built_in(RewardConfig(function))
        assert judge({"ground_truth": '["assert f() == 2"]'}, "```python\ndef f(): return 2\n```") == score


def test_lists_of_asserts_and_objects_survive_the_reading_of_a_dataset(tmp_path: Path) -> None:
    two = ["assert f(1) == 2", "assert f(2) == 3"]
    streams = {"input": {"stdin": "1"}, "output": {"stdout": "2"}}
    objects = (([streams], 1), ([streams] * 2, 2), (json.loads(FUNCTIONAL), 2), (json.loads(CALL), 2))
    for truth, cases in ((json.dumps(two[:1]), 1), (json.dumps(two), 2), (two, 2), *objects):
        prompt = [{"role": "user", "content": "do"}]
        row = {"data_source": "code", "prompt": prompt, "reward_model": {"ground_truth": truth}}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        (read,) = load_prompts(tmp_path / "rows.jsonl", load_tokenizer(POLICY), 99, check_tests).prompts
        assert len(read_tests(read.ground_truth).cases) == cases


SAME = [
    *(("3\n", "3"), ("3 \n4\t\n\n", "3\n4"), ("\n \n3\n", "3"), ("3", "\n3"), (" 3", "3"), ("1  2", "1 2")),
    *(("", ""), ("0.333333333", "0.3333333333"), ("1e-3 x", "0.001 x"), ("3.0", "3")),
]
OTHER = [
    *(("3\n\n4", "3\n4"), ("12", "1 2"), ("", "0"), ("0.33334", "0.33333"), ("1000001", "1000000")),
    *(("007", "7"), ("yes", "YES"), ("nan", "0.0"), ("1_0.0", "10.0"), ("inf", "1e999")),
]


def test_outputs() -> None:
    assert [pair for pair in SAME if not same_output(*pair)] == []
    assert [pair for pair in OTHER if same_output(*pair)] == []


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        (0.1 + 0.2, 0.3, True),
        (10**7 + 1, 10**7, False),
        (10**400, 1.5, False),
        (float("inf"), float("inf"), True),
        ({1: "a"}, {"1": "a"}, True),
        ({"1": "a", "2": "b"}, {"1": "a"}, False),
        ("1", 1, False),
        (object(), [1], False),
    ],
)
def test_values(value: object, expected: object, same: bool) -> None:
    assert same_value(value, expected) is same


def test_a_worker_keeps_the_tests_of_a_few_problems() -> None:
    """They may have megabytes, and there are many workers."""
    first = weakref.ref(read_tests('{"inputs": ["0"], "outputs": ["0"]}'))
    for number in range(1, 9):
        read_tests(f'{{"inputs": ["{number}"], "outputs": ["0"]}}')
    assert first() is None


def test_tests_of_pytest_with_more_than_asserts_can_be_forged() -> None:
    assert [case.forgeable for case in read_tests(PYTEST).cases] == [False, False, True]
    assert (forgeable_tests(PYTEST), forgeable_tests(FUNCTIONAL)) == (1, 0)
