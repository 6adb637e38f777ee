"""Episodes in worker processes: held, brought back, hung, raised; a fault costs its own episode."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import sysconfig
import venv
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.sources import EnvironmentConfig
from bapo_megatron.environment import Task, Turn
from bapo_megatron.environment import pool as pools
from bapo_megatron.environment import settings as own_settings
from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
from bapo_megatron.environment.pool import (
    EnvironmentPool,
    Question,
    StepResult,
    Traits,
    command_problem,
    interpreter_problem,
    read_traits,
    stop_ids,
)
from bapo_megatron.environment.tools.calculator import Calculator
from bapo_megatron.environment.worker import Episodes
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.sampler.turns import check_environment
from tests.support.chat_templates import demo_tokenizer
from tests.support.environments import Dice

pytestmark = pytest.mark.integration

LONG_S = 300.0
AGENT = f"{EndpointEnvironment.__module__}:EndpointEnvironment"


def config(name: str, **fields: Any) -> EnvironmentConfig:
    made = {"step_limit_s": LONG_S, "episode_limit_s": LONG_S, "workers": 1, **fields}
    return EnvironmentConfig(f"tests.support.environments:{name}", **made)


class Player:
    """Episodes as the sampler would keep them: turns so far, the last note, seconds."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool = pool
        self.turns: dict[str, list[Turn]] = {}
        self.notes: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.history_asked = 0

    async def say(self, name: str, turn: str) -> StepResult:
        turns = self.turns.setdefault(name, [])
        asked = [*turns, Turn("sampled", turn)]

        def history() -> list[Turn]:
            self.history_asked += 1
            return asked

        task = Task([{"role": "user", "content": "hello"}], "42", "test", {"a": 1}, name)
        question = Question(
            task, turn, len(turns) // 2, history, self.notes.get(name), self.seconds.get(name, 0.0)
        )
        result = await self.pool.step(question)
        if result.observation is not None:
            turns += [asked[-1], Turn("given", result.observation)]
            self.notes[name] = result.note
            self.seconds[name] = self.seconds.get(name, 0.0) + result.seconds
        return result

    def processes(self) -> list[int]:
        slots = self.pool._workers._workers
        return [slot._process.pid for slot in slots if slot._process]


@asynccontextmanager
async def playing(settings: EnvironmentConfig) -> AsyncIterator[Player]:
    pool = EnvironmentPool(settings, read_traits(settings))
    await pool.start()
    await asyncio.sleep(0)  # each place takes its process
    try:
        yield Player(pool)
    finally:
        await pool.close()


def lines(log: Path) -> list[str]:
    """The events of the log, without the processes' numbers."""
    return [line.split(" ", 1)[1] for line in log.read_text().splitlines()]


@pytest.mark.parametrize("name", ["Plain", "Async"])
async def test_an_episode_stays_in_its_worker_to_its_end(tmp_path: Path, name: str) -> None:
    log = tmp_path / "log"
    async with playing(config(name, workers=2, settings={"log": str(log)})) as player:
        assert await player.say("e", "a") == replace(
            StepResult("1:a", 0.5, {"steps": 1.0}, {"turns": 1}), seconds=player.seconds["e"]
        )
        assert (await player.say("e", "b")).observation == "2:b"
        end = await player.say("e", "end")
        assert (end.observation, end.reward, end.metrics, end.failure) == (None, 1.0, {"turns": 3.0}, None)
        assert player.history_asked == 1, "a held object needs no history"
    assert lines(log) == ["e made", "e step a", "e step b", "e step end", "e closed"]
    assert len({line.split()[0] for line in log.read_text().splitlines()}) == 1


async def test_a_thousand_async_steps_wait_in_one_worker() -> None:
    async with playing(config("Async")) as player:
        found = await asyncio.gather(*(player.say(str(n), "meet 1000") for n in range(1000)))
        assert {one.observation for one in found} == {"1:meet 1000"}


async def test_plain_steps_run_beside_each_other(tmp_path: Path) -> None:
    file = tmp_path / "file"
    async with playing(config("Plain")) as player:
        waiting = [asyncio.create_task(player.say(str(n), f"wait for {file}")) for n in range(31)]
        assert (await player.say("free", "a")).observation == "1:a"
        file.touch()
        assert {one.failure for one in await asyncio.gather(*waiting)} == {None}


