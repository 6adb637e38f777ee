"""The state machine of one response: what it needs next, the request for it, and how an answer continues it.

    state       needs        event                               next state
    sampling    Tokens(n)    a segment without a reason          sampling
    sampling    Tokens(n)    a segment with a finish reason      complete
    sampling    Tokens(n)    a segment with the reason `turn`    waiting
    waiting     STEP         an answer with tokens               sampling
    waiting     STEP         an answer with a finish reason      complete
    waiting     STEP         ``restarted``                       sampling, without tokens
    complete    nothing

Only responses in an environment wait; one without is an *episode* of a single turn. The turns of an episode
may form a tree (``branches.py``); what is sampled continues its last branch. Pure functions on frozen data:
no engine, no file, no clock. The dispatcher and the stepper drive responses for training with it (the
write-ahead log is between an answer and the next state), ``held_out.py`` those of evaluations.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

import numpy as np

from bapo_megatron.rollout.sampler.branches import Branch, Fork, Tree
from bapo_megatron.types import (
    GIVEN,
    FinishReason,
    GenerateRequest,
    Generation,
    Prompt,
    ResponseTokens,
    Rollout,
    RouteShape,
    SamplingParams,
)

MOST_LOSSES = 20
"""Engines lost with one response after which it is given up: its request may be what crashes them."""

TURN: Literal["turn"] = "turn"
"""The reason of a segment that ends a turn of the model, but not the response: its environment answers."""

SegmentEnd = FinishReason | Literal["turn"]
"""Why a segment is the last of its turn, or of its response."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of responses: plain data, made by ``Dispatcher``, ``HeldOut``, `bapo eval`."""

    temperature: float
    max_response_tokens: int
    seed: int
    """The seed of the run or evaluation, from which each response has its own (``request_seed``)."""
    stop_token_ids: tuple[int, ...]
    segment_tokens: int | None = None
    """Most tokens of one request; None: one request for the whole response."""
    routes: RouteShape | None = None
    """The shape of the routes that engines must return; None: none are asked for."""
    in_environment: bool = False
    """Whether a stop token ends a turn, which an environment answers, and not the response."""


@dataclass(frozen=True)
class Answer:
    """An environment's answer to a turn: the tokens that the model is given, or the end of the response."""

    token_ids_R: np.ndarray
    """int32; none if the response ends."""
    text: str = ""
    """The observation as the environment said it; empty if the response ends."""
    finish_reason: FinishReason | None = None
    """Finish reason of the response if it ends, else None."""
    reward: float | None = None
    failure: str | None = None
    """Kind of the failure if the step failed."""
    detail: str = ""
    """Text of the failure."""
    note: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Time of the step."""
    after: int | None = None
    """The turn that these tokens follow, if it is not the last one, as a ``Fork`` has it: a branch."""
    rewritten: bool = False
    """Whether the branch begins because the chat template writes earlier turns otherwise."""

    @property
    def tokens(self) -> ResponseTokens:
        """The given tokens with all columns: mask False, log-prob 0, and no version that sampled them."""
        count = len(self.token_ids_R)
        versions_R, mask_R = np.full(count, GIVEN, np.int32), np.zeros(count, np.bool_)
        return ResponseTokens(self.token_ids_R, np.zeros(count, np.float32), versions_R, loss_mask_R=mask_R)


@dataclass(frozen=True)
class Episode:
    """What a response has beside its tokens: the ends of its turns, and its environment's answers so far.

    Part of a ``Response``; ``continued`` and ``given`` make the next one.
    """

    turns: tuple[tuple[int, str | None], ...] = ()
    """For each finished turn, sampled and given by turns: the tokens up to its end, and the text of a given
    one, None for a sampled one."""
    is_waiting: bool = False
    """Whether the model's turn has ended, and its environment has not answered yet."""
    given_tokens: int = 0
    rewards: tuple[float | None, ...] = ()
    """Reward of each answer."""
    failure: str | None = None
    detail: str = ""
    note: Any = None
    """The last note that it gave."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of all answers, added up by name."""
    seconds: float = 0.0
    """Time of all steps."""
    restarts: int = 0
    """How often the response has begun again."""
    forks: tuple[Fork, ...] = ()
    """The given turns that do not follow the turn before them."""
    rewritten: int = 0
    """Number of forks because of the chat template."""

    @property
    def steps(self) -> int:
        """Number of answers."""
        return len(self.rewards)

    @property
    def sampled_turns(self) -> int:
        """Number of finished turns of the model."""
        return sum(text is None for _, text in self.turns)

    @property
    def reward(self) -> float | None:
        """Sum of the environment's rewards; None if it gave none, and ``reward.function`` judges."""
        rewards = [reward for reward in self.rewards if reward is not None]
        return sum(rewards) if rewards else None

    @property
    def last_turn_start(self) -> int:
        """Tokens of the response before the model's last turn."""
        return max((end for end, text in self.turns if text is not None), default=0)


