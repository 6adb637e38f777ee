"""A turn of a model and what it is given next: the question to its environment, and the answer as tokens.

And the start of environments, one for each source of prompts or for all: their checks before any work, and
their parts in the process that samples.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from bapo_megatron.config import EnvironmentConfig, RunConfig
from bapo_megatron.config.validation import environment_field
from bapo_megatron.data.prompts import Tools
from bapo_megatron.environment import Context, SampledTurn, Task, Turn
from bapo_megatron.environment.conversation_tokens import ConversationTokens, RepeatedTurn
from bapo_megatron.environment.pool import (
    EnvironmentPool,
    Question,
    StepResult,
    command_problem,
    interpreter_problem,
    read_traits,
    stop_ids,
)
from bapo_megatron.environment.template import History, ObservationTemplate, check_template
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.answer_text import THINKING, THOUGHT
from bapo_megatron.reward.pool import FailureReports
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.engines.requests import Dataset, prompt_of_turn, stop_token_ids
from bapo_megatron.rollout.sampler.branches import NOTHING, PROMPT
from bapo_megatron.rollout.sampler.response import Answer, Response, Sampling, branch_ids
from bapo_megatron.types import FinishReason, Prompt

T = TypeVar("T")

MOST_RESTARTS = 20
"""Times that a response begins again because its environment could not be brought back; then it has failed.
Far more than kills, which are not its fault, may hit it."""


class Steps(Protocol):
    """What takes steps of environments (protocol): ``EnvironmentPool`` is one."""

    async def step(self, question: Question) -> StepResult:
        """The environment's answer; whatever the environment does, this does not raise."""

    def forget(self, episode: str) -> None:
        """The episode is over."""


class GivesTokens(Protocol):
    """The rule for the tokens of observations (protocol): ``ObservationTemplate`` is one."""

    def given_ids(self, observation: str | Sequence[str], last_token: int) -> np.ndarray:
        """The ids, int32, from the end of the model's turn, whose last token is given, to its next."""


@dataclass(frozen=True)
class Stepping:
    """The parts of an environment: they take steps, make answers tokens, and report failures."""

    steps: Steps
    template: GivesTokens
    report: Report
    stop_token_ids: tuple[int, ...]
    """Those of the model, and those of its class."""
    max_turns: int
    wants_tokens: bool = False
    """Whether its turns go with their tokens."""
    conversations: ConversationTokens | None = None
    """The rule for the tokens of branches."""
    tokenizing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A tokenizer is asked by one thread at a time, whichever environment asks."""


Environments = Mapping[str, Stepping]
"""The environments of a run by the names of the sources that have one (``RunConfig.environments``)."""


def within(sampling: Sampling, stepping: Stepping | None) -> Sampling:
    """The sampling parameters of responses in an environment; those of others unchanged."""
    if stepping is None:
        return sampling
    return replace(sampling, stop_token_ids=stepping.stop_token_ids, in_environment=True)


def turn_takers(
    environments: Environments, dataset: Dataset, max_response_tokens: int
) -> dict[str, TurnTaker]:
    """A ``TurnTaker`` for each environment, by the sources' names; sources that share one share it."""
    made = {
        id(environment): TurnTaker(environment, dataset, max_response_tokens)
        for environment in environments.values()
    }
    return {source: made[id(environment)] for source, environment in environments.items()}


