"""Loops and agent programs as environments: by hand, over kills, and what they may not do."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.environment import PROMPT_TOOLS, Context, Reply, Task
from bapo_megatron.environment.adapters import agent_program, agent_rows, conversation
from bapo_megatron.environment.adapters.agent_program import REWARD_FILE
from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
from bapo_megatron.environment.adapters.loop import Ask, LoopEnvironment
from bapo_megatron.errors import ProgramError
from bapo_megatron.runtime.child_process import with_import_path
from tests.support.scripted_episodes import check_durable, play

pytestmark = pytest.mark.integration

AGENT = str(Path(__file__).parents[2] / "support/agent_program.py")
TASK = Task([{"role": "user", "content": "Guess my number."}], ground_truth="6")


class Guessing(LoopEnvironment):
    """A loop by hand."""

    async def play(self, ask: Ask) -> float | None:
        """Say higher or lower; half the reward for each question."""
        turn, asked = await ask(self.settings.get("opening")), 1
        while turn != "6":
            await asyncio.sleep(0)
            turn, asked = await ask("higher" if int(turn) < 6 else "lower"), asked + 1
        return 1 / asked


def test_a_loop_over_kills() -> None:
    replies = check_durable(Guessing, TASK, {}, ["3", "9", "6"])
    assert replies == [Reply("higher"), Reply("lower"), Reply(None, reward=1 / 3)]
    assert check_durable(Guessing, TASK, {"opening": "Guess my number."}, ["6"]) == [Reply(None, reward=1.0)]


class Odd(LoopEnvironment):
    """A loop whose ``way`` to play is refused."""

    way: Any

    async def play(self, ask: Ask) -> float | None:
        """As the way says, behind the first turn."""
        if self.way == "mute":
            return 1.0
        await ask("Guess." if self.way == "other" else None)
        raise self.way


LEAVES = r"play\(\) ended with "
"""Its step would wait for its whole limit, or the worker would end with all that it holds."""


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("other", "asks first 'Guess.', and not the prompt 'Guess my num"),
        ("mute", "ended before it asked the model"),
        (RuntimeError("no more"), "^no more"),
        (SystemExit(3), LEAVES + "SystemExit"),
        (asyncio.CancelledError(), LEAVES + "CancelledError"),
    ],
)
def test_loops_that_are_refused(way: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "way", way, raising=False)
    with pytest.raises((ValueError, RuntimeError), match=says):
        play(Odd, TASK, {}, ["3", "4", "5"])


# --- agent programs ------------------------------------------------------------------------------


def program(*arguments: str, **settings: Any) -> dict[str, Any]:
    return {"command": [sys.executable, AGENT, *arguments], **settings}


def test_a_program_over_kills() -> None:
    """Its requests are turns, what they add is the observation, its last line is the reward."""
    replies = check_durable(EndpointEnvironment, TASK, program(), ["3", "9", "6"])
    assert replies == [Reply("higher"), Reply("lower"), Reply(None, reward=1 / 3)]
    assert play(EndpointEnvironment, TASK, program("silent"), ["6"]) == [Reply(None)]
    branch, end = play(EndpointEnvironment, TASK, program("rewrites"), ["3", "6"])
    assert branch.context == Context(
        [
            {"role": "user", "content": "Guess again."},
            {"role": "assistant", "turn": 1},
            {"role": "user", "content": "higher"},
        ]
    )
    assert end == Reply(None, reward=0.5)


def test_what_a_program_runs_cannot_read_its_task_again() -> None:
    """It holds the ground truth. Standard input is inherited, into sandboxes too, and a file has a start."""
    assert play(EndpointEnvironment, TASK, program("spied"), ["6"]) == [Reply(None, reward=1.0)]


def test_a_program_that_never_reads_its_task_holds_nothing_up() -> None:
    long = replace(TASK, extra_info={"text": "x" * 1_000_000})
    with pytest.raises(ProgramError, match="ended with 0 and sent no request to OPENAI_BASE_URL"):
        play(EndpointEnvironment, long, {"command": [sys.executable, "-c", "pass"]}, ["6"])


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("tools", "ended with 1. Its request was refused: its first request has other tools than the prompt"),
        ("two", "ended with 1. Its request was refused: n"),
        ("dies", "ended with 3"),
        ("chats", "ended with 0 and wrote 'done', which is not a reward: write a number"),
    ],
)
def test_programs_that_are_refused(monkeypatch: pytest.MonkeyPatch, argument: str, problem: str) -> None:
    monkeypatch.setattr(conversation, "FIRST_S", 0.01)
    with pytest.raises(ProgramError, match=problem):
        play(EndpointEnvironment, TASK, program(argument), ["3", "6"])


def test_tools_that_the_prompts_describe() -> None:
    settings = program("tools", tools_in_prompts=True)
    listed = replace(TASK, extra_info={PROMPT_TOOLS: TOOLS})  # by `agent_rows`
    for task in (TASK, listed):
        assert play(EndpointEnvironment, task, settings, ["6"]) == [Reply(None, reward=1.0)]


def first(code: str) -> dict[str, Any]:
    """The settings of a program that runs ``code``, and then plays."""
    play_it = f"import runpy; runpy.run_path({AGENT!r}, run_name='__main__')"
    return {"command": [sys.executable, "-c", f"import os; {code}; {play_it}"]}


def test_a_program_has_the_users_variables_and_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has the run's import path in PYTHONPATH, with a standard library: an interpreter of another
    version would end at its first import. A proxy would see turns and key. langchain and older litellm read
    the address by its other name."""
    monkeypatch.setenv("PYTHONPATH", "/packages/of/mine")
    worker = with_import_path(with_import_path(os.environ))  # a worker, and a process that it started
    assert worker["PYTHONPATH"] != "/packages/of/mine"
    real = {"http_proxy": "http://127.0.0.1:9", "OPENAI_API_BASE": "https://api.example/v1"}
    for name, value in {**worker, **real, "no_proxy": "", "NO_PROXY": ""}.items():
        monkeypatch.setenv(name, value)
    same = first(
        "assert os.environ['PYTHONPATH'] == '/packages/of/mine'; "
        "assert os.environ['OPENAI_API_BASE'] == os.environ['OPENAI_BASE_URL']"
    )
    assert play(EndpointEnvironment, TASK, same, ["6"]) == [Reply(None, reward=1.0)]


