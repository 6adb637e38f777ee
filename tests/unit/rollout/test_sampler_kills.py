"""A sampler that is killed, or dies at every write, and damaged journals: nothing is lost or run twice."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.rollout.sampler import write_ahead_log
from bapo_megatron.rollout.sampler.held_out import HeldOut
from bapo_megatron.rollout.sampler.process import Service
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.rollout.sampler.step_batches import step_groups, steps_in
from bapo_megatron.rollout.sampler.write_ahead_log import Record, read_records
from tests.support import accounts
from tests.support.audit import Audit
from tests.support.mortal import WAYS, MortalRun
from tests.support.sampling import ScriptedEngine, World, mixed, prompt_ids, until
from tests.support.tiers import slow_but
from tests.support.virtual_time import run_virtually

pytestmark = pytest.mark.integration

SETTINGS = {"prompts_per_step": 3, "group_size": 2, "max_response_tokens": 12, "segment_tokens": 2}


def answer(prompt: int, sample: int) -> str:
    """Lengths from 1 to 12; one group in four is uniform."""
    return ("y" if sample == 0 and prompt % 4 else "n") + "abcdefghijk"[: (prompt * 7 + sample * 3) % 11]


def state_of(world: World) -> SamplerState:
    """The sampler's state that the journal replays."""
    return accounts.state_of(world.journal, world.dataset.prompts, world.config.rollout.group_size)


def flip(path: Path, at: int) -> None:
    """Damage a byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def batch_record(world: World, step: int) -> tuple[Path, int]:
    """The log with the record of a step's batch, and its offset."""
    for path in sorted(world.journal.glob("segments-*.log")):
        for one in read_records(path):
            if isinstance(one, Record) and one.kind == "batch" and one.fields["step"] == step:
                return path, one.offset
    raise AssertionError(f"no record of step {step}")


async def killed_at(tokens: int, folder: Path) -> tuple[World, ScriptedEngine]:
    """A world that is killed when each response has so many tokens."""
    engine = ScriptedEngine(lambda prompt, sample: "yabcde" if sample else "nabcde")
    engine.holds = lambda request: request.prefix_tokens >= tokens
    engine.gate.clear()
    world = World(folder, [engine], **SETTINGS)
    async with world.sampling(rounds=False):
        await until(lambda: world.sampler.state()["tokens"].get("sampled") == 3 * 2 * tokens)
        world.kill()
    return world, engine


async def test_damage_is_reported_with_its_offset_and_costs_only_its_record(tmp_path: Path) -> None:
    world, engine = await killed_at(6, tmp_path)
    (path,) = world.journal.glob("segments-*.log")
    found = [r for r in read_records(path) if isinstance(r, Record) and r.kind == "segments"]
    second = next(r for r in found if any(part[4] == 2 for part in r.fields["parts"]))
    flip(path, second.offset + 200)
    engine.gate.set()
    engine.asked.clear()
    async with world.sampling():
        batch = await world.batch(1)
    (event,) = [event for event in world.events if event["kind"] == "journal_damaged"]
    assert f"at offset {second.offset} are damaged" in event["detail"]
    assert min(request.prefix_tokens for request in engine.asked) == 2  # from before the hole
    assert prompt_ids(batch) == [0, 1, 2], "a response that continues behind the hole is refused"
    assert [len(r.token_ids_R) for group in batch.groups for r in group.rollouts] == [7] * 6


@pytest.mark.parametrize("record", ["in the journal", "lost with a kill"])
async def test_the_tokens_of_a_damaged_step_are_not_counted_as_trained(tmp_path: Path, record: str) -> None:
    """The header is readable, so the step counts as served until its batch is read."""
    world = World(tmp_path, [ScriptedEngine(answer)], prompts=40, **SETTINGS)
    async with world.sampling():
        for step in (1, 2, 3):
            await world.train(step)
        world.kill()
    if record == "lost with a kill":
        os.truncate(*batch_record(world, 2))
    path = world.journal / "step_000002.npz"
    flip(path, path.read_bytes().index(b"token_ids.npy") + 150)
    async with world.sampling(first_step=2):
        for step in (2, 3):
            metrics = (await world.train(step)).metrics
    assert sorted(path.name for path in world.journal.glob("*.lost"))[0] == "step_000002.lost"
    found = state_of(world)
    dropped = sum(count for kind, count in found.tokens.items() if kind.startswith("dropped_"))
    assert found.tokens["sampled"] == found.tokens["trained"] + dropped + found.outstanding_tokens
    assert found.tokens["dropped_lost"] > 0
    assert metrics["sampler/tokens_trained"] == found.tokens["trained"]
    assert metrics["sampler/tokens_dropped"] == dropped