class TurnTaker:
    """The way from a turn of the model to what it is given next, for training and evaluations."""

    def __init__(self, stepping: Stepping, dataset: Dataset, max_response_tokens: int) -> None:
        self._stepping, self._dataset = stepping, dataset
        self._max_response_tokens = max_response_tokens
        self._failures = FailureReports(stepping.report, event="environment_failed")
        self._restarts = FailureReports(stepping.report, event="episode_restarted")

    async def result(self, prompt: Prompt, response: Response, episode: str) -> StepResult:
        """The environment's answer to the last turn of a response that waits for it."""
        so_far = response.episode
        start = so_far.last_turn_start
        task = Task(prompt.messages, prompt.ground_truth, prompt.data_source, prompt.extra_info, episode)
        question = Question(
            task,
            await asyncio.to_thread(self._sampled, prompt, response, start, response.tokens),
            so_far.steps,
            lambda: self._turns(prompt, response),
            so_far.note,
            so_far.seconds,
        )
        return await self._stepping.steps.step(question)

    def must_restart(self, response: Response, result: StepResult) -> bool:
        """Whether the response must begin again: its environment could not be brought back."""
        if result.failure != "diverged" or response.episode.restarts >= MOST_RESTARTS:
            return False
        self._restarts.note(result)
        return True

    async def answer(self, prompt: Prompt, response: Response, result: StepResult) -> Answer:
        """What the response is given: tokens, which may begin a branch, or its end."""
        self._failures.note(result)
        if result.failure is not None or result.observation is None:
            return _end("failed" if result.failure is not None else "stop", result)
        if response.episode.sampled_turns >= self._stepping.max_turns:
            return _end("turns", result)
        try:
            async with self._stepping.tokenizing:
                given = await asyncio.to_thread(self._given, prompt, response, result)
        except Exception as error:  # a chat template raises what it likes
            why = f"its observation cannot be rendered: {error!r}"
            failed = StepResult(failure="raised", detail=why, seconds=result.seconds, place="template")
            self._failures.note(failed)
            return _end("failed", failed)
        if given.context + len(given.ids) >= self._max_response_tokens:  # no token would be left to the model
            return _end("length", result)
        return Answer(
            given.ids,
            result.observation,
            after=given.after,
            rewritten=given.rewritten,
            reward=result.reward,
            note=result.note,
            metrics=result.metrics,
            seconds=result.seconds,
        )

    def _given(self, prompt: Prompt, response: Response, result: StepResult) -> _Given:
        """The tokens of an observation, or what a conversation has beyond the turns that it repeats."""
        if result.context is None:
            said = result.messages or result.observation
            assert said is not None
            ids = self._stepping.template.given_ids(said, int(response.so_far.token_ids_R[-1]))
            return _Given(ids, response.branch.tokens)
        rule = self._stepping.conversations
        assert rule is not None, "an environment that is opened has it"
        context = Context(**result.context)
        messages, ends = context.messages, response.tree.ends
        turns = [number for number, (_, text) in enumerate(response.episode.turns) if text is None]
        repeated = {}
        for place in {one["turn"] for one in messages if "turn" in one}:
            number, ids_R = turns[place - 1], response.so_far.token_ids_R
            start, end = ends[number - 1] if number else 0, ends[number]
            text = self._dataset.turn_text(ids_R[start:end], self._stepping.stop_token_ids)
            opened = prompt_of_turn(self._dataset.tokenizer, prompt, ids_R, start).opens_thinking
            repeated[place] = RepeatedTurn(text, ids_R[start:end], opened)
        both = zip(messages, prompt.messages, strict=False)
        same = [all(one.get(key) == theirs[key] for key in ("role", "content")) for one, theirs in both]
        last = turns[context.after - 1] if context.after else None
        behind = context.after if rule.keeps_turns else 0
        ids = rule.ids(messages, repeated, [*same, False].index(False), context.tools, behind)
        if behind and last is not None:
            ids = np.concatenate([branch_ids(response, response.tree.to(last), prompt), ids])
        return _placed(ids, prompt, response, turns, last)

    def forget(self, episode: str) -> None:
        """There will be no more turns of an episode."""
        self._stepping.steps.forget(episode)

    def _text(self, prompt: Prompt, ids_R: np.ndarray, start: int, end: int) -> str:
        """A turn as its environment reads it. The chat template may have opened its thinking part; where that
        has no end, its tag is put in front: a call that is only thought of would look like one."""
        text = self._dataset.turn_text(ids_R[start:end], self._stepping.stop_token_ids)
        opened = prompt_of_turn(self._dataset.tokenizer, prompt, ids_R, start).opens_thinking
        return f"{THINKING}{text}" if opened and THOUGHT not in text else text

    def _sampled(self, prompt: Prompt, response: Response, start: int, end: int) -> str:
        """A turn of the model, with its tokens if its environment wants them."""
        so_far = response.so_far
        text = self._text(prompt, so_far.token_ids_R, start, end)
        if not self._stepping.wants_tokens:
            return text
        ids = so_far.token_ids_R[start:end].tolist()
        texts = self._dataset.tokenizer.batch_decode([[token] for token in ids])
        tokens = zip(ids, texts, so_far.log_probs_R[start:end].tolist(), strict=True)
        branch = response.tree.to([*response.tree.ends].index(end))
        before = branch.tokens - len(ids) + (len(prompt.token_ids_P) if branch.has_prompt else 0)
        return SampledTurn.of(text, before, tokens)

    def _turns(self, prompt: Prompt, response: Response) -> list[Turn]:
        start, turns = 0, []
        for end, text in response.episode.turns:
            if text is None:
                turns.append(Turn("sampled", self._sampled(prompt, response, start, end)))
            else:
                turns.append(Turn("given", text))
            start = end
        return turns