WRITES = f"open(os.environ[{REWARD_FILE!r}], 'w').write('%s')"


@pytest.mark.parametrize(
    ("code", "settings", "reward"),
    [
        (WRITES % " 0.5\\n", {}, 0.5),
        (WRITES % 2, {"reward": "exit_code"}, 2.0),
        ("pass", {"reward": "exit_code"}, 1.0),
        ("import atexit; atexit.register(os._exit, 7)", {"reward": "exit_code"}, 0.0),
    ],
)
def test_a_reward_is_a_file_or_an_exit_code(code: str, settings: dict[str, str], reward: float) -> None:
    """The file comes first; what is printed does not count then."""
    assert play(EndpointEnvironment, TASK, {**first(code), **settings}, ["6"]) == [Reply(None, reward=reward)]


def test_the_memory_of_a_program_is_limited() -> None:
    eats = first("import sys; sys.argv = ['', 'silent']; bytearray(1 << 29)")
    assert play(EndpointEnvironment, TASK, {**eats, "memory_mb": 2048}, ["6"]) == [Reply(None)]
    with pytest.raises(ProgramError, match="ended with 1"):
        play(EndpointEnvironment, TASK, {**eats, "memory_mb": 256}, ["6"])


def test_the_logs_of_programs_are_kept_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EndpointEnvironment, "logs_dir", str(tmp_path / "agents"))
    monkeypatch.setattr(agent_program, "MOST_LOGS", 2)
    loud = first("import sys; sys.stderr.write('LOST '.lower() + 'x' * 100_000 + ' kept')")
    for episode in ("0-0-0", "0-1-0", "0-2-0"):
        play(EndpointEnvironment, replace(TASK, episode=episode), loud, ["6"])
    logs = sorted((tmp_path / "agents").glob("*.log"))
    assert [one.name for one in logs] == ["0-1-0.log", "0-2-0.log"]
    text = logs[0].read_text()
    assert "ended with 0" in text
    assert "x kept" in text
    assert "lost" not in text
    assert text.endswith("done\n1.0\n\n")
    with pytest.raises(ProgramError, match=r"ended with 3\. Its output is in .*/0-2-0\.log\. no money"):
        dies = first("import sys, atexit; sys.stderr.write('no money'); atexit.register(os._exit, 3)")
        play(EndpointEnvironment, replace(TASK, episode="0-2-0"), dies, ["6"])


