"""The stepper: asks environments for their answers to the model's turns, and collects them.

The dispatcher's counterpart: a response is with one or the other, and holds no place at an engine while its
environment works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from bapo_megatron.config import RunConfig
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.events import Given
from bapo_megatron.rollout.sampler.state import OpenGroup, SamplerState
from bapo_megatron.rollout.sampler.turns import Environments, TurnTaker, turn_takers


class Restart(NamedTuple):
    """A response that must begin again, and why."""

    group: OpenGroup
    sample: int
    why: str


class Stepper:
    """The scheduler of steps: asks the environment of each response that waits for it; collects answers.

    In the sampler's event loop, as the dispatcher is: ``SamplerLoop`` adds responses and takes the answers,
    which count only when they are in the write-ahead log.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        sampler_state: SamplerState,
        environments: Environments,
        changed: Callable[[], None],
    ) -> None:
        """``changed`` is called when there are results."""
        most = config.rollout.max_response_tokens
        self._turns = turn_takers(environments, dataset, most)
        self._dataset, self._state, self._changed = dataset, sampler_state, changed
        self._group_size = config.rollout.group_size
        self._running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._episodes: dict[tuple[int, int], tuple[str, TurnTaker]] = {}
        """Episodes whose environment may hold an object, with the way to it."""
        self._answers: list[Given] = []
        self._restarts: list[Restart] = []
        self._error: BaseException | None = None
        """A mistake of this program in a step."""

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self.has_results)

    @property
    def has_results(self) -> bool:
        """Whether there are answers or restarts that are not taken yet, or an error."""
        return bool(self._answers or self._restarts or self._error)

    def take_results(self) -> tuple[list[Given], list[Restart]]:
        """Take the results since the last call: answers, and responses that must begin again.

        Raises the error of a step, which is a mistake of this program: what an environment does is data.
        """
        if self._error:
            raise self._error
        results, self._answers, self._restarts = (self._answers, self._restarts), [], []
        return results

    def add(self, group: OpenGroup, sample: int) -> None:
        """Ask the environment of a response that waits for it; release that of a complete one."""
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
        """Cancel all steps. They are asked again at the next start."""
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
        """One step of one response; keep its answer, or note that the response must begin again."""
        key, response = (group.number, sample), group.responses[sample]
        attempt = response.episode.restarts
        # The same after a kill, and another for each attempt: a key for outer effects.
        name, prompt = f"{group.number}-{sample}-{attempt}", self._dataset.prompts[group.index]
        turns = self._turns[prompt.source]
        self._episodes[key] = name, turns
        try:
            result = await turns.result(prompt, response, name)
            if turns.must_restart(response, result):
                self._restarts.append(Restart(group, sample, result.detail))
                return
            answer = await turns.answer(prompt, response, result)
            self._answers.append(Given(group, sample, response.tokens, attempt, answer))
        finally:
            if self._running.get(key) is asyncio.current_task():
                del self._running[key]