class _Given(NamedTuple):
    """What a response is given, and where in its tree."""

    ids: np.ndarray
    context: int
    """Tokens of the branch before it."""
    after: int | None = None
    """As of ``Answer``, as is ``rewritten``."""
    rewritten: bool = False


def _placed(
    ids: np.ndarray, prompt: Prompt, response: Response, turns: Sequence[int], repeated: int | None
) -> _Given:
    """A conversation behind the longest beginning of it, token by token, that the response has.

    ``turns``: numbers of the model's turns. ``repeated``: the last of those that its messages repeat.
    """
    tree, after = response.tree, NOTHING
    lengths = tree.lengths(len(prompt.token_ids_P))
    for turn in sorted((PROMPT, *turns), key=lengths.__getitem__, reverse=True):  # mostly the first one fits
        count = lengths[turn]
        if count < len(ids) and np.array_equal(branch_ids(response, tree.to(turn), prompt), ids[:count]):
            after = turn
            break
    rewritten = repeated is not None and repeated not in tree.way(after)[1]
    is_next = after == len(tree.ends) - 1
    return _Given(ids[lengths[after] :], tree.to(after).tokens, None if is_next else after, rewritten)


def _end(reason: FinishReason, result: StepResult) -> Answer:
    return Answer(
        np.zeros(0, np.int32),
        finish_reason=reason,
        reward=result.reward,
        failure=result.failure,
        detail=result.detail,
        note=result.note,
        metrics=result.metrics,
        seconds=result.seconds,
    )


def check_environment(
    environment: EnvironmentConfig, model: Path, tokenizer: Any, begun: bool = False
) -> Tools:
    """Check of the environment: its class in a worker, its stops, the tokens of its observations.

    ``begun``: for a run with steps, as in ``check_template``.
    Returns the schemas of its tools, for the prompts. ConfigError for a class that does not load or
    contradicts itself, a stop of several tokens, and a chat template that ignores its tools, or does not
    continue a response over several turns as it was sampled.
    """
    if environment.function is None:
        return ()
    if problem := interpreter_problem(environment.python):
        raise ConfigError(problem)
    traits = read_traits(environment)
    if problem := command_problem(environment, traits):
        raise ConfigError(problem)
    stop_ids(traits, tokenizer)
    template = ObservationTemplate(tokenizer, traits.role, stop_token_ids(model, tokenizer), traits.tools)
    history: History = "sampled" if environment.history == "sampled" else "template"
    check_template(template, str(model), history, begun)
    return traits.tools