@dataclass(frozen=True)
class Response:
    """State of one response that is being sampled: its tokens so far, and its finish reason when complete.

    Held by the open groups of the sampler's state, and by ``held_out.py`` in evaluations;
    ``continued``, ``given`` and ``restarted`` make the next one.
    """

    so_far: ResponseTokens = field(default_factory=lambda: ResponseTokens.joined([]))
    finish_reason: FinishReason | None = None
    """That of a complete response, else None."""
    tokens_by_version: Mapping[int, int] = field(default_factory=dict)
    """Number of sampled tokens by the weight version that sampled them."""
    episode: Episode = field(default_factory=Episode)
    routed: tuple[ResponseTokens, ...] = ()
    """The segments with their routes, from the first token on; empty while no route is known. ``so_far`` has
    none: joined at each segment, all routes so far would be copied each time."""

    @property
    def is_sampling(self) -> bool:
        """Whether it needs more tokens from an engine."""
        return not self.is_complete and not self.episode.is_waiting

    @property
    def is_complete(self) -> bool:
        """Whether it needs nothing more, and can be scored."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> int:
        """Number of tokens so far, sampled and given."""
        return len(self.so_far.token_ids_R)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model has sampled."""
        return self.tokens - self.episode.given_tokens

    @property
    def longest_sampled(self) -> int:
        """Number of sampled tokens of the branch that has most: a penalty for length counts these, as
        ``max_response_tokens`` is the limit of a branch."""
        if not self.episode.forks:
            return self.sampled_tokens
        is_sampled_N = self.so_far.versions_R != GIVEN
        return max(int(branch.of(is_sampled_N).sum()) for branch in self.tree.branches)

    @property
    def last_turn_R(self) -> np.ndarray:
        """Token ids of the model's last turn, the whole response if it has one: what a reward judges."""
        ids_R: np.ndarray = self.so_far.token_ids_R[self.episode.last_turn_start :]
        return ids_R

    @property
    def tree(self) -> Tree:
        """Its turns as a tree."""
        return Tree.of([end for end, _ in self.episode.turns], self.episode.forks, self.tokens)

    @property
    def branch(self) -> Branch:
        """The branch of its last turn, all its tokens where there is no other: what a request continues."""
        return self.tree.last if self.episode.forks else Branch(True, ((0, self.tokens),))

    def rollouts(
        self,
        reward: float,
        teacher_log_probs: Sequence[np.ndarray] | None = None,
        named_rewards: Mapping[str, float] | None = None,
    ) -> list[Rollout]:
        """The complete response with its rewards, a rollout for each branch; a token is trained on in the
        first that has it. ``teacher_log_probs``: of each branch, in a distillation."""
        assert self.finish_reason is not None
        columns: dict[str, Any] = dict(self.so_far.columns)
        if self.routed:
            columns["routes_R"] = ResponseTokens.joined(self.routed).routes_R
        rewards: dict[str, Any] = {"reward": reward, "named_rewards": dict(named_rewards or {})}
        if not self.episode.forks:
            columns["teacher_log_probs_R"] = teacher_log_probs[0] if teacher_log_probs else None
            return [Rollout(**columns, finish_reason=self.finish_reason, **rewards)]
        last, rollouts = self.branch, []
        for number, (branch, first_R) in enumerate(self.tree.trained):
            own: dict[str, Any] = {name: None if x is None else branch.of(x) for name, x in columns.items()}
            own["loss_mask_R"] = first_R if own["loss_mask_R"] is None else own["loss_mask_R"] & first_R
            own["teacher_log_probs_R"] = teacher_log_probs[number] if teacher_log_probs else None
            reason = self.finish_reason if branch == last else "stop"
            place: dict[str, Any] = {"branch": number, "has_prompt": branch.has_prompt}
            rollouts.append(Rollout(**own, finish_reason=reason, **rewards, **place))
        return rollouts


