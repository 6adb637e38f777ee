"""Environments of a run: preflight checks, start of their workers, and steps of a response.

The trainer calls ``check_environments`` before a start; ``open_environments`` starts the workers, in the
sampler process. ``TurnTaker`` sends a response's last turn to its environment and returns the answer as
tokens. A run has one environment per prompt source, or one for all sources.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bapo_megatron.config import EnvironmentConfig, RunConfig
from bapo_megatron.data.prompts import Tools
from bapo_megatron.environment import Context, SampledTurn, Task, Turn
from bapo_megatron.environment.conversation_tokens import ConversationTokens, RepeatedTurn
from bapo_megatron.environment.pool import (
    EnvironmentPool,
    Question,
    StepResult,
    Traits,
    command_problem,
    read_traits,
    stop_ids,
)
from bapo_megatron.environment.template import History, ObservationTemplate, check_template
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.pool import FailureReports
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.engines.requests import Dataset, prompt_of_turn, stop_token_ids
from bapo_megatron.rollout.sampler.branches import NOTHING, PROMPT
from bapo_megatron.rollout.sampler.response import Answer, Response, Sampling, branch_ids
from bapo_megatron.rollout.sampler.scoring import with_opened_thought
from bapo_megatron.types import FinishReason, Prompt

T = TypeVar("T")

MOST_RESTARTS = 20
"""Maximum restarts of a response whose environment cannot be restored, far more than kills may cause."""


@dataclass(frozen=True)
class Stepping:
    """An opened environment: its workers, tokenization of answers, stop tokens, limits, failure reports."""

    steps: EnvironmentPool
    template: ObservationTemplate
    report: Report
    stop_token_ids: tuple[int, ...]
    """Stop tokens of the model and of the environment class."""
    max_turns: int
    wants_tokens: bool = False
    """Whether the environment receives the turns' tokens."""
    conversations: ConversationTokens | None = None
    """Tokenizes conversations, for branches."""
    tokenizing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Limits the tokenizer, which all environments share, to one thread at a time."""


Environments = Mapping[str, Stepping]
"""A run's environments by source name (``RunConfig.environments``)."""


def within(sampling: Sampling, stepping: Stepping | None) -> Sampling:
    """Return ``sampling`` with the environment's stop tokens, which end turns; unchanged without one."""
    if stepping is None:
        return sampling
    return replace(sampling, stop_token_ids=stepping.stop_token_ids, in_environment=True)


def turn_takers(
    environments: Environments, dataset: Dataset, max_response_tokens: int
) -> dict[str, TurnTaker]:
    """Return a ``TurnTaker`` by source."""
    return {source: TurnTaker(one, dataset, max_response_tokens) for source, one in environments.items()}


class TurnTaker:
    """Client of one environment: ``answer`` sends it a response's last turn, and returns its answer as tokens
    or the end of the response. Reports failures and restarts as run events."""

    def __init__(self, stepping: Stepping, dataset: Dataset, max_response_tokens: int) -> None:
        self._stepping, self._dataset = stepping, dataset
        self._max_response_tokens = max_response_tokens
        self._failures = FailureReports(stepping.report, event="environment_failed")
        self._restarts = FailureReports(stepping.report, event="episode_restarted")

    async def _result(self, prompt: Prompt, response: Response, episode: str) -> StepResult:
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

    async def answer(self, prompt: Prompt, response: Response, episode: str) -> Answer | str:
        """Return the environment's answer to the last turn of a waiting response: tokens, which may start a
        branch, or the response's end, because the environment ended it or failed, or its turns or tokens
        reach the limit. Returns the reason if the response must restart instead: its environment is lost, for
        at most ``MOST_RESTARTS`` times."""
        result = await self._result(prompt, response, episode)
        if result.failure == "diverged" and response.episode.restarts < MOST_RESTARTS:
            self._restarts.note(result)
            return result.detail
        self._failures.note(result)
        if result.failure is not None or result.observation is None:
            return _end("failed" if result.failure is not None else "stop", result)
        if response.episode.sampled_turns >= self._stepping.max_turns:
            return _end("turns", result)
        try:
            async with self._stepping.tokenizing:
                given = await asyncio.to_thread(self._given, prompt, response, result)
        except Exception as error:  # chat templates may raise anything
            why = f"its observation cannot be rendered: {error!r}"
            failed = StepResult(failure="raised", detail=why, seconds=result.seconds, place="template")
            self._failures.note(failed)
            return _end("failed", failed)
        if given.context + len(given.ids) >= self._max_response_tokens:  # leaves the model no token
            return _end("length", result)
        place = {"after": given.after, "rewritten": given.rewritten}
        return _answer(result, token_ids_R=given.ids, text=result.observation, **place)

    def _given(self, prompt: Prompt, response: Response, result: StepResult) -> _Given:
        """Return an observation's tokens, or a conversation's tokens beyond the turns that it repeats."""
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
        """Release a finished episode."""
        self._stepping.steps.forget(episode)

    def _sampled(self, prompt: Prompt, response: Response, start: int, end: int) -> str:
        """Return a model turn's text, with its tokens if the environment wants them."""
        so_far, tokenizer = response.so_far, self._dataset.tokenizer
        text = self._dataset.turn_text(so_far.token_ids_R[start:end], self._stepping.stop_token_ids)
        text = with_opened_thought(tokenizer, prompt, so_far.token_ids_R, start, text)
        if not self._stepping.wants_tokens:
            return text
        ids = so_far.token_ids_R[start:end].tolist()
        texts = tokenizer.batch_decode([[token] for token in ids])
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
    """Tokens of an observation and their place in the turn tree; last two fields as in ``Answer``."""

    ids: np.ndarray
    context: int
    """Branch tokens before the given tokens."""
    after: int | None = None
    rewritten: bool = False