def _is_waiting(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has ended: a child of another test
        return "waits" in process.cmdline()
    return False


def test_a_program_ends_with_its_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its log then, too."""
    monkeypatch.setattr(EndpointEnvironment, "logs_dir", str(tmp_path))

    async def closed_early() -> list[psutil.Process]:
        environment = EndpointEnvironment(TASK, program("waits"))
        step = asyncio.create_task(environment.step("3"))
        found: list[psutil.Process] = []
        while len(found) < 2:  # its guardian, and itself
            await asyncio.sleep(0.01)
            found = [one for one in psutil.Process().children(True) if _is_waiting(one)]
        environment.close()
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(environment._playing, return_exceptions=True)  # type: ignore[arg-type]
        return found

    assert not psutil.wait_procs(asyncio.run(closed_early()), timeout=60)[1]
    [log] = tmp_path.glob("*.log")
    assert "was ended by the run" in log.read_text()


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.mark.parametrize("arguments", [[], ["tools"]])
def test_rows_whose_prompts_are_what_a_program_asks_first(arguments: list[str], tmp_path: Path) -> None:
    """In a run it gets the problem, as it did then, and its first request is the row's prompt."""
    briefed = tmp_path / "briefed.py"
    text = Path(AGENT).read_text()
    text = text.replace("[*task[", '[{"role": "developer", "content": "Be brief."}, *task[')
    text = text.replace("[{}]", json.dumps(TOOLS))
    briefed.write_text(text)
    command = [sys.executable, str(briefed), *arguments]
    problems, output = tmp_path / "problems.jsonl", tmp_path / "rows.jsonl"
    problem = {"prompt": TASK.messages, "reward_model": {"ground_truth": "6"}, "extra_info": {"n": 1}}
    problems.write_text(json.dumps(problem) + "\n")
    agent_rows.main([str(problems), str(output), "--", *command])
    row = json.loads(output.read_text())
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, *TASK.messages]
    assert row["extra_info"]["n"] == 1
    assert row["extra_info"].get(PROMPT_TOOLS) == (TOOLS if arguments else None)
    task = replace(TASK, messages=row["prompt"], extra_info=row["extra_info"])
    assert play(EndpointEnvironment, task, {"command": command}, ["6"]) == [Reply(None, reward=1.0)]
    briefed.write_text(text.replace('"Be brief."', '[{"type": "image_url"}]'))
    for wrong in ([*command[:1], "-c", "pass"], command):
        with pytest.raises(SystemExit, match="2"):
            agent_rows.main([str(problems), str(tmp_path / "none"), "--", *wrong])


def test_no_file_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The problems themselves, say, or a dataset that a run reads."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("")
    with pytest.raises(SystemExit, match="2"):
        agent_rows.main([str(problems), str(problems), "--", "true"])
    assert "exists: name another file" in capsys.readouterr().err
