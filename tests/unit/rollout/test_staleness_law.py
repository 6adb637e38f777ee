"""Mean staleness of the asynchronous sampler against its closed forms, in virtual time.

Little's law, exact: count at each update of the weights the groups that are begun, queued or in training: N.
Each becomes one update older by it, and a group of the step that ends is the last time among them, so

    mean(lag + 1) = mean(N) / (groups of a step),   whatever the lengths and the order of the queue.

N is predicted by the formula of Applied Compute ("Predicting and Controlling Staleness in Fully Asynchronous
RL Training", July 2026). C: responses that engines sample at once; B: those of a step; M: the mean longest
response of a group over the mean response; rho: the rate of sampling over that of training, if neither waits:

    rho < 1:  C M / B + rho        rho > 1:  C M / (rho B) + (2 q + rho - 1) / (2 rho),   q = queue / B.

Beyond its queue theirs throws the oldest groups away. Here admission holds N at S + 1 steps' worth, S =
``max_staleness``: engines wait until rho is 1, and q is what S leaves, S - C M / B. Then the formula is S.

Also which of the open groups a step gets: those that end first, so the first steps have short responses.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.types import GenerateRequest, Generation
from tests.support.sampling import ScriptedEngine, World, mixed

pytestmark = pytest.mark.virtual_time

B, STEPS, GROUP = 4, 24, 3
"""Groups of a step, steps of a run, responses of a group."""

WARM, LONG = 6, 54
"""Steps before the counts begin, and all, of a run that is counted."""


class TimedEngine(ScriptedEngine):
    """An engine whose responses take their time, also over updates of the weights."""

    def __init__(self, mean_s: float, tail: float) -> None:
        super().__init__(mixed)
        self._mean_s, self._tail = mean_s, tail
        self.begun: set[int] = set()
        """Prompts of which a token was asked for."""

    async def generate(self, request: GenerateRequest) -> Generation:
        key = int(request.input_ids[0]), int(request.request_id.split("-")[1])
        self.begun.add(key[0])
        first_version = self.version
        await asyncio.sleep(self._duration_s(*key))
        answered = self._answer(request, aborted=False)
        answered.versions_R[0] = first_version  # its other tokens have those of the weights that came since
        return answered

    def group_s(self, prompt: int) -> float:
        """Seconds until the last response to a prompt ends."""
        return max(self._durations_s(prompt))

    def lengths(self, prompts: int) -> tuple[float, float]:
        """Mean seconds of a response, and M, of some prompts."""
        mean_s = float(np.mean([self._durations_s(prompt) for prompt in range(prompts)]))
        return mean_s, float(np.mean([self.group_s(prompt) for prompt in range(prompts)])) / mean_s

    def _durations_s(self, prompt: int) -> list[float]:
        return [self._duration_s(prompt, sample) for sample in range(GROUP)]

    def _duration_s(self, prompt: int, sample: int) -> float:
        """Lognormal with ``mean_s``; ``tail`` is its sigma."""
        random = np.random.default_rng([prompt, sample])
        return float(self._mean_s * np.exp(self._tail * random.standard_normal() - self._tail**2 / 2))


async def staleness(
    folder: Path, engine: TimedEngine, ahead: int, groups: int, places: int, train_s: float
) -> tuple[float, float, list[int]]:
    """Mean lag of the trained groups, the part of it after their last token, and N at each update."""
    settings = {"prompts_per_step": groups, "max_staleness": ahead, "on_stale": "train"}
    world = World(folder, [engine], prompts=1000, **settings)
    lags: list[int] = []
    waits: list[int] = []
    counts: list[int] = []
    async with world.sampling(most=places, rounds=False):
        for step in range(1, LONG + 1):
            batch = await world.batch(step, wait_s=1000)
            await asyncio.sleep(train_s)
            if step > WARM:
                versions = [[one.versions_R for one in group.rollouts] for group in batch.groups]
                lags += [step - 1 - min(int(one.min()) for one in group) for group in versions]
                waits += [step - 1 - max(int(one.max()) for one in group) for group in versions]
                counts.append(len(engine.begun) - (step - 1) * groups)
            await world.weights(step)
    return float(np.mean(lags)), float(np.mean(waits)), counts


@pytest.mark.parametrize(
    ("ahead", "places", "groups", "rho", "tail"),
    [
        pytest.param(12, 24, 8, 0.8, 1.2, id="engines are the bottleneck"),
        pytest.param(12, 12, 8, 0.8, 1.2, id="fewer places"),
        pytest.param(1, 24, 4, 0.4, 1.2, id="admission binds before the engines"),
        pytest.param(1, 24, 4, 2.0, 0.3, id="training is the bottleneck"),
        pytest.param(3, 12, 4, 2.0, 1.2, id="and groups queue"),
    ],
)
async def test_the_mean_lag_is_that_of_the_closed_forms(
    ahead: int, places: int, groups: int, rho: float, tail: float, tmp_path: Path
) -> None:
    """Without its term of the queue, or without M, the formula is off by 0.26 to 1.2 where engines bind."""
    engine = TimedEngine(0.05, tail)
    mean_s, longest = engine.lengths(LONG * groups)
    in_flight = places * longest / (groups * GROUP)
    train_s = rho * groups * GROUP * mean_s / places
    lag, waited, counts = await staleness(tmp_path, engine, ahead, groups, places, train_s)
    assert max(counts) <= (ahead + 1) * groups
    assert lag == pytest.approx(np.mean(counts) / groups - 1, abs=0.15)
    assert lag == pytest.approx(min(in_flight + rho, ahead) if rho < 1 else ahead, abs=0.15)
    if rho < 1 and in_flight + rho < ahead:
        assert waited == pytest.approx(rho, abs=0.15)


async def prompts_by_step(folder: Path, ahead: int, on_stale: str) -> tuple[list[list[int]], TimedEngine]:
    """Prompts that each step trains on; training is as fast as a tenth of a response."""
    engine = TimedEngine(1.0, 1.2)
    settings = {"prompts_per_step": B, "max_staleness": ahead, "on_stale": on_stale}
    world = World(folder, [engine], prompts=1000, **settings)
    found = []
    async with world.sampling(rounds=False):
        for step in range(1, STEPS + 1):
            batch = await world.batch(step, wait_s=1000)
            found.append([int(group.prompt.token_ids_P[0]) for group in batch.groups])
            await asyncio.sleep(0.1)
            await world.weights(step)
    return found, engine


async def test_synchronous_steps_favour_no_length(tmp_path: Path) -> None:
    """Every prompt that was asked is trained on, in its step, however long its responses take."""
    found, engine = await prompts_by_step(tmp_path, 0, "resample")
    assert sorted(chain.from_iterable(found)) == sorted(engine.begun)
    assert len(engine.begun) == STEPS * B


async def test_the_first_asynchronous_step_has_the_groups_that_end_first(tmp_path: Path) -> None:
    """Of (S + 1) B that are open. The others come later, where ``on_stale`` throws none away."""
    found, engine = await prompts_by_step(tmp_path, 3, "train")
    opened = sorted(engine.begun)[: 4 * B]  # in the order of the file
    fastest = sorted(opened, key=engine.group_s)[:B]
    assert sorted(found[0]) == sorted(fastest)
    assert set(opened) <= set(chain.from_iterable(found))
