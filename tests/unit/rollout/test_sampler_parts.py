"""Parts of the sampler: metrics, records, first scores, the dispatcher and what engines refuse."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config import RewardConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.pool import FailureReports, RewardResult
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.sampler import events
from bapo_megatron.rollout.sampler.dispatcher import AdmissionController, Dispatcher
from bapo_megatron.rollout.sampler.events import groups_opened, weights_loaded
from bapo_megatron.rollout.sampler.sampling_metrics import rollout_metrics
from bapo_megatron.rollout.sampler.state import GroupSummary, SamplerState
from bapo_megatron.rollout.sampler.write_ahead_log import Record, encode, read_records
from bapo_megatron.types import GenerateRequest, Generation, Prompt
from tests.support.accounts import check_accounts
from tests.support.sampling import EOS, PATIENCE, ScriptedEngine, StartsWithY, World, mixed, prompt_ids, until


def test_failed_scores_and_timeouts_are_counted() -> None:
    failures = [["time", "raised"], [], ["time", "time"]]
    scored = [GroupSummary(n, [1.0, 0.0], [3, 4], ["stop"] * 2, kinds) for n, kinds in enumerate(failures)]
    metrics = rollout_metrics(scored, RewardConfig())
    assert (metrics["reward/failures"], metrics["reward/timeouts"]) == (4, 3)
    assert metrics["reward/correct_fraction"] == 0.5


def test_a_mean_over_no_group_is_none() -> None:
    """Of a step without a scored group, and of a source that gave a step none: nobody solved anything."""
    metrics = rollout_metrics([], RewardConfig())
    means = {"reward/mean", "reward/correct_fraction", "reward/solved_none", "reward/solved_all"}
    means |= {"reward/failed_fraction", "rollout/truncated_fraction", "rollout/length_mean"}
    assert {name: metrics[name] for name in means} == dict.fromkeys(means)


async def test_segments_that_come_at_once_are_cut_into_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record counts its bytes in 32 bits: an abort of requests with routes brings more than that."""
    with pytest.raises(struct.error):
        encode(Record("segments", {}, {"routes": np.zeros(2**32, np.uint8)}))
    assert 2 * events.MOST_BYTES < 2**32

    async def batch_and_sizes(folder: Path) -> tuple[Any, list[int]]:
        world = World(folder, [ScriptedEngine(mixed)])
        async with world.sampling():
            found = await world.batch(1)
        (log,) = world.journal.glob("segments-*.log")
        records = [one for one in read_records(log) if isinstance(one, Record) and one.kind == "segments"]
        return prompt_ids(found), [len(one.fields["parts"]) for one in records]

    whole, sizes = await batch_and_sizes(tmp_path / "whole")
    assert max(sizes) > 2
    monkeypatch.setattr(events, "MOST_BYTES", 2 * 3 * 12)  # two segments of three tokens, of 12 bytes each
    cut, found = await batch_and_sizes(tmp_path / "cut")
    assert (cut, sum(found), max(found)) == (whole, sum(sizes), 2)


def refuse(request: GenerateRequest) -> None:
    if request.input_ids[0] == 1:
        raise ValueError("too long for the model")


async def test_a_dispatcher_is_busy_until_its_results_are_taken(tmp_path: Path) -> None:
    """Else a step would take what there is while the drop of a refused group is queued."""
    engine = ScriptedEngine(mixed)
    engine.trouble = refuse
    world = World(tmp_path, [engine])
    pool = EnginePool([engine], 4, lambda *_, **__: None, PATIENCE)
    await pool.update(Path("v0"), 0)
    state = SamplerState(world.dataset.prompts, 3)
    state.apply(weights_loaded(0, 0))
    state.apply(groups_opened([(0, 0, 0), (1, 0, 1)], 2))
    admission = AdmissionController(world.config.rollout, state)
    admission.open()
    dispatcher = Dispatcher(world.config, world.dataset, state, admission, pool, {})
    for number in (0, 1):
        dispatcher.add(state.open[number], 0)
        await dispatcher.send(at_once=True)
        await until(lambda: dispatcher.has_results and not dispatcher._running)
        assert dispatcher.is_busy
        segments, refusals = dispatcher.take_results()
        assert (len(segments), len(refusals), dispatcher.is_busy) == (1 - number, number, False)
    await pool.close()


async def test_a_group_that_every_engine_refuses_is_dropped_once(tmp_path: Path) -> None:
    """All three of its requests are refused; the next prompt takes its place."""
    engine = ScriptedEngine(mixed)
    engine.trouble = refuse
    world = World(tmp_path, [engine])
    async with world.sampling():
        assert prompt_ids(await world.batch(1)) == [0, 2, 3, 4]
    assert world.event_kinds().count("request_refused") == 1
    found = check_accounts(world.journal, world.journal, world.config.rollout, world.dataset.prompts)
    assert [group.end for group in found.groups[:5]] == ["trained", "refused", *["trained"] * 3]


BROKEN = RewardResult(0.0, "raised", "KeyError('x')", "Traceback ...\nKeyError: 'x'", "KeyError at r.py:3")


