"""State machine of one response: what it needs next, the request for it, and the state after the answer.

    state       needs               event                               next state
    sampling    an engine           a segment without a reason          sampling
    sampling    an engine           a segment with a finish reason      complete
    sampling    an engine           a segment with the reason `turn`    waiting
    waiting     its environment     an answer with tokens               sampling
    waiting     its environment     an answer with a finish reason      complete
    waiting     its environment     ``restarted``                       sampling, without tokens
    complete    nothing

``continued``, ``given`` and ``restarted`` return its next state, ``next_request`` the request to an engine.
Only responses in an environment wait; without one, a response is an *episode* of a single turn. An episode's
turns may form a tree (``branches.py``); sampling continues its last branch. Pure functions on frozen data: no
engine, file or clock. Training responses go through the write-ahead log before each next state, evaluations
do not.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""Engine losses after which a response is given up, because its request may crash engines."""

TURN: Literal["turn"] = "turn"
"""End reason of a segment that ends a model turn, which an environment answers, but not the response."""

SegmentEnd = FinishReason | Literal["turn"]
"""Why a segment ends its turn or its response."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of responses: temperature, seed, stop tokens, length limits."""

    temperature: float
    max_response_tokens: int
    seed: int
    """Seed of the run or evaluation; ``request_seed`` derives each response's seed from it."""
    stop_token_ids: tuple[int, ...]
    segment_tokens: int | None = None
    """Maximum tokens per request; None: no limit."""
    routes: RouteShape | None = None
    """Shape of the routes that engines must return; None: no routes."""
    in_environment: bool = False
    """Whether a stop token ends only a turn, which an environment answers."""


@dataclass(frozen=True)
class Answer:
    """An environment's answer to a turn, tokenized: tokens given to the model, or the reason why the response
    ends; also the step's reward, note, metrics, time in seconds, and failure."""

    token_ids_R: np.ndarray
    """int32; empty if the response ends."""
    text: str = ""
    """The observation as the environment returned it; empty if the response ends."""
    finish_reason: FinishReason | None = None
    """Finish reason if the response ends, otherwise None."""
    reward: float | None = None
    failure: str | None = None
    """Kind of failure if the step failed."""
    detail: str = ""
    note: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    after: int | None = None
    """Parent turn of a new branch, as in ``Fork``; None: the tokens follow the last turn."""
    rewritten: bool = False
    """Whether the branch starts because the chat template renders earlier turns differently."""

    @property
    def tokens(self) -> ResponseTokens:
        """The given tokens with all columns: mask False, log-prob 0, version GIVEN."""
        count = len(self.token_ids_R)
        versions_R, mask_R = np.full(count, GIVEN, np.int32), np.zeros(count, np.bool_)
        return ResponseTokens(self.token_ids_R, np.zeros(count, np.float32), versions_R, loss_mask_R=mask_R)


@dataclass(frozen=True)
class Episode:
    """Turns of a ``Response``: where each ends and the text of given ones, forks, and what its environment
    returned (each answer's reward; sums of metrics and seconds; failure; last note)."""

    turns: tuple[tuple[int, str | None], ...] = ()
    """For each finished turn: response tokens up to its end; text of a given turn, None of a sampled one."""
    is_waiting: bool = False
    """Whether the model's turn has ended and awaits the environment's answer."""
    given_tokens: int = 0
    rewards: tuple[float | None, ...] = ()
    failure: str | None = None
    detail: str = ""
    note: Any = None
    """The environment's last note."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Sums over all answers, by name."""
    seconds: float = 0.0
    """Total step time."""
    restarts: int = 0
    forks: tuple[Fork, ...] = ()
    """Given turns that do not follow the previous turn."""
    rewritten: int = 0
    """Number of forks caused by the chat template."""

    @property
    def steps(self) -> int:
        return len(self.rewards)

    @property
    def sampled_turns(self) -> int:
        """Number of finished model turns."""
        return sum(text is None for _, text in self.turns)

    @property
    def reward(self) -> float | None:
        """Sum of the environment's rewards; None without any, so that ``reward.function`` judges."""
        rewards = [reward for reward in self.rewards if reward is not None]
        return sum(rewards) if rewards else None

    @property
    def last_turn_start(self) -> int:
        """Number of response tokens before the model's last turn."""
        return max((end for end, text in self.turns if text is not None), default=0)