async def test_a_start_opens_no_step_file_whose_record_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run keeps a thousand, most of which are older than the first log."""
    world = World(tmp_path, [ScriptedEngine(answer)], prompts=80, **SETTINGS)
    async with world.sampling():
        for step in range(1, 7):
            await world.train(step)
            if step == 3:
                await world.sampler.checkpointed(3)
        world.kill()
    monkeypatch.setattr("bapo_megatron.rollout.sampler.step_batches.step_groups", None)
    async with world.sampling(first_step=7):
        pass


async def test_old_step_files_and_held_out_results_are_deleted_unless_they_are_needed(tmp_path: Path) -> None:
    """A resume needs the steps since the checkpoint. The trainer may still read the last results."""
    world = World(tmp_path, [ScriptedEngine(answer)], prompts=40, keep_steps=3, **SETTINGS)
    (results := tmp_path / "evaluation").mkdir()
    async with world.sampling():
        held_out = HeldOut(world.config, (), world.dataset, world.pool, world.scorer)
        service = Service(world.sampler, world.pool, held_out, [], "disk")
        for step in range(1, 9):
            await world.train(step)
            (results / f"step_{step:06d}.jsonl").touch()
            if step == 2:
                (world.journal / "step_000001.npz").rename(world.journal / "step_000001.lost")
            if step == 6:
                assert await service.answer("checkpointed", (2,)) == ("ok", None, [])
                assert steps_in(world.journal) == [3, 4, 5, 6]
                assert not list(world.journal.glob("*.lost"))
        await service.answer("checkpointed", (8,))
    assert steps_in(world.journal) == [6, 7, 8]
    assert sorted(path.name for path in results.iterdir()) == [f"step_{n:06d}.jsonl" for n in (5, 6, 7, 8)]
    world.engines[0].asked.clear()
    async with world.sampling(first_step=7):
        for step in (7, 8):
            await world.train(step)
    assert world.engines[0].asked == []  # they were given what they had
    assert "step_lost" not in world.event_kinds()


async def test_a_disk_that_hangs_does_not_stop_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without a heartbeat for five minutes is killed; one that waits for its disk waits on."""
    monkeypatch.setattr(write_ahead_log, "FILE_BYTES", 2000)
    world = World(tmp_path, [ScriptedEngine(answer)], prompts=40, **SETTINGS)
    fsync, threads = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda file: (threads.append(threading.current_thread()), fsync(file)))
    async with world.sampling():
        for step in (1, 2, 3):
            await world.train(step)
            await world.sampler.checkpointed(step)
        logs = [path.name for path in world.journal.glob("segments-*.log")]
    assert logs > ["segments-000005.log"], "none was full"
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("rounds", [True, False])
async def test_a_closed_sampler_keeps_the_tokens_of_requests_in_flight(tmp_path: Path, rounds: bool) -> None:
    """In rounds they are not kept: a continued round would differ in its last bits."""
    engine = ScriptedEngine(lambda prompt, sample: "yabcde" if sample else "nabcde")
    engine.gate.clear()
    world = World(tmp_path, [engine], **{**SETTINGS, "segment_tokens": None})
    async with world.sampling(rounds=rounds):
        asked = asyncio.create_task(world.batch(1))
        await until(lambda: len(engine.asked) == 3 * 2)
        asked.cancel()
    assert state_of(world).tokens["sampled"] == (0 if rounds else 3 * 2)  # one token each
    engine.gate.set()
    engine.asked.clear()
    async with world.sampling(rounds=rounds):
        batch = await world.batch(1)
    assert {request.prefix_tokens for request in engine.asked} == {0 if rounds else 1}
    assert [len(r.token_ids_R) for group in batch.groups for r in group.rollouts] == [7] * 6