class FailsOn:
    """A reward whose scores fail on some prompts."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """The failure, or the score of the other reward."""
        if prompt.prompt_id in self.numbers:
            return BROKEN
        return await StartsWithY().score(prompt, response, tokens)


async def test_a_first_step_of_failed_scores_ends_the_run_and_is_rescored(tmp_path: Path) -> None:
    broken = World(tmp_path, [ScriptedEngine(mixed)], scorer=FailsOn(*range(12)))
    with pytest.raises(ConfigError, match=r"(?s)all 12 scores of the first step failed.*KeyError: 'x'"):
        async with broken.sampling():
            await broken.batch(1)
    [event] = [event for event in broken.events if event["kind"] == "reward_failed" if event["count"] == 1]
    assert event["traceback"] == BROKEN.traceback

    engine = ScriptedEngine(mixed)
    mended = World(tmp_path, [engine])
    async with mended.sampling():
        batch = await mended.batch(1)
    assert prompt_ids(batch) == [0, 1, 2, 3]
    assert not [request for request in engine.asked if request.input_ids[0] < 4], "sampled once more"
    assert batch.metrics["reward/failures"] == 0
    assert [one.reward for one in batch.groups[0].rollouts] == [1, 0, 0]


@pytest.mark.virtual_time
async def test_a_resumed_run_with_a_successful_score_skips_the_check(tmp_path: Path) -> None:
    engine = ScriptedEngine(mixed)
    engine.holds = lambda request: request.input_ids[0] > 0
    engine.gate.clear()
    killed = World(tmp_path, [engine])
    async with killed.sampling(rounds=False):
        await until(lambda: killed.sampler._state.finished)
        killed.kill()
    continued = World(tmp_path, [ScriptedEngine(mixed)], scorer=FailsOn(*range(12)))
    async with continued.sampling(rounds=False):
        assert await continued.sampler.next_batch(1, 60.0) is None  # they wait for a score
    assert "reward_outage" in continued.event_kinds()


def test_each_distinct_failure_is_reported_once_then_counted() -> None:
    events: list[dict[str, object]] = []
    reports = FailureReports(lambda kind, **fields: events.append({"kind": kind, **fields}))
    late = RewardResult(0.0, "time", "more than reward.time_limit_s=2")
    for result in [BROKEN] * 100 + [late] + [RewardResult(1.0)]:
        reports.note(result)
    told = [(event["failure"], event["count"], "traceback" in event) for event in events]
    assert told == [("raised", 1, True), ("raised", 10, False), ("raised", 100, False), ("time", 1, False)]


@pytest.mark.parametrize(
    ("error", "outcome"), [(OSError(24, "too many open files"), "failed"), (RuntimeError("a bug"), "raised")]
)
async def test_a_scorer_that_raises_is_reported(tmp_path: Path, error: Exception, outcome: str) -> None:
    class Broken:
        async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
            if prompt.prompt_id == 1:
                raise error
            return RewardResult(float(response.startswith("y")))

    world = World(tmp_path, [ScriptedEngine(mixed)], scorer=Broken())
    async with world.sampling():
        if outcome == "raised":
            with pytest.raises(RuntimeError, match="a bug"):
                await world.batch(1)
            return
        assert prompt_ids(await world.batch(1)) == [0, 2, 3, 4]  # all rewards of prompt 1 are equal
        [event] = [event for event in world.events if event["kind"] == "reward_failed"]
        assert event == {"kind": "reward_failed", "failure": "died", "detail": str(error), "count": 1}


async def test_a_request_that_crashes_engines_is_dropped(tmp_path: Path) -> None:
    engine = ScriptedEngine(mixed)

    def poison(request: GenerateRequest) -> None:
        if request.input_ids[0] == 1:
            raise RuntimeError("the server has died")

    engine.trouble = poison
    world = World(tmp_path, [engine])
    async with world.sampling() as sampler:
        batch = await world.batch(1, wait_s=60)
        assert not sampler._dispatcher._losses  # of the others that were in flight: a month has many
    assert prompt_ids(batch) == [0, 2, 3, 4]
    refused = next(event for event in world.events if event["kind"] == "request_refused")
    assert "20 engines were lost with request" in refused["detail"]


@pytest.mark.parametrize("text", ["y", "yaaaa"])
async def test_an_abort_at_the_stop_token_completes_the_response(tmp_path: Path, text: str) -> None:
    """The end of sequence, or the limit of six, with finish reason abort: the response is whole."""
    engine = ScriptedEngine(lambda prompt, sample: text if sample == 0 else "naaaaaaaa")
    answer = engine._answer

    def aborted(request: GenerateRequest, _aborted: bool) -> Generation:
        return dataclasses.replace(answer(request, aborted=False), finish_reason="abort")

    engine._answer = aborted  # type: ignore[method-assign]
    world = World(tmp_path, [engine])
    async with world.sampling():
        batch = await world.batch(1)
    first, second, _ = batch.groups[0].rollouts
    assert first.token_ids_R.tolist() == [*map(ord, text), EOS]
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert len(second.token_ids_R) == 6