@dataclass(frozen=True)
class Response:
    """State of one response, immutable: its tokens so far, its episode, and its finish reason when complete.
    ``continued``, ``given`` and ``restarted`` return the next state, ``rollouts`` the training samples."""

    so_far: ResponseTokens = field(default_factory=lambda: ResponseTokens.joined([]))
    finish_reason: FinishReason | None = None
    """None while incomplete."""
    tokens_by_version: Mapping[int, int] = field(default_factory=dict)
    """Number of sampled tokens by weight version."""
    episode: Episode = field(default_factory=Episode)
    routed: tuple[ResponseTokens, ...] = ()
    """All parts with their routes, from the first token; empty while no routes are known. Separate from
    ``so_far``, whose joining at each segment would copy all earlier routes."""

    @property
    def is_sampling(self) -> bool:
        return not self.is_complete and not self.episode.is_waiting

    @property
    def is_complete(self) -> bool:
        """Whether it has finished and can be scored."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> int:
        """Number of tokens so far, sampled and given."""
        return len(self.so_far.token_ids_R)

    @property
    def sampled_tokens(self) -> int:
        return self.tokens - self.episode.given_tokens

    @property
    def longest_sampled(self) -> int:
        """Maximum number of sampled tokens in a branch, for length penalties."""
        if not self.episode.forks:
            return self.sampled_tokens
        is_sampled_N = self.so_far.versions_R != GIVEN
        return max(int(branch.of(is_sampled_N).sum()) for branch in self.tree.branches)

    @property
    def last_turn_R(self) -> np.ndarray:
        """Token ids of the model's last turn, which the reward function judges."""
        ids_R: np.ndarray = self.so_far.token_ids_R[self.episode.last_turn_start :]
        return ids_R

    @property
    def tree(self) -> Tree:
        return Tree.of([end for end, _ in self.episode.turns], self.episode.forks, self.tokens)

    @property
    def branch(self) -> Branch:
        """The branch of the last turn (all tokens without forks), which the next request continues."""
        return self.tree.last if self.episode.forks else Branch(True, ((0, self.tokens),))

    def rollouts(
        self,
        reward: float,
        teacher_log_probs: Sequence[np.ndarray] | None = None,
        named_rewards: Mapping[str, float] | None = None,
    ) -> list[Rollout]:
        """Return the complete response as one rollout per branch; a token is trained on only in the first
        branch that has it. ``teacher_log_probs``: per branch, in distillation."""
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


def most_tokens(response: Response, sampling: Sampling, budget: int | None = None) -> int:
    """Return the maximum tokens of a sampling response's next request; 0: it waits for new weights.
    ``budget``: tokens that it may still get from the current weights (``rollout.budget_tokens``)."""
    limits = (sampling.max_response_tokens - response.branch.tokens, sampling.segment_tokens, budget)
    return max(0, min(limit for limit in limits if limit is not None))


def next_request(
    response: Response, most: int, sampling: Sampling, prompt: Prompt, name: str, seed: int
) -> GenerateRequest:
    """Return the request for the next segment: the prompt and the response so far. ``most``: maximum tokens.
    ``name``: unique response name; the request id appends the segment's position. ``seed``: the same for all
    segments."""
    return GenerateRequest(
        request_id=f"{name}-{response.tokens}",
        input_ids=branch_ids(response, response.branch, prompt),
        params=SamplingParams(sampling.temperature, most, sampling.stop_token_ids, _own(seed, response)),
        prefix_tokens=response.branch.tokens,
        routes=sampling.routes,
    )