def check_environments(config: RunConfig, tokenizer: Any, begun: bool = False) -> dict[str, Tools]:
    """Check of all environments of a run, each once; returns the tools of each source's.

    ConfigError as ``check_environment``, with the field.
    """
    tools: dict[str, Tools] = {}
    for source, environment in _distinct(config.environments).items():
        with _naming_field_of(source, config):
            tools[source] = check_environment(environment, config.model.hf_path, tokenizer, begun)
    return _for_all_sources(tools, config.environments)


def tools_of(config: RunConfig) -> dict[str, Tools]:
    """The tools of the environment of each source, from the classes in a worker. ConfigError if one is not
    there."""
    distinct = _distinct(config.environments)
    tools: dict[str, Tools] = {
        name: read_traits(environment).tools if environment.function else ()
        for name, environment in distinct.items()
    }
    return _for_all_sources(tools, config.environments)


async def open_environment(
    environment: EnvironmentConfig,
    model: Path,
    tokenizer: Any,
    report: Report,
    opened: AsyncExitStack,
    logs_dir: Path | None = None,
) -> Stepping | None:
    """The parts of an environment, started; None without a ``function``. ``logs_dir``: for its programs.

    ConfigError, ChildError or OSError if it does not start.
    """
    if environment.function is None:
        return None
    stops = stop_token_ids(model, tokenizer)
    traits = await asyncio.to_thread(read_traits, environment)
    template = ObservationTemplate(tokenizer, traits.role, stops, traits.tools)
    steps = EnvironmentPool(environment, traits, logs_dir=logs_dir)
    await steps.start()
    opened.push_async_callback(steps.close)
    every_stop = (*stops, *stop_ids(traits, tokenizer))
    rule = ConversationTokens(tokenizer, stops, traits.tools, environment.history == "sampled")
    return Stepping(steps, template, report, every_stop, environment.max_turns, traits.wants_tokens, rule)


async def open_environments(
    config: RunConfig, tokenizer: Any, report: Report, opened: AsyncExitStack
) -> dict[str, Stepping]:
    """The environments of a run, started, by source; equal ones are one, with one set of workers.

    ConfigError, ChildError or OSError as ``open_environment``.
    """
    tokenizing, logs_dir = asyncio.Lock(), config.paths.agent_logs
    started: dict[str, Stepping | None] = {}
    for source, environment in _distinct(config.environments).items():
        with _naming_field_of(source, config):
            made = await open_environment(
                environment, config.model.hf_path, tokenizer, report, opened, logs_dir
            )
        started[source] = made and replace(made, tokenizing=tokenizing)
    stepping_of = _for_all_sources(started, config.environments)
    return {name: stepping for name, stepping in stepping_of.items() if stepping is not None}


def _distinct(environments: Mapping[str, EnvironmentConfig]) -> dict[str, EnvironmentConfig]:
    """The first source of each environment, with it."""
    distinct: dict[str, EnvironmentConfig] = {}
    for source, environment in environments.items():
        if environment not in distinct.values():
            distinct[source] = environment
    return distinct


def _for_all_sources(values: Mapping[str, T], environments: Mapping[str, EnvironmentConfig]) -> dict[str, T]:
    """What was found for the sources of ``_distinct``, for all sources with an equal environment."""
    return {
        name: next(value for first, value in values.items() if environments[first] == environment)
        for name, environment in environments.items()
    }


_NAMES = "|".join(one.name for one in fields(EnvironmentConfig))
_FIELD = re.compile(rf"(?<![\w.\]])environment\.(?=({_NAMES})\b)")
"""Beginning of a field of the section, in a message."""


@contextmanager
def _naming_field_of(source: str, config: RunConfig) -> Iterator[None]:
    """A ConfigError of an environment names the source's own fields, if it has some."""
    owners = {owner.name for owner in config.data.sources if owner.environment is not None}
    try:
        yield
    except ConfigError as error:
        if source not in owners:
            raise
        raise ConfigError(_FIELD.sub(f"{environment_field(source)}.", str(error))) from error
