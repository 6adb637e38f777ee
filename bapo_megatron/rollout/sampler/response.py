"""The state machine of one response: what it needs next, the request for it, and how an answer continues it.

    state       needs        event                               next state
    sampling    Tokens(n)    a segment without a finish reason   sampling
    sampling    Tokens(n)    a segment with a finish reason      complete
    complete    nothing

Pure functions on frozen data: no engine, no file, no clock. The dispatcher drives responses for training with
it (the write-ahead log is between an answer and ``continued``), ``whole_response.py`` those of evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from bapo_megatron.types import (
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


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of responses. Plain data."""

    temperature: float
    max_response_tokens: int
    seed: int
    """The seed of the run or evaluation, from which each response has its own (``request_seed``)."""
    stop_token_ids: tuple[int, ...]
    segment_tokens: int | None = None
    """Most tokens of one request; None: one request for the whole response."""
    routes: RouteShape | None = None
    """The shape of the routes that engines must return; None: none are asked for."""


@dataclass(frozen=True)
class Response:
    """State of one response that is being sampled: its tokens so far, and its finish reason when complete.

    Held by the open groups of the sampler's state, and by ``whole_response.py`` in evaluations; ``continued``
    makes the next one.
    """

    so_far: ResponseTokens = field(default_factory=lambda: ResponseTokens.joined([]))
    finish_reason: FinishReason | None = None
    """``stop`` or ``length`` of a complete response, else None."""
    tokens_by_version: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens by the weight version that sampled them."""
    routed: tuple[ResponseTokens, ...] = ()
    """The segments with their routes, from the first token on; empty while no route is known. ``so_far`` has
    none: joined at each segment, all routes so far would be copied each time."""

    @property
    def is_complete(self) -> bool:
        """Whether it needs nothing more, and can be scored."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return len(self.so_far.token_ids_R)

    def rollout(self, reward: float) -> Rollout:
        """The complete response with its reward."""
        assert self.finish_reason is not None
        columns = self.so_far.columns
        if self.routed:
            columns["routes_R"] = ResponseTokens.joined(self.routed).routes_R
        return Rollout(**columns, finish_reason=self.finish_reason, reward=reward)


@dataclass(frozen=True)
class Tokens:
    """A need: more tokens from an engine."""

    most: int
    """Most tokens of the next request; 0: none before new weights bring a new budget."""


def needs(response: Response, sampling: Sampling, budget: int | None = None) -> Tokens | None:
    """What the response needs next; None if it is complete.

    ``budget``: most tokens that it may still have from the current weights (``rollout.budget_tokens``).
    """
    if response.is_complete:
        return None
    limits = (sampling.max_response_tokens - response.tokens, sampling.segment_tokens, budget)
    return Tokens(max(0, min(limit for limit in limits if limit is not None)))


def next_request(
    response: Response, need: Tokens, sampling: Sampling, prompt: Prompt, name: str, seed: int
) -> GenerateRequest:
    """The request for the next segment: the prompt and the response so far.

    ``name``: of the response, unique; the request's id adds the place of the segment. ``seed``: of the
    response's draws, the same for all its segments.
    """
    ids = response.so_far.token_ids_R
    return GenerateRequest(
        request_id=f"{name}-{len(ids)}",
        input_ids=np.concatenate([prompt.token_ids_P, ids]),
        params=SamplingParams(sampling.temperature, need.most, sampling.stop_token_ids, seed),
        prefix_tokens=len(ids),
        routes=sampling.routes,
    )


def finish_reason_of(before: int, segment: ResponseTokens, sampling: Sampling) -> FinishReason | None:
    """The finish reason of a response with ``segment`` after its first ``before`` tokens; None: unfinished.

    From the tokens, whatever the engine reports: an abort may coincide with the stop token.
    """
    ids = segment.token_ids_R
    if len(ids) and ids[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if before + len(ids) >= sampling.max_response_tokens else None


def continued(response: Response, segment: ResponseTokens, finish_reason: FinishReason | None) -> Response:
    """The response with ``segment`` appended. ``finish_reason``: if the segment completes it."""
    by_version = dict(response.tokens_by_version)
    for version, count in _counts(segment.versions_R).items():
        by_version[version] = by_version.get(version, 0) + count
    routed = response.routed
    if segment.routes_R is not None or routed:
        routed = (*(routed or [response.so_far] * bool(response.tokens)), segment)
    plain = replace(segment, routes_R=None)
    joined = ResponseTokens.joined([response.so_far, plain] if response.tokens else [plain])
    return Response(joined, finish_reason, by_version, routed)


def foreign_weights(answer: Generation, is_known: Callable[[int], bool]) -> str | None:
    """Why an answer must not be used: a token of weights that are not ``is_known``. None if there is none."""
    for version in _counts(answer.versions_R):
        if not is_known(version):
            return f"answers with tokens of unknown weights {version}"
    return None


def without_routes(answer: Generation, request: GenerateRequest, engine: str) -> str | None:
    """Why the run must stop: ``answer`` lacks the routes that ``request`` asks for. None if it has them."""
    if request.routes is None or answer.routes_R is not None or not len(answer.token_ids_R):
        return None
    return (
        f"{engine}: answers without routes, which rollout.route_replay asks for: start an SGLang server with "
        "--enable-return-routed-experts, or set rollout.route_replay=off"
    )


def given_up(losses: int, name: str) -> str | None:
    """Why a response is given up after so many engine losses with its requests; None: it is sent again."""
    return f"{MOST_LOSSES} engines were lost with request {name!r}" if losses >= MOST_LOSSES else None


def _counts(versions_R: np.ndarray) -> dict[int, int]:
    """Number of tokens by version."""
    first = versions_R[:1]
    if (versions_R == first).all():  # the common case, several times as fast
        return dict.fromkeys(first.tolist(), len(versions_R))
    found, counts = np.unique(versions_R, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