def _own(seed: int, response: Response) -> int:
    """Return the sampling seed; in an episode with branches, a turn's seed, derived from its context.
    Questions asked together get the same draws in any order; a repeated question gets different ones."""
    episode = response.episode
    if not episode.forks:
        return seed
    start, turn = episode.last_turn_start, len(episode.turns) - 1
    before_N = response.so_far.token_ids_R[:start]
    context = Tree.of([end for end, _ in episode.turns], episode.forks, start).to(turn).of(before_N)
    asked = [(after, episode.turns[number][1]) for number, after in episode.forks]
    return seed ^ (zlib.crc32(context.tobytes(), asked.count(asked[-1])) & 0x7FFFFFFF)


def branch_ids(response: Response, branch: Branch, prompt: Prompt) -> np.ndarray:
    """Return a branch's token ids, preceded by the dataset's prompt if the branch has it."""
    ids = branch.of(response.so_far.token_ids_R)
    return np.concatenate([prompt.token_ids_P, ids]) if branch.has_prompt else ids


def finish_reason_of(before: int, segment: ResponseTokens, sampling: Sampling) -> SegmentEnd | None:
    """Return the end reason of ``segment`` after ``before`` tokens of its branch; None: unfinished. Derived
    from the tokens, not from the engine's report, because an abort may coincide with the stop token."""
    ids = segment.token_ids_R
    if len(ids) and ids[-1] in sampling.stop_token_ids:
        return TURN if sampling.in_environment else "stop"
    return "length" if before + len(ids) >= sampling.max_response_tokens else None


def continued(response: Response, segment: ResponseTokens, reason: SegmentEnd | None) -> Response:
    """Return the response with ``segment`` appended. ``reason``: why the segment ends response or turn."""
    by_version = dict(response.tokens_by_version)
    for version, count in _counts(segment.versions_R).items():
        by_version[version] = by_version.get(version, 0) + count
    joined, episode = _joined(response, replace(segment, routes_R=None)), response.episode
    if reason is not None:
        episode = _turn_ended(episode, len(joined.token_ids_R), reason)
    routed = _routed(response, segment)
    return Response(joined, None if reason == TURN else reason, by_version, episode, routed)


def given(response: Response, answer: Answer) -> Response:
    """Return the response after its environment's answer, which adds tokens or completes it."""
    joined, routed = response.so_far, response.routed
    if len(answer.token_ids_R):
        joined, routed = _joined(response, answer.tokens), _routed(response, answer.tokens)
    episode = _answered(response.episode, len(joined.token_ids_R), answer)
    return replace(
        response, so_far=joined, finish_reason=answer.finish_reason, episode=episode, routed=routed
    )


def restarted(response: Response) -> Response:
    """Return the response without tokens, to be sampled anew: its environment cannot be restored."""
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
    """Return the part of a response's episode that step metrics need, as JSON values."""
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
    """Return ``Response.routed`` extended by ``part``; routes of given tokens are unknown."""
    if part.routes_R is None and not response.routed:
        return ()
    return (*(response.routed or [response.so_far] * bool(response.tokens)), part)


def without_routes(answer: Generation, request: GenerateRequest, engine: str) -> str | None:
    """Return an error message if ``answer`` lacks the routes that ``request`` requires, otherwise None."""
    if request.routes is None or answer.routes_R is not None or not len(answer.token_ids_R):
        return None
    return (
        f"{engine}: answers without routes, which rollout.route_replay asks for: start an SGLang server with "
        "--enable-return-routed-experts --moe-runner-backend triton (on Blackwell the default kernel returns "
        "zeros), or set rollout.route_replay=off"
    )


def given_up(losses: int, name: str) -> str | None:
    """Return why a response is given up after ``losses`` engine losses; None: send its request again."""
    return f"{MOST_LOSSES} engines were lost with request {name!r}" if losses >= MOST_LOSSES else None


def _joined(response: Response, more: ResponseTokens) -> ResponseTokens:
    return ResponseTokens.joined([response.so_far, more] if response.tokens else [more])


def _counts(versions_R: np.ndarray) -> dict[int, int]:
    first = versions_R[:1]
    if (versions_R == first).all():  # common case, several times faster
        return dict.fromkeys(first.tolist(), len(versions_R))
    versions, counts = np.unique(versions_R, return_counts=True)
    return dict(zip(versions.tolist(), counts.tolist(), strict=True))