@pytest.mark.parametrize(
    ("turn", "failure", "text"),
    [
        ("raise", "raised", r"ValueError\('the door is shut'\)"),
        ("exit", "raised", "SystemExit"),
        ("stop iteration", "raised", "StopIteration"),
        ("no reply", "raised", "step returned str: return a Reply"),
        ("surrogate", "raised", "surrogates not allowed"),
        ("long", "raised", "5242880 characters; at most 4194304 may be"),
        ("note", "raised", "Reply.note has 71682 bytes as JSON"),
        ("nested note", "raised", "Reply.note has more than 100 lists and objects within each other"),
        ("nan", "raised", "Reply.reward=nan is not a finite number"),
        ("digits", "raised", "Reply.reward='1.0' is not a finite number"),
        ("die", "died", "exit code 9"),
        ("hang", "time", "no answer within"),
    ],
)
@pytest.mark.parametrize("name", ["Plain", "Async"])
async def test_a_fault_is_data_and_costs_its_own_episode(
    name: str, turn: str, failure: str, text: str, tmp_path: Path
) -> None:
    limits = {"step_limit_s": 1.0} if turn == "hang" else {}
    async with playing(config(name, **limits)) as player:
        assert (await player.say("other", "a")).observation == "1:a"
        found = await player.say("faulty", turn)
        assert found.failure == failure
        assert found.observation is None
        assert re.search(text, found.detail), found.detail
        assert (await player.say("other", "b")).observation == "2:b"
        if turn == "raise":
            assert "tests/support/environments.py" in found.traceback
            assert "serving.py" not in found.traceback
            assert found.place.startswith("ValueError at ")


async def test_megabytes_of_prints_are_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    async with playing(config("Async")) as player:
        assert (await player.say("e", "print")).observation == "1:print"
    assert capfd.readouterr().err.count("x") >= 1 << 20


@pytest.mark.parametrize(("name", "turn"), [("Plain", "spin"), ("Async", "block")])
async def test_a_step_that_cannot_be_interrupted_costs_its_worker_and_no_other_episode(
    name: str, turn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pools, "_PLAIN_GRACE_S", 0.2)
    monkeypatch.setattr(pools, "_ASYNC_GRACE_S", 0.2)
    file = tmp_path / "file"

    settings = replace(config(name), step_limit_s=3.0)
    async with playing(settings) as player:
        assert (await player.say("idle", "a")).observation == "1:a"
        beside = asyncio.create_task(player.say("beside", f"hang once {file}"))
        stuck = asyncio.create_task(player.say("stuck", turn))
        assert (await stuck).failure == "time"
        if name == "Plain":  # it was late as well, and could not be interrupted
            assert (await beside).observation == f"1:hang once {file}"
        else:  # whether its own limit, or the other's, came first
            assert (await beside).failure in (None, "time")
        assert (await player.say("idle", "b")).observation == "2:b", "it was replayed"


async def test_who_ends_workers_ends_up_alone() -> None:
    """Ten episodes in a worker, one of which ends it at each try: nine continue."""
    async with playing(config("Async")) as player:
        for n in range(10):
            await player.say(str(n), "a")
        found = await asyncio.gather(*(player.say(str(n), "die" if n == 4 else "b") for n in range(10)))
        assert [one.failure for one in found] == [None] * 4 + ["died"] + [None] * 5
        assert {one.observation for one in found} == {"2:b", None}


@pytest.mark.parametrize("name", ["Plain", "Async", "Restored"])
async def test_a_lost_object_is_brought_back(tmp_path: Path, name: str) -> None:
    log = tmp_path / "log"
    async with playing(config(name, settings={"log": str(log)})) as player:
        await player.say("e", "a")
        await player.say("e", "b")
        os.kill(player.processes()[0], signal.SIGKILL)
        assert (await player.say("e", "c")).observation == "3:c"
    before = ["e made", "e step a", "e step b"]
    again = ["e restored ['a', '1:a', 'b', '2:b']"] if name == "Restored" else ["e step a", "e step b"]
    assert lines(log) == [*before, "e made", *again, "e step c"]