@dataclass(frozen=True)
class Tokens:
    """A need of a response, found by ``needs``: more tokens from an engine."""

    most: int
    """Most tokens of the next request; 0: none before new weights bring a new budget."""


class Step(Enum):
    """A need of a response: the environment's answer to the model's turn. ``STEP`` is its only member."""

    STEP = "step"


STEP = Step.STEP


def needs(response: Response, sampling: Sampling, budget: int | None = None) -> Tokens | Step | None:
    """What the response needs next; None if it is complete.

    ``budget``: most tokens that it may still have from the current weights (``rollout.budget_tokens``).
    """
    if response.is_complete:
        return None
    if response.episode.is_waiting:
        return STEP
    limits = (sampling.max_response_tokens - response.branch.tokens, sampling.segment_tokens, budget)
    return Tokens(max(0, min(limit for limit in limits if limit is not None)))


def next_request(
    response: Response, need: Tokens, sampling: Sampling, prompt: Prompt, name: str, seed: int
) -> GenerateRequest:
    """The request for the next segment: the prompt and the response so far.

    ``name``: of the response, unique; the request's id adds the place of the segment. ``seed``: of the
    response's draws, the same for all its segments.
    """
    return GenerateRequest(
        request_id=f"{name}-{response.tokens}",
        input_ids=branch_ids(response, response.branch, prompt),
        params=SamplingParams(sampling.temperature, need.most, sampling.stop_token_ids, _own(seed, response)),
        prefix_tokens=response.branch.tokens,
        routes=sampling.routes,
    )


def _own(seed: int, response: Response) -> int:
    """The seed of a response's draws; in an episode with branches that of a turn, from what it follows: so
    questions that were asked together have the same draws in any order, a repeated one has others."""
    episode = response.episode
    if not episode.forks:
        return seed
    start, turn = episode.last_turn_start, len(episode.turns) - 1
    before_N = response.so_far.token_ids_R[:start]
    context = Tree.of([end for end, _ in episode.turns], episode.forks, start).to(turn).of(before_N)
    asked = [(after, episode.turns[number][1]) for number, after in episode.forks]
    return seed ^ (zlib.crc32(context.tobytes(), asked.count(asked[-1])) & 0x7FFFFFFF)


def branch_ids(response: Response, branch: Branch, prompt: Prompt) -> np.ndarray:
    """Token ids of a branch of a response, with the dataset's prompt where it has that."""
    ids = branch.of(response.so_far.token_ids_R)
    return np.concatenate([prompt.token_ids_P, ids]) if branch.has_prompt else ids


def finish_reason_of(before: int, segment: ResponseTokens, sampling: Sampling) -> SegmentEnd | None:
    """The finish reason of a response with ``segment`` after ``before`` tokens of a branch; None: unfinished.

    ``turn`` in place of ``stop`` in an environment, which says whether the response ends. From the tokens,
    whatever the engine reports: an abort may coincide with the stop token.
    """
    ids = segment.token_ids_R
    if len(ids) and ids[-1] in sampling.stop_token_ids:
        return TURN if sampling.in_environment else "stop"
    return "length" if before + len(ids) >= sampling.max_response_tokens else None


def continued(response: Response, segment: ResponseTokens, reason: SegmentEnd | None) -> Response:
    """The response with ``segment`` appended. ``reason``: if the segment completes it, or a turn of it."""
    by_version = dict(response.tokens_by_version)
    for version, count in _counts(segment.versions_R).items():
        by_version[version] = by_version.get(version, 0) + count
    joined, episode = _joined(response, replace(segment, routes_R=None)), response.episode
    if reason is not None:
        episode = _turn_ended(episode, len(joined.token_ids_R), reason)
    routed = _routed(response, segment)
    return Response(joined, None if reason == TURN else reason, by_version, episode, routed)