STEPS = 6

RULES = [
    {
        "on_stale": on_stale,
        "max_staleness": staleness,
        "budget_tokens": (4 if staleness else 12) if budget else None,
        "drop_uniform_groups": dynamic,
    }
    for on_stale, staleness, budget, dynamic in product(
        ("resample", "drop", "train"), (0, 2), (True, False), (True, False)
    )
]


@pytest.mark.parametrize(
    "rules", slow_but(RULES, *RULES[::5]), ids=lambda rules: "-".join(map(str, rules.values()))
)
def test_crashes_at_random_writes_train_nothing_twice(
    tmp_path: Path, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sampler after the other dies, in every way, while engines come and go and weights arrive."""
    chance = np.random.default_rng(RULES.index(rules))

    async def check() -> None:
        run = MortalRun(tmp_path, chance, monkeypatch, **rules)
        for _ in range(3):
            for way in chance.permutation(WAYS):
                await run.live(STEPS, int(chance.integers(0, 25)), way)
                run.check()
        assert await run.live(STEPS, None)
        run.check()

    run_virtually(check(), chance, monkeypatch)


@pytest.mark.parametrize("turn", range(2))
def test_a_crash_at_every_write_trains_nothing_twice(
    tmp_path: Path, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash at each write of four steps; the next sampler survives. Together they cover all hard cases."""
    chance = np.random.default_rng(2 * turn)
    seen: Counter[str] = Counter()

    async def check() -> None:
        for deadly in count():
            rules = {"max_staleness": 2, "budget_tokens": 4, "prompts": 30}
            run = MortalRun(tmp_path / f"{deadly}", chance, monkeypatch, **rules)
            if await run.live(4, deadly, WAYS[(deadly + 2 * turn) % len(WAYS)]):
                break
            assert await run.live(4, None)
            note_what_was_hard(run.check(), run, seen)
        assert deadly > 30

    run_virtually(check(), chance, monkeypatch)
    # Seldom: of the groups that newer weights have begun, older ones continue with the first alone.
    seldom = {"older weights again"} if turn == 0 else set()
    assert all(seen[name] for name in seen.keys() - seldom), seen


def note_what_was_hard(found: Audit, run: MortalRun, seen: Counter[str]) -> None:
    """Checks that the runs cover all hard cases: else the tests above would be empty."""
    responses = [response for group in found.groups for response in group.responses]
    seen["engine lost"] += run.world.event_kinds().count("engine_lost")
    seen["uniform"] += sum(group.end == "uniform" for group in found.groups)
    seen["resampled"] += sum(len(groups) > 1 for groups in found.begun.values())
    seen["two versions"] += sum(len(set(response.versions)) > 1 for response in responses)
    seen["older weights again"] += sum(one.versions != sorted(one.versions) for one in responses)
    seen["logs deleted"] += len([*run.kept.iterdir()]) > len([*run.world.journal.glob("*.log")])


async def test_an_always_stale_prompt_is_dropped_after_retries(tmp_path: Path) -> None:
    engine = ScriptedEngine(mixed)
    engine.holds = lambda request: request.input_ids[0] == 0 and request.prefix_tokens > 0
    engine.gate.clear()
    world = World(tmp_path, [engine], max_staleness=1, prompts=1000, segment_tokens=1)
    async with world.sampling(rounds=False):
        for step in range(1, 16):
            assert len((await world.train(step)).groups) == 4
        begun = {request.request_id.split("-")[0] for request in engine.asked if request.input_ids[0] == 0}
        assert len(begun) == 1 + 3


async def test_a_lost_record_of_a_step_does_not_train_its_groups_twice(tmp_path: Path) -> None:
    world = World(tmp_path, [ScriptedEngine(mixed)], max_staleness=3, prompts=1000)
    async with world.sampling(rounds=False):
        for step in (1, 2, 3):
            await world.train(step)
        world.kill()
    path, at = batch_record(world, 2)
    flip(path, at + 40)
    async with world.sampling(first_step=4, rounds=False):
        await world.train(4)
        await world.train(5)
    numbers = [number for step in steps_in(world.journal) for number in step_groups(world.journal, step)]
    assert sorted(numbers) == list(range(20))
