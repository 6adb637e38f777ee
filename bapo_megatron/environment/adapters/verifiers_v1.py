"""Environment that runs a verifiers v1 environment, with the policy as every agent.

    environment.function = "bapo_megatron.environment.adapters.verifiers_v1:VerifiersV1"
    environment.settings = {"taskset": {"id": "my-taskset"}, "env": {}}

``settings`` are verifiers' own; a row's ``extra_info`` has the task index, ``{"idx": 3}``, and ``rows``
generates such rows. The reward is the sum of those of the policy's traces. Whatever needs a verifiers sandbox
(some rewards, all harnesses) is not supported. Tested with 0.4.0.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from bapo_megatron.environment.adapters.loop import Ask, LoopEnvironment
from bapo_megatron.environment.adapters.verifiers_agents import Agents, prompt_of, traced
from bapo_megatron.environment.settings import VerifiersSettings


class VerifiersV1(LoopEnvironment):
    """Episode of one task of a verifiers environment."""

    settings_type = VerifiersSettings
    own_random = True

    async def play(self, ask: Ask) -> float:
        """Run the environment. Returns the sum of rewards over the policy's traces."""
        state = random.getstate()  # a taskset may draw on loading, which not every replay repeats
        environment = loaded(json.dumps(self.settings, sort_keys=True))
        task = next(itertools.islice(iter(environment.taskset), self.task.extra_info["idx"], None))
        random.setstate(state)
        episode = vf.Episode(env=vf.EnvInfo(id=environment.config.env_id), task=traced(task))
        agents = Agents(ask=ask, traces=episode.traces, prompt=prompt_of(task), talks=[])
        await environment.setup(agents)
        await environment.run(task, agents)
        await environment.finalize(task, episode)
        return float(sum(trace.reward for trace in episode.traces))


@cache
def loaded(settings: str) -> Any:
    """Return the environment that the settings, as JSON, configure; shared by all episodes of a worker."""
    options = VerifiersSettings(**json.loads(settings))
    return load_environment(resolve_env_config({**options.env, "taskset": options.taskset}))


def rows(settings: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yield rows with the fields of ``data.path``: the first ``count`` tasks, with their system prompts."""
    for task in itertools.islice(iter(loaded(json.dumps(settings)).taskset), count):
        prompt = [{"role": message.role, "content": message.content} for message in prompt_of(task)]
        judged = {
            "reward_model": {"ground_truth": "-", "style": "rule"},
            "extra_info": {"idx": task.data.idx},
        }
        yield {"data_source": f"verifiers/{settings['taskset']['id']}", "prompt": prompt, **judged}