@pytest.mark.parametrize(
    ("name", "why"), [("Clock", "and after a replay with"), ("Never", "cannot be resumed")]
)
async def test_an_episode_that_cannot_be_brought_back_says_so(name: str, why: str) -> None:
    async with playing(config(name)) as player:
        await player.say("e", "a")
        os.kill(player.processes()[0], signal.SIGKILL)
        found = await player.say("e", "b")
        assert (found.failure, found.observation) == ("diverged", None)
        assert why in found.detail


@pytest.mark.parametrize("dice", ["Dice", "SharedDice"])
async def test_own_random_makes_a_replay_draw_what_was_drawn(dice: str) -> None:
    """Two episodes take turns in one worker; without states of their own the replay differs."""
    async with playing(config(dice)) as player:
        said = [(await player.say(name, "roll")).observation for name in "abab"]
        assert len(set(said)) == 4
        os.kill(player.processes()[0], signal.SIGKILL)
        failures = [(await player.say(name, "roll")).failure for name in "ba"]
    assert failures == [None, None] if dice == "Dice" else "diverged" in failures


async def test_the_random_states_of_finished_episodes_are_forgotten() -> None:
    """25 kB each, of as many episodes as a run has."""
    episodes, kept = Episodes(Dice, {}), []
    assert episodes._random is not None
    for name, turn in (("over", "end"), ("failed", "fail"), ("open", "roll")):
        task = {"messages": [], "episode": name}
        with suppress(ValueError):
            await episodes.resume({"task": task, "turns": [["sampled", turn]], "note": None})
    kept.append(set(episodes._random._states))
    await episodes.step({"episode": "open", "replies": 1, "turn": ["end"]})
    assert [*kept, set(episodes._random._states)] == [{"open"}, set()]


@pytest.mark.parametrize("replies", [0, 2])
async def test_an_object_that_is_not_where_its_episode_is_is_not_asked(replies: int) -> None:
    """It has given one answer; the journal of the run has less, or more."""
    episodes = Episodes(Dice, {})
    task = {"messages": [], "episode": "e"}
    await episodes.resume({"task": task, "turns": [["sampled", "roll"]], "note": None})
    assert await episodes.step({"episode": "e", "replies": replies, "turn": ["roll"]}) == {"missing": True}
    assert not episodes._held


async def test_the_clock_of_an_episode_is_hard() -> None:
    async with playing(config("Async", step_limit_s=9.0, episode_limit_s=5.0)) as player:
        await player.say("e", "a")
        player.seconds["e"] = 5.0
        found = await player.say("e", "b")
        assert (found.failure, found.detail) == ("time", "its steps took environment.episode_limit_s=5 s")
        player.seconds["f"] = 4.5
        found = await player.say("f", "hang")
        assert (found.failure, found.detail) == ("time", "no answer within 0.5 s")


async def test_a_forgotten_or_cancelled_episode_is_closed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with playing(config("Async", settings={"log": str(log)})) as player:
        await player.say("e", "a")
        player.pool.forget("e")
        waiting = asyncio.create_task(player.say("f", "hang"))
        while "f step hang" not in lines(log):
            await asyncio.sleep(0.01)
        waiting.cancel()
        while not {"e closed", "f closed"} <= {*lines(log)}:
            await asyncio.sleep(0.01)
        assert not player.pool._workers._holders


async def test_who_answers_after_the_limit_has_failed_and_is_closed(tmp_path: Path) -> None:
    """A step that heeds no cancel: its answer does not count, and its object is held by nobody."""
    log = tmp_path / "log"
    async with playing(config("Async", step_limit_s=1.0, settings={"log": str(log)})) as player:
        await player.say("e", "a")
        assert (await player.say("e", "late")).failure == "time"
        assert lines(log)[-1] == "e closed", "an object that nobody will ask again is held"
    assert lines(log) == ["e made", "e step a", "e step late", "e closed"]


async def test_a_step_may_catch_the_error_of_its_task_group() -> None:
    """Before Python 3.13 such a group leaves its task as if somebody had cancelled it."""
    async with playing(config("Async", step_limit_s=5.0)) as player:
        assert (await player.say("e", "group")).observation == "caught"


async def test_a_step_that_cancels_itself_has_failed() -> None:
    """Its caller waits for an answer, and no limit is left that would end it."""
    async with playing(config("Async", step_limit_s=5.0)) as player:
        assert (await player.say("e", "cancel")).failure == "raised"


