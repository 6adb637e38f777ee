"""Episodes in worker processes: held, brought back, hung, raised; a fault costs its own episode."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.sources import EnvironmentConfig
from bapo_megatron.environment import Task, Turn
from bapo_megatron.environment import pool as pools
from bapo_megatron.environment.pool import EnvironmentPool, Question, StepResult, read_traits
from bapo_megatron.environment.worker import Episodes
from bapo_megatron.errors import ConfigError
from tests.support.environments import Dice

pytestmark = pytest.mark.integration

LONG_S = 300.0


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
        ("stop iteration", "raised", "StopIteration"),
        ("no reply", "raised", "step returned str: return a Reply"),
        ("surrogate", "raised", "surrogates not allowed"),
        ("long", "raised", "5242880 characters; at most 4194304 may be"),
        ("note", "raised", "Reply.note has 71682 bytes as JSON"),
        ("nested note", "raised", "Reply.note has more than 100 lists and objects within each other"),
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


async def test_an_object_is_restored_from_its_history(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with playing(config("Restored", settings={"log": str(log)})) as player:
        await player.say("e", "a")
        await player.say("e", "b")
        os.kill(player.processes()[0], signal.SIGKILL)
        assert (await player.say("e", "c")).observation == "3:c"
    before = ["e made", "e step a", "e step b"]
    assert lines(log) == [*before, "e made", "e restored ['a', '1:a', 'b', '2:b']", "e step c"]


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
    for name, turn in (("over", "end"), ("failed", "fail"), ("open", "roll")):
        task = {"messages": [], "episode": name}
        with suppress(ValueError):
            await episodes.resume({"task": task, "turns": [["sampled", turn]], "note": None})
    kept.append(set(episodes._random._states))
    await episodes.step({"episode": "open", "replies": 1, "turn": ["end"]})
    assert [*kept, set(episodes._random._states)] == [{"open"}, set()]


async def test_an_object_that_is_made_anew_draws_anew() -> None:
    """Also if the worker still has the former one."""
    episodes = Episodes(Dice, {})
    asked = {"task": {"messages": [], "episode": "e"}, "turns": [["sampled", "roll"]], "note": None}
    drawn = [(await episodes.resume(asked))["observation"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    await episodes.close("e")
    assert not episodes._random._states


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
