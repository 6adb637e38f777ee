"""The Python tool in a real sandbox: sessions by hand, walls, limits, and kills between calls."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

from bapo_megatron.environment import Reply, Task
from bapo_megatron.environment.tools import python_tool
from bapo_megatron.environment.tools.python_tool import PythonTool
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import within
from tests.support.scripted_episodes import check_durable, play

pytestmark = pytest.mark.integration

TASK = Task([{"role": "user", "content": "?"}])
FENCED = {"format": "fenced"}
WELL = {"calls": 1.0, "call_errors": 0.0}
BADLY = {"calls": 1.0, "call_errors": 1.0}


def block(code: str) -> str:
    return f"I try.\n```python\n{code}\n```\nLet us see."


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def said(*codes: str, **settings: Any) -> list[str | None]:
    return [one.observation for one in play(PythonTool, TASK, {**FENCED, **settings}, map(block, codes))]


def test_a_worker_of_the_tool_cannot_be_traced() -> None:
    """It holds the answers; a program of the same user would find them where walls are missing."""

    def dumpable() -> int:
        PythonTool(TASK, {"allow_weak_sandbox": True})
        return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE

    assert within(60.0, dumpable) == 0


def test_a_session_over_kills() -> None:
    """Each call sees what those before it have defined, and prints its own output alone; so does a session
    that was rebuilt, also without the calls that were not kept."""
    codes = [
        "x = 3\nprint('once')\nx * 2",
        "x + 1",
        "x = 9\n1 / 0",
        "x",
        "import os\nx = 10\nos._exit(3)",
        "x",
        "import random\nr = random.random()\nr",
        "(r, x)",
    ]
    replies = check_durable(PythonTool, TASK, FENCED, [*map(block, codes), "It is \\boxed{9}."])
    assert replies[:6] == [
        Reply("once\n6", metrics=WELL, note=[]),
        Reply("4", metrics=WELL, note=[]),
        Reply(
            '  File "<call>", line 2, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero',
            metrics=BADLY,
            note=[],
        ),
        Reply("9", metrics=WELL, note=[]),
        Reply("error: its interpreter ended with 3; nothing of this call is kept", metrics=BADLY, note=[4]),
        Reply("9", metrics=WELL, note=[4]),
    ]
    drawn = replies[6].observation
    assert replies[7].observation == f"({drawn}, 9)"
    assert replies[8] == Reply(None, metrics={"calls": 0.0, "call_errors": 0.0}, note=[4])


def test_calls_in_json_and_their_mistakes() -> None:
    turns = [call("a = 2") + call("a + 1"), '<tool_call>{"name": "bash"}</tool_call>', call("a"), "4"]
    replies = check_durable(PythonTool, TASK, {}, turns)
    assert [one.observation for one in replies] == [
        ["", "3"],
        "error: there is no tool 'bash'; the tool is 'python'",
        "2",
        None,
    ]
    assert replies[1].metrics == BADLY


def test_the_walls_of_the_sandbox() -> None:
    """Those of tested programs (test_sandbox_walls.py): no file of the run, no process; a limit of memory."""
    found = said(
        f"open({__file__!r})",
        "import subprocess\nsubprocess.run(['ls'])",
        "x = bytearray(10**10)",
        "x = ",
        "raise SystemExit('bye')",
    )
    ends = [str(one).splitlines()[-1].split(":")[0] for one in found]
    assert ends[:3] == ["FileNotFoundError", "PermissionError", "MemoryError"]
    assert ends[3:] == ["SyntaxError", "SystemExit"], "what a call raises is told"


def test_a_long_output_loses_its_middle() -> None:
    [text] = said("print('a' * 300 + 'b' * 300)", most_characters=100)
    assert text == "a" * 50 + "\n[500 characters]\n" + "b" * 50


def test_a_call_that_ends_its_interpreter_quietly_is_not_kept() -> None:
    """Played again before each later call, it would silence all of them."""
    codes = ["import os; x = 1; os.close(1)", *(f"os._exit({code})" for code in (0, 100)), "print(x)"]
    replies = check_durable(PythonTool, TASK, FENCED, map(block, codes))
    lost = "error: its interpreter ended with {}; nothing of this call is kept"
    assert replies[1:] == [
        Reply(lost.format(0), metrics=BADLY, note=[1]),
        Reply(lost.format(100), metrics=BADLY, note=[1, 2]),
        Reply("1", metrics=WELL, note=[1, 2]),
    ]


def test_earlier_calls_are_silent_also_below_print() -> None:
    assert said("import os\nn = os.write(1, b'once\\n')", "print(n)") == ["once", "5"]
    assert said("import sys\nprint('once', file=sys.__stdout__)", "1") == ["once", "1"]


def test_a_session_sees_what_its_calls_have_seen() -> None:
    """The order of a set of texts, and what global generators draw."""
    order, again = said("s = list({str(n) for n in range(50)})\nprint(s)", "print(s)")
    assert order == again
    for module in ("random", "numpy.random"):
        drawn, again = said(f"import {module}\nx = {module}.random()\nx", "x")
        assert drawn == again
    drawn, again = said("import pandas\nx = list(pandas.Series(range(999)).sample(3))\nx", "x")
    assert drawn == again


def test_the_names_of_a_session_are_those_of_its_main_module() -> None:
    code = "import pickle\ndef five():\n    return 5\npickle.loads(pickle.dumps(five))()"
    assert said(code, "pickle.loads(pickle.dumps(five))()") == ["5", "5"]


def test_missing_walls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "_missing_walls", lambda: ["no network namespace"])
    with pytest.raises(ConfigError, match="lacks walls on this machine: no network .* allow_weak_sandbox in"):
        PythonTool(TASK, FENCED)
    PythonTool(TASK, {**FENCED, "allow_weak_sandbox": True})


def test_a_turn_of_many_slow_calls_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are left out count as calls that are not kept, also after a kill."""
    monkeypatch.setattr(python_tool, "TURN_LIMITS", 1)
    turns = [call("x = 1"), call("while True: pass") + call("x = 2") + call("x = 3"), call("x")]
    replies = check_durable(PythonTool, TASK, {"limit_s": 2.0}, turns, cuts=[2])
    late = "error: not run: the calls before it in this turn took too long"
    assert replies[1] == Reply(
        ["error: it took longer than 2 s; nothing of this call is kept", late, late],
        metrics={"calls": 3.0, "call_errors": 3.0},
        note=[1, 2, 3],
    )
    assert replies[2].observation == "1"
