"""Scheduler of environment steps: asks environments to answer the model's turns, and collects their answers.

The counterpart of ``dispatcher.py``: a response occupies no engine while its environment works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bapo_megatron.config import RunConfig
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.events import Given
from bapo_megatron.rollout.sampler.state import OpenGroup, SamplerState
from bapo_megatron.rollout.sampler.turns import Environments, TurnTaker, turn_takers

Restart = tuple[OpenGroup, int, str]
"""A response to be sampled anew because its environment cannot be restored: group, position, reason."""


class Stepper:
    """Scheduler of environment steps for ``SamplerLoop``: ``add`` starts the step of a waiting response;
    ``take_results`` returns answers and restarts, which count only once they are in the write-ahead log."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        sampler_state: SamplerState,
        environments: Environments,
        changed: Callable[[], None],
    ) -> None:
        """``changed``: called after each step."""
        most = config.rollout.max_response_tokens
        self._turns = turn_takers(environments, dataset, most)
        self._dataset, self._state, self._changed = dataset, sampler_state, changed
        self._group_size = config.rollout.group_size
        self._running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._episodes: dict[tuple[int, int], tuple[str, TurnTaker]] = {}
        """Names and turn takers of episodes whose environment may hold an object."""
        self._answers: list[Given] = []
        self._restarts: list[Restart] = []
        self._error: BaseException | None = None  # a step's exception, a bug in this program

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self.has_results)

    @property
    def has_results(self) -> bool:
        """Whether there are untaken answers or restarts, or an error."""
        return bool(self._answers or self._restarts or self._error)

    def take_results(self) -> tuple[list[Given], list[Restart]]:
        """Return and clear the pending results: answers, and responses that must restart. Raises a step's
        exception, which is a bug in this program; environment failures are data."""
        if self._error:
            raise self._error
        results, self._answers, self._restarts = (self._answers, self._restarts), [], []
        return results

    def add(self, group: OpenGroup, sample: int) -> None:
        """Start the environment step of a waiting response; release the environment of a complete one."""
        key, response = (group.number, sample), group.responses[sample]
        if self._state.open.get(group.number) is not group or key in self._running:
            return
        if response.episode.is_waiting:
            self._running[key] = task = asyncio.create_task(self._step(group, sample))
            task.add_done_callback(self._note_end)
        elif response.is_complete:
            self._forget(key)

    def cancel_group(self, number: int) -> None:
        for sample in range(self._group_size):
            if task := self._running.pop((number, sample), None):
                task.cancel()
            self._forget((number, sample))

    def cancel(self) -> None:
        """Cancel all steps; the next start repeats them."""
        for task in self._running.values():
            task.cancel()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._error = self._error or task.exception()
        self._changed()

    def _forget(self, key: tuple[int, int]) -> None:
        if episode := self._episodes.pop(key, None):
            name, turns = episode
            turns.forget(name)

    async def _step(self, group: OpenGroup, sample: int) -> None:
        key, response = (group.number, sample), group.responses[sample]
        attempt = response.episode.restarts
        # Stable across kills and unique per attempt: an idempotency key for external effects.
        name, prompt = f"{group.number}-{sample}-{attempt}", self._dataset.prompts[group.index]
        turns = self._turns[prompt.source]
        self._episodes[key] = name, turns
        try:
            answer = await turns.answer(prompt, response, name)
            if isinstance(answer, str):
                self._restarts.append((group, sample, answer))
            else:
                self._answers.append(Given(group, sample, response.tokens, attempt, answer))
        finally:
            if self._running.get(key) is asyncio.current_task():
                del self._running[key]