def _placed(
    ids: np.ndarray, prompt: Prompt, response: Response, turns: Sequence[int], repeated: int | None
) -> _Given:
    """Return a conversation's tokens beyond its longest prefix in the response, compared token by token.
    ``turns``: numbers of the model's turns. ``repeated``: the last one that the conversation repeats."""
    tree, after = response.tree, NOTHING
    lengths = tree.lengths(len(prompt.token_ids_P))
    for turn in sorted((PROMPT, *turns), key=lengths.__getitem__, reverse=True):  # usually the first fits
        count = lengths[turn]
        if count < len(ids) and np.array_equal(branch_ids(response, tree.to(turn), prompt), ids[:count]):
            after = turn
            break
    rewritten = repeated is not None and repeated not in tree.way(after)[1]
    is_next = after == len(tree.ends) - 1
    return _Given(ids[lengths[after] :], tree.to(after).tokens, None if is_next else after, rewritten)


def _end(reason: FinishReason, result: StepResult) -> Answer:
    return _answer(result, token_ids_R=np.zeros(0, np.int32), finish_reason=reason)


def _answer(result: StepResult, **more: Any) -> Answer:
    return Answer(
        reward=result.reward,
        failure=result.failure,
        detail=result.detail,
        note=result.note,
        metrics=result.metrics,
        seconds=result.seconds,
        **more,
    )


def check_environment(
    environment: EnvironmentConfig, model: Path, tokenizer: Any, begun: bool = False
) -> Tools:
    """Check an environment's class (in a worker), stops and observation tokens; return its tool schemas.
    ``begun``: whether the run has steps, as in ``check_template``. Raises ConfigError for a class that does
    not load or contradicts itself, a stop of several tokens, and a chat template that ignores the tools or
    does not continue a multi-turn response as sampled."""
    if environment.function is None:
        return ()
    traits = read_traits(environment)
    if problem := command_problem(environment, traits):
        raise ConfigError(problem)
    stop_ids(traits, tokenizer)
    template = ObservationTemplate(tokenizer, traits.role, stop_token_ids(model, tokenizer), traits.tools)
    history: History = "sampled" if environment.history == "sampled" else "template"
    check_template(template, str(model), history, begun)
    return _prompt_tools(environment, traits)


def _prompt_tools(environment: EnvironmentConfig, traits: Traits) -> Tools:
    in_text = traits.runs_program and not traits.tools and environment.settings.get("tools_in_prompts")
    return None if in_text else traits.tools


def check_environments(config: RunConfig, tokenizer: Any, begun: bool = False) -> dict[str, Tools]:
    """Check each distinct environment of a run; return the tool schemas by source. Raises ConfigError as
    ``check_environment`` does, with the source's name."""
    folder = config.model.hf_path
    return _by_source(config, lambda one: check_environment(one, folder, tokenizer, begun))


def tools_of(config: RunConfig) -> dict[str, Tools]:
    """Return each source's tool schemas, read in a worker; raises ConfigError if a class is invalid."""
    return _by_source(config, lambda one: _prompt_tools(one, read_traits(one)) if one.function else ())


def _by_source(config: RunConfig, make: Callable[[EnvironmentConfig], T]) -> dict[str, T]:
    """Return what ``make`` returns for each source's environment, called once for equal ones. Its ConfigError
    gets the source's name, if the run has several sources."""
    made: dict[str, T] = {}
    for source, environment in config.environments.items():
        equal = [value for other, value in made.items() if config.environments[other] == environment]
        try:
            made[source] = equal[0] if equal else make(environment)
        except ConfigError as error:
            raise ConfigError(f"source {source}: {error}" if config.data.sources else str(error)) from error
    return made


async def open_environment(
    environment: EnvironmentConfig,
    model: Path,
    tokenizer: Any,
    report: Report,
    opened: AsyncExitStack,
    logs_dir: Path | None = None,
) -> Stepping | None:
    """Start an environment's workers; return None without a ``function``. ``logs_dir``: logs of its programs.
    Raises ConfigError, ChildError or OSError if it does not start. ``opened`` closes it."""
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
    """Start a run's environments and return them by source; equal environments share one set of workers.
    Raises ConfigError, ChildError or OSError as ``open_environment`` does."""
    tokenizing, folder, logs_dir = asyncio.Lock(), config.model.hf_path, config.paths.agent_logs
    started: dict[str, Stepping] = {}
    for source, environment in config.environments.items():
        equal = [one for other, one in started.items() if config.environments[other] == environment]
        if equal:
            started[source] = equal[0]
        elif made := await open_environment(environment, folder, tokenizer, report, opened, logs_dir):
            started[source] = replace(made, tokenizing=tokenizing)
    return started
