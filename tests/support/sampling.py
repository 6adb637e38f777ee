"""A sampler in one event loop, on scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.config import (
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from bapo_megatron.interfaces import Confirm
from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.pool_state import EngineTimeouts
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.group_sampler import GroupSampler
from bapo_megatron.rollout.sampler.scoring import Scorer
from bapo_megatron.rollout.sampler.step_batches import read_step
from bapo_megatron.rollout.sampler.turns import Environments
from bapo_megatron.types import FinishReason, GenerateRequest, Generation, Prompt, StepBatch

EOS = 3
Answer = Callable[[int, int], str]
"""From the prompt's number and the sample's number to the text of the response."""

PATIENCE = EngineTimeouts(heartbeat_s=0.02, silent_s=0.1, abort_s=1.0, update_s=1.0)


class Letters:
    """One token a character."""

    eos_token_id = EOS

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text without EOS."""
        return "".join(chr(token) for token in ids if token != EOS)


class ScriptedEngine:
    """Prompt ``n`` is the token ``n``; the response is ``answer(n, sample)`` and EOS.

    A token's log-prob encodes its position: -(place + 1) / 100.
    """

    def __init__(self, answer: Answer, name: str = "scripted") -> None:
        self.name = name
        self.answer = answer
        self.version = 0
        self.asked: list[GenerateRequest] = []
        self.folders: list[Path] = []
        self.ready = True
        self.trouble: Callable[[GenerateRequest], None] | None = None
        """Called before each answer; may raise."""
        self.told_version: int | None = None
        """The version that it claims to have, if that is not the truth."""
        self.digest: str | None = None
        """The digest of its weights, if they are not those of the folder."""
        self.gate = asyncio.Event()
        """Answers wait for it, if ``holds`` says so."""
        self.gate.set()
        self.holds: Callable[[GenerateRequest], bool] = lambda _request: True
        self.aborting: asyncio.Event = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request)
        if self.trouble:
            self.trouble(request)
        if not self.holds(request):
            return self._answer(request, aborted=False)
        waiting = [asyncio.ensure_future(event.wait()) for event in (self.gate, self.aborting)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        await asyncio.sleep(0)
        return self._answer(request, self.aborting.is_set() and not self.gate.is_set())

    def _answer(self, request: GenerateRequest, aborted: bool) -> Generation:
        sample, start = int(request.request_id.split("-")[1]), request.prefix_tokens
        prompt = int(request.input_ids[0])
        whole = [*map(ord, self.answer(prompt, sample)), EOS]
        assert request.input_ids[1:].tolist() == whole[:start], "a response continues from another prefix"
        most = 1 if aborted else request.params.max_new_tokens
        ids = whole[start : start + most]
        reason: FinishReason = "stop" if ids[-1] == EOS else ("abort" if aborted else "length")
        places = np.arange(start, start + len(ids))
        return Generation(
            request_id=request.request_id,
            token_ids_R=np.array(ids, np.int32),
            log_probs_R=(-(places + 1) / 100).astype(np.float32),
            versions_R=np.full(len(ids), self.version, np.int32),
            finish_reason=reason,
        )

    async def abort(self) -> None:
        self.aborting.set()
        await asyncio.sleep(0.01)
        self.aborting = asyncio.Event()

    async def load(self, folder: Path, version: int, confirm: Confirm) -> None:
        self.folders.append(folder)
        await confirm(self.digest or folder.name)
        self.version = version

    async def weight_version(self) -> int:
        return self.version if self.told_version is None else self.told_version

    async def is_alive(self) -> bool:
        return self.ready

    async def close(self) -> None: ...


class StartsWithY:
    """A reward of 1 for responses that begin with a y."""

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """In the next turn of the loop."""
        await asyncio.sleep(0)
        reward = 1.0 if response.startswith("y") else 0.0
        return RewardResult(reward, score=reward)


class World:
    """A run directory, engines, and samplers on them, one after the other."""

    def __init__(
        self,
        folder: Path,
        engines: Sequence[ScriptedEngine],
        prompts: int = 12,
        scorer: Any = None,
        environment: EnvironmentConfig | None = None,
        advantage: str = "grpo",
        **rollout: Any,
    ) -> None:
        settings = {"prompts_per_step": 4, "group_size": 3, "max_response_tokens": 6, **rollout}
        self.config = RunConfig(
            name="test",
            model=ModelConfig(Path("/nowhere")),
            data=DataConfig(Path("/nowhere"), shuffle=False),
            rollout=RolloutConfig(**settings),
            environment=environment or EnvironmentConfig(),
            algorithm=AlgorithmConfig(advantage=advantage),
            run_dir=folder,
            seed=1,
        )
        self.config.check()
        self.journal = folder / "journal"
        self.engines = engines
        self.score = scorer or StartsWithY()
        made = [Prompt(n, np.array([n], np.int32), "", "test") for n in range(prompts)]
        self.dataset = Dataset(made, Letters(), (EOS,))
        self.environments: Environments = {}
        self.events: list[dict[str, Any]] = []
        self.sampler: GroupSampler
        self.pool: EnginePool
        self.version_of: Callable[[int], int] = lambda step: step
        """The version that a step makes: one without groups makes none."""

    def event_kinds(self) -> list[str]:
        """What was reported, in order."""
        return [event["kind"] for event in self.events]

    @property
    def scorer(self) -> Scorer:
        return Scorer(self.score, self.config.reward.failed, self._note)

    @asynccontextmanager
    async def sampling(
        self,
        first_step: int = 1,
        state: dict[str, Any] | None = None,
        most: int = 100,
        rounds: bool = True,
        is_held: Callable[[], bool] = lambda: False,
        prefix_cache: bool = False,
        kind: type[EnginePool] = EnginePool,
        teacher: Any = None,
    ) -> AsyncIterator[GroupSampler]:
        """A sampler with the weights of step ``first_step - 1``."""
        self._others = asyncio.all_tasks()
        self.pool = kind(self.engines, most, self._note, PATIENCE, prefix_cache)
        self.sampler = GroupSampler(
            self.config,
            self.dataset,
            self.pool,
            self.scorer,
            self._note,
            rounds,
            is_held,
            self.environments,
            teacher,
        )
        try:
            await self.sampler.start(first_step, state)
            await self.weights(first_step - 1)
            yield self.sampler
            await self.sampler.close()
        finally:
            self.kill()

    def kill(self) -> None:
        """End the sampler as a signal would: nothing more is written."""
        journal = self.sampler._journal
        if not journal._lock.closed:
            journal.commit = lambda _: None  # type: ignore[method-assign]
            journal.close()
        for task in asyncio.all_tasks() - self._others:
            task.cancel()

    async def weights(self, step: int) -> None:
        """The weights that ``step`` has made."""
        version = self.version_of(step)
        await self.sampler.load_weights(Path(f"v{version}"), version, step)

    async def batch(self, step: int, wait_s: float = 30.0) -> StepBatch:
        """The groups of a step."""
        path = await self.sampler.next_batch(step, wait_s)
        assert path is not None, "no batch"
        return read_step(path.parent, step)

    async def train(self, step: int) -> StepBatch:
        """A whole step: its groups, then its weights."""
        batch = await self.batch(step)
        await self.weights(step)
        return batch

    def _note(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def prompt_ids(batch: StepBatch) -> list[int]:
    return [group.prompt.prompt_id for group in batch.groups]


def mixed(_prompt: int, sample: int) -> str:
    """Every group has right and wrong responses."""
    return "y" if sample == 0 else "no"


def uniform_on(*numbers: int) -> Answer:
    """All wrong on these prompts, mixed on the others."""
    return lambda prompt, sample: "no" if prompt in numbers else mixed(prompt, sample)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what happens in the background."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)
