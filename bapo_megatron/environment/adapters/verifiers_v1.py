"""Adapter of verifiers' v1 environments: their own ``run(task, agents)``, in which the agents are the policy.

    environment.function = "bapo_megatron.environment.adapters.verifiers_v1:VerifiersV1"
    environment.settings = {"taskset": {"id": "my-taskset"}, "env": {}}

``settings`` are verifiers' own; a row's ``extra_info`` has the task's place, ``{"idx": 3}`` (``rows``). What
needs a box, some rewards and all harnesses, is not run. Tried with 0.4.0. Workers load it by that name.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from bapo_megatron.environment.adapters.loop import Ask, LoopEnvironment


class VerifiersV1(LoopEnvironment):
    """An episode that is one of verifiers' environments. Made by a worker of environments."""

    own_random = True

    async def play(self, ask: Ask) -> float:
        """Run the environment; the reward is the sum over the policy's traces."""
        state = random.getstate()  # a taskset may draw when it is loaded, which is not at every replay
        environment = loaded(json.dumps(self.settings, sort_keys=True))
        task = next(itertools.islice(iter(environment.taskset), self.task.extra_info["idx"], None))
        random.setstate(state)
        episode = vf.Episode(env=vf.EnvInfo(id=environment.config.env_id), task=_traced(task))
        agents = _Agents(ask=ask, traces=episode.traces, prompt=_prompt(task), talks=[])
        await environment.setup(agents)
        await environment.run(task, agents)
        await environment.finalize(task, episode)
        return float(sum(trace.reward for trace in episode.traces))


class _Agents(SimpleNamespace):
    def __getattr__(self, name: str) -> _Agent:
        return _Agent(name, self)


class _Agent:
    def __init__(self, name: str, all_agents: Any) -> None:
        self._name, self._all = name, all_agents

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Any]:
        """A conversation on the task, whose rewards judge its end; ``turn`` is the policy's next turn."""
        info = vf.AgentInfo(config=vf.AgentConfig(), name=self._name)
        trace: Any = vf.Trace(task=_traced(task), agent=info)
        _add(trace, _prompt(task), sampled=False)

        async def turn(message: Any = None) -> Any:
            given = [vf.UserMessage(content=message)] if isinstance(message, str) else message or []
            self._check(task, trace, given)
            _add(trace, given, sampled=False)
            observation = "\n".join(one.content for one in given) if given else None
            answer = _answer(await self._all.ask(observation))
            _add(trace, [answer], sampled=True)
            return vf.Segment([answer])

        yield SimpleNamespace(trace=trace, turn=turn)
        trace.is_completed = trace.ok = True
        await task.score(trace)
        self._all.traces.append(trace)

    def _check(self, task: Any, trace: Any, given: Any) -> None:
        """ValueError where a prompt opens a conversation that the policy has not seen: an episode is one."""
        opens = not given and not trace.num_turns
        if opens and (self._all.talks or _prompt(task) != self._all.prompt):
            raise ValueError(
                f"run() opens a conversation of {self._name!r} beside the episode's, with the prompt "
                f"{task.data.prompt_text[:80]!r}: an episode is one conversation, on the prompt of its row"
            )
        self._all.talks.append(self._name)


def _prompt(task: Any) -> list[Any]:
    said = (vf.SystemMessage, task.data.system_prompt), (vf.UserMessage, task.data.prompt_text)
    return [kind(content=text) for kind, text in said if text]


def _answer(turn: str) -> Any:
    """The policy's turn with its thoughts apart, as a server with a parser of them gives it to rewards."""
    thought, found, said = turn.rpartition("</think>")
    thoughts = {"reasoning_content": thought.strip().removeprefix("<think>").strip()} if found else {}
    return vf.AssistantMessage(content=said.strip() if found else turn, **thoughts)


def _add(trace: Any, messages: Any, sampled: bool) -> None:
    for message in messages:
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))


@cache
def loaded(settings: str) -> Any:
    """The environment that the settings, as JSON, configure; one for all episodes of a worker."""
    found = json.loads(settings)
    return load_environment(resolve_env_config({**found.get("env", {}), "taskset": found["taskset"]}))


def rows(settings: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Rows of a dataset, in the fields of ``data.path``: the first ``count`` tasks, with system prompts."""
    for task in itertools.islice(iter(loaded(json.dumps(settings)).taskset), count):
        prompt = [{"role": one.role, "content": one.content} for one in _prompt(task)]
        judged = {
            "reward_model": {"ground_truth": "-", "style": "rule"},
            "extra_info": {"idx": task.data.idx},
        }
        yield {"data_source": f"verifiers/{settings['taskset']['id']}", "prompt": prompt, **judged}


def _traced(task: Any) -> Any:
    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