# --- the class, before a run ---------------------------------------------------------------------


def test_the_traits_of_a_class() -> None:
    assert read_traits(config("Async")) == Traits("tool", ("</call>",), "replay", False, True)
    assert read_traits(config("Restored")).resume == "restore"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("tests.support.environments:Missing", "has no class Missing"),
        ("tests.support.nowhere:Name", "importing tests.support.nowhere failed"),
        ("nowhere.py:Name", "there is no file .*/nowhere.py"),
        ("tests.support.environments:acted", "is not a subclass of bapo_megatron.environment.Environment"),
        ("tests.support.environments:InSteps", "step is a generator function: return a Reply"),
        ("tests.support.environments:NoStep", r"it has no step\(self, turn\) of its own"),
        ("tests.support.environments:NoStep", "role='ipython' is unknown: set it to 'tool' or 'user'"),
        ("tests.support.environments:NoStep", "stops='</call>' must be a tuple of texts"),
        ("tests.support.environments:NoStep", "resume='restore' needs a method restore"),
        ("tests.support.environments:NoStep", r"define __init__\(self, task, settings\)"),
    ],
)
def test_a_wrong_class_is_refused_in_words(function: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_traits(EnvironmentConfig(function))


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (
            "Calculator",
            {"format": 1},
            "format=1 must be one of tool_call, plain; environment.function=x:Y takes",
        ),
        (
            "Python",
            {"limit_s": -1},
            "limit_s=-1 must be above 0; .*Y takes limit_s: float above 0, default 10.0",
        ),
        ("Python", {"limit_s": "9"}, "limit_s='9' must be a number"),
        ("Python", {"most_characters": 0}, "most_characters=0 must be at least 2"),
        ("Python", {"memory_mb": True}, "memory_mb=True must be a whole number"),
        ("Agent", {}, "command is missing: environment.function=x:Y takes command: list of a length of at"),
        ("Agent", {"command": []}, r"command=\[\] must be of a length of at least 1"),
        ("Agent", {"command": "agent.py"}, "command='agent.py' must be a list"),
        ("OpenEnv", {"url": ""}, "url='' must be of a length of at least 1"),
        ("TextArena", {"new_text_onyl": True}, r"new_text_onyl=True: .* is it new_text_only\?"),
        ("Verifiers", {"taskset": {}, "envs": {}}, "envs={}: .* is it env.*; env: dict.*, default {}$"),
    ],
)
def test_settings_of_a_shipped_environment(kind: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^environment\.settings\.{text}"):
        pools._check_settings(EnvironmentConfig("x:Y", settings), f"{own_settings.__name__}:{kind}Settings")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["agnet", "x"], r"=\['agnet', 'x'\]: agnet is not a program here: give one of PATH"),
        ([sys.executable, "agnet.py"], r"=.*: agnet\.py is not there: relative paths begin in /"),
        ([sys.executable, "-u", "agnet.py"], r"=.*: agnet\.py is not there"),
    ],
)
def test_the_program_of_an_agent_is_there_before_a_run(command: list[str], problem: str) -> None:
    asked = EnvironmentConfig(AGENT, {"command": command})
    with pytest.raises(ConfigError, match=rf"^environment\.settings\.command{problem}"):
        check_environment(asked, Path("recipes/demo/policy"), demo_tokenizer())


@pytest.mark.parametrize(
    "command", [[sys.executable, __file__], [sys.executable, "-m", "x"], [sys.executable], ["cat", "x.py"]]
)
def test_what_an_agents_program_opens_is_its_own_business(command: list[str]) -> None:
    asked = EnvironmentConfig(AGENT, {"command": command})
    assert command_problem(asked, read_traits(asked)) is None


def test_settings_are_refused_before_a_run(tmp_path: Path) -> None:
    """Also of a class in another interpreter, which has none of the packages that check them."""
    venv.create(tmp_path)
    function, python = f"{Calculator.__module__}:Calculator", tmp_path / "bin/python"
    asked = EnvironmentConfig(function, {"formt": "plain"}, python=python)
    with pytest.raises(
        ConfigError, match=r"^environment\.settings\.formt='plain': .*, is it format\?; its set"
    ):
        read_traits(asked)
    assert read_traits(replace(asked, settings={"format": "plain"})).resume == "restore"


