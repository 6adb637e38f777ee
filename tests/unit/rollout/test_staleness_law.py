"""Mean staleness of the asynchronous sampler against its closed form, in virtual time.

Count at each update of the weights the groups that are open, queued or in training: N. Each of them becomes
one update older by it, and a group of the step that ends is the last time among them. With B groups a step

    mean(lag + 1) = mean(N) / B        (Little's law),   so   mean lag = (in flight + queued) / B,

whatever the lengths of responses, their tail, and the order of the queue. Admission holds N at (S + 1) B,
S = ``max_staleness``, where it binds: then the mean lag is S, at any speed of training and sampling.

Also which of the open groups a step gets: those that end first, so the first steps have short responses.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.types import GenerateRequest, Generation, StepBatch
from tests.support.sampling import ScriptedEngine, World, mixed
from tests.support.virtual_time import run_virtually

B, STEPS, WARM = 4, 24, 6
"""Groups of a step; steps of a run, and those before the counts begin."""


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
        return max(self._duration_s(prompt, sample) for sample in range(3))

    def _duration_s(self, prompt: int, sample: int) -> float:
        """Lognormal with ``mean_s``; ``tail`` is its sigma."""
        random = np.random.default_rng([prompt, sample])
        return float(self._mean_s * np.exp(self._tail * random.standard_normal() - self._tail**2 / 2))


async def staleness(
    folder: Path, ahead: int, train_s: float, sample_s: float, tail: float
) -> tuple[float, list[int]]:
    """Mean lag of the trained groups, and N at each update, of the steps after ``WARM``."""
    engine = TimedEngine(sample_s, tail)
    settings = {"prompts_per_step": B, "max_staleness": ahead, "on_stale": "train"}
    world = World(folder, [engine], prompts=1000, **settings)
    lags: list[int] = []
    counts: list[int] = []
    trained = 0
    async with world.sampling(rounds=False):
        for step in range(1, STEPS + 1):
            batch = await world.batch(step, wait_s=1000)
            await asyncio.sleep(train_s)
            if step > WARM:
                lags += lags_of(batch, step)
                counts.append(len(engine.begun) - trained)
            trained += len(batch.groups)
            await world.weights(step)
    return float(np.mean(lags)), counts


def lags_of(batch: StepBatch, step: int) -> list[int]:
    """Updates between the weights of a group's first token and those that the step trains."""
    oldest = [min(int(one.versions_R.min()) for one in group.rollouts) for group in batch.groups]
    return [step - 1 - version for version in oldest]


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize(
    ("train_s", "sample_s", "tail"),
    [(1.0, 0.05, 0.0), (1.0, 0.3, 1.0), (0.1, 1.0, 0.0), (0.1, 1.0, 1.2)],
    ids=["training waits never", "a tail", "sampling is the bottleneck", "and has a tail"],
)
def test_the_mean_lag_is_that_of_littles_law(
    ahead: int, train_s: float, sample_s: float, tail: float, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run = staleness(tmp_path, ahead, train_s, sample_s, tail)
        lag, counts = run_virtually(run, None, patch)
    assert max(counts) <= (ahead + 1) * B
    assert lag == pytest.approx(np.mean(counts) / B - 1, abs=0.3)
    assert lag == pytest.approx(ahead, abs=0.3)  # admission binds, so the closed form is S


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


def test_synchronous_steps_favour_no_length(tmp_path: Path) -> None:
    """Every prompt that was asked is trained on, in its step, however long its responses take."""
    with pytest.MonkeyPatch.context() as patch:
        found, engine = run_virtually(prompts_by_step(tmp_path, 0, "resample"), None, patch)
    assert sorted(chain.from_iterable(found)) == sorted(engine.begun)
    assert len(engine.begun) == STEPS * B


def test_the_first_asynchronous_step_has_the_groups_that_end_first(tmp_path: Path) -> None:
    """Of (S + 1) B that are open. The others come later, where ``on_stale`` throws none away."""
    with pytest.MonkeyPatch.context() as patch:
        found, engine = run_virtually(prompts_by_step(tmp_path, 3, "train"), None, patch)
    opened = sorted(engine.begun)[: 4 * B]  # in the order of the file
    fastest = sorted(opened, key=engine.group_s)[:B]
    assert sorted(found[0]) == sorted(fastest)
    assert set(opened) <= set(chain.from_iterable(found))
