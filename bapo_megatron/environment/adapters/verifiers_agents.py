"""The ``agents`` argument of a verifiers v1 environment's ``run(task, agents)``, played by the policy.

Every agent, by any name, gets the policy's turns and records them in a ``verifiers`` trace, which the task
scores. An episode has one conversation, hence one trace; starting a second raises ValueError.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf


class Agents(SimpleNamespace):
    """Object with the policy as an agent under any name, and the episode's ``ask``, traces and prompt."""

    def __getattr__(self, name: str) -> _Agent:
        return _Agent(name, self)


class _Agent:
    """One agent, as verifiers calls it: ``run`` returns the scored trace of a single turn, ``interaction``
    yields a conversation whose ``turn(message)`` returns the policy's next turn."""

    def __init__(self, name: str, all_agents: Any) -> None:
        self._name, self._all = name, all_agents

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Any]:
        """Yield a conversation on the task, scored at its end; ``turn`` returns the policy's next turn."""
        info = vf.AgentInfo(config=vf.AgentConfig(), name=self._name)
        trace: Any = vf.Trace(task=traced(task), agent=info)
        _add(trace, prompt_of(task), sampled=False)

        async def turn(message: Any = None) -> Any:
            messages = [vf.UserMessage(content=message)] if isinstance(message, str) else message or []
            self._check(task, trace, messages)
            _add(trace, messages, sampled=False)
            observation = "\n".join(said.content for said in messages) if messages else None
            answer = _answer(await self._all.ask(observation))
            _add(trace, [answer], sampled=True)
            return vf.Segment([answer])

        yield SimpleNamespace(trace=trace, turn=turn)
        trace.is_completed = trace.ok = True
        await task.score(trace)
        self._all.traces.append(trace)

    def _check(self, task: Any, trace: Any, messages: Any) -> None:
        """Raise ValueError if a prompt opens a conversation besides the episode's own."""
        opens = not messages and not trace.num_turns
        if opens and (self._all.talks or prompt_of(task) != self._all.prompt):
            raise ValueError(
                f"run() opens a conversation of {self._name!r} beside the episode's, with the prompt "
                f"{task.data.prompt_text[:80]!r}: an episode is one conversation, on the prompt of its row"
            )
        self._all.talks.append(self._name)


def prompt_of(task: Any) -> list[Any]:
    """Return the initial messages of a task."""
    said = (vf.SystemMessage, task.data.system_prompt), (vf.UserMessage, task.data.prompt_text)
    return [kind(content=text) for kind, text in said if text]


def _answer(turn: str) -> Any:
    """Return the policy's turn with separate thoughts, as a server with a reasoning parser does."""
    thought, mark, said = turn.rpartition("</think>")
    thoughts = {"reasoning_content": thought.strip().removeprefix("<think>").strip()} if mark else {}
    return vf.AssistantMessage(content=said.strip() if mark else turn, **thoughts)


def _add(trace: Any, messages: Any, sampled: bool) -> None:
    for message in messages:
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))


def traced(task: Any) -> Any:
    """Return the task in a trace's form."""
    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