@pytest.mark.parametrize(
    ("path", "settings", "own"),
    [
        ("tools.calculator:Calculator", {"format": "fenced"}, "__init__"),
        ("tools.python_tool:PythonTool", {"format": "fence"}, "__init__"),
        ("adapters.endpoint:EndpointEnvironment", {}, "run"),
        ("adapters.openenv:OpenEnv", {"url": 1}, "__init__"),
        ("adapters.textarena:TextArena", {"new_text_only": "no"}, "__init__"),
        ("adapters.verifiers_v1:VerifiersV1", {"taskset": "gsm8k"}, "play"),
    ],
)
def test_a_subclass_is_checked_as_its_base_is(
    tmp_path: Path, path: str, settings: dict[str, Any], own: str
) -> None:
    """But for one whose own method may read other settings. The adapters' packages are stubs."""
    stubs = "textarena", "openenv/core", "websockets/exceptions", "verifiers/v1/__init__"
    for stub in (*stubs, "verifiers/v1/utils/loaders"):
        (tmp_path / stub).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{stub}.py").write_text("def __getattr__(name):\n    return object\n")
    module, _, name = path.partition(":")
    (tmp_path / "mine.py").write_text(
        f"from bapo_megatron.environment.{module} import {name}\n"
        f"class Mine({name}):\n    word: int = 3\n    def close(self):\n        return super().close()\n"
        f"class Own(Mine):\n    def {own}(self, *given):\n        return super().{own}(*given)\n"
    )
    with pytest.raises(ConfigError, match=r"^environment\.settings\..*mine\.py:Mine takes "):
        read_traits(EnvironmentConfig(f"{tmp_path}/mine.py:Mine", settings))
    assert read_traits(EnvironmentConfig(f"{tmp_path}/mine.py:Own", settings)).settings_type is None


def test_a_wrong_name_is_answered_with_the_names_that_there_are(tmp_path: Path) -> None:
    """The most similar first; the path stands as it was written; imported and private names are left out."""
    file = tmp_path / "my_games.py"
    file.write_text(
        "from bapo_megatron.environment import Environment, Reply\n"
        "class Other: pass\nclass _Base(Environment): pass\n"
        "class Twenty(_Base):\n    def step(self, turn):\n        return Reply(None)\n"
    )
    told = r"^environment\.function=\S+/my_games\.py:Twentey: my_games has no class Twentey; "
    with pytest.raises(ConfigError, match=told + r"name one that it has: Twenty, Other$"):
        read_traits(EnvironmentConfig(f"{file}:Twentey"))


async def test_another_interpreter_sees_this_package_and_no_other_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").touch()
    (tmp_path / "elsewhere.py").write_text(
        f"import sys, beside_it\nassert {sysconfig.get_path('purelib')!r} not in sys.path\n"
        "from bapo_megatron.environment import Environment, Reply\n"
        "class Tool(Environment):\n    def step(self, turn):\n        return Reply(sys.executable)\n"
    )
    base = Path(sys.base_prefix) / "bin" / "python3"
    settings = replace(config(""), function=f"{tmp_path}/elsewhere.py:Tool")
    with pytest.raises(ConfigError, match="elsewhere failed with AssertionError"):
        read_traits(settings)

    async with playing(replace(settings, python=base)) as player:
        assert Path(str((await player.say("e", "a")).observation)).resolve() == base.resolve()


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "is not a program" in str(interpreter_problem(tmp_path / "python"))
    assert interpreter_problem(Path(sys.executable)) is None
    with pytest.raises(ConfigError, match="cannot be started"):
        read_traits(replace(config("Async"), python=tmp_path / "python"))


class Letters:
    """A tokenizer: one token a letter, but for one word."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [7] if text == "</call>" else [*text.encode()]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_a_stop_is_one_token_or_refused() -> None:
    traits = Traits("tool", ("</call>",), "replay", False, True)
    assert stop_ids(traits, Letters()) == (7,)
    with pytest.raises(ConfigError, match=r"stops has '</x>', which is 4 tokens"):
        stop_ids(replace(traits, stops=("</x>",)), Letters())