def given(response: Response, answer: Answer) -> Response:
    """The response with its environment's answer, which gives it tokens or completes it."""
    joined, routed = response.so_far, response.routed
    if len(answer.token_ids_R):
        joined, routed = _joined(response, answer.tokens), _routed(response, answer.tokens)
    episode = _answered(response.episode, len(joined.token_ids_R), answer)
    return replace(
        response, so_far=joined, finish_reason=answer.finish_reason, episode=episode, routed=routed
    )


def restarted(response: Response) -> Response:
    """The response begun again: its environment cannot be brought back to where it was."""
    return Response(episode=Episode(restarts=response.episode.restarts + 1))


def _turn_ended(episode: Episode, tokens: int, reason: SegmentEnd) -> Episode:
    return replace(episode, turns=(*episode.turns, (tokens, None)), is_waiting=reason == TURN)


def _answered(episode: Episode, tokens: int, answer: Answer) -> Episode:
    count, forks = len(answer.token_ids_R), episode.forks
    goes_on = count > 0 or answer.after is not None
    if answer.after is not None:
        forks = (*forks, (len(episode.turns), answer.after))
    metrics = dict(episode.metrics)
    for name, value in answer.metrics.items():
        metrics[name] = metrics.get(name, 0.0) + value
    return replace(
        episode,
        turns=(*episode.turns, (tokens, answer.text)) if goes_on else episode.turns,
        is_waiting=False,
        given_tokens=episode.given_tokens + count,
        rewards=(*episode.rewards, answer.reward),
        failure=answer.failure,
        detail=answer.detail,
        note=episode.note if answer.note is None else answer.note,
        metrics=metrics,
        seconds=episode.seconds + answer.seconds,
        forks=forks,
        rewritten=episode.rewritten + answer.rewritten,
    )


def summary(response: Response) -> dict[str, Any]:
    """What the metrics of a step need of a response's episode, as JSON."""
    episode = response.episode
    forked = {"branches": len(response.tree.branches), "rewritten": episode.rewritten}
    return {
        "turns": episode.sampled_turns,
        "given": episode.given_tokens,
        "rewards": list(episode.rewards),
        "failure": episode.failure,
        "metrics": dict(episode.metrics),
        "seconds": episode.seconds,
        "restarts": episode.restarts,
        **(forked if episode.forks else {}),
    }


def _routed(response: Response, part: ResponseTokens) -> tuple[ResponseTokens, ...]:
    """``Response.routed`` with ``part``, whose routes may be unknown, as those of given tokens are."""
    if part.routes_R is None and not response.routed:
        return ()
    return (*(response.routed or [response.so_far] * bool(response.tokens)), part)


def without_routes(answer: Generation, request: GenerateRequest, engine: str) -> str | None:
    """Why the run must stop: ``answer`` lacks the routes that ``request`` asks for. None if it has them."""
    if request.routes is None or answer.routes_R is not None or not len(answer.token_ids_R):
        return None
    return (
        f"{engine}: answers without routes, which rollout.route_replay asks for: start an SGLang server with "
        "--enable-return-routed-experts --moe-runner-backend triton (on Blackwell the default kernel returns "
        "zeros), or set rollout.route_replay=off"
    )


def given_up(losses: int, name: str) -> str | None:
    """Why a response is given up after so many engine losses with its requests; None: it is sent again."""
    return f"{MOST_LOSSES} engines were lost with request {name!r}" if losses >= MOST_LOSSES else None


def _joined(response: Response, more: ResponseTokens) -> ResponseTokens:
    return ResponseTokens.joined([response.so_far, more] if response.tokens else [more])


def _counts(versions_R: np.ndarray) -> dict[int, int]:
    first = versions_R[:1]
    if (versions_R == first).all():  # the common case, several times as fast
        return dict.fromkeys(first.tolist(), len(versions_R))
    versions, counts = np.unique(versions_R, return_counts=True)
    return dict(zip(versions.tolist(), counts.tolist(), strict=True))
