"""The episode of a response in an environment: its turns, what it was given, what its environment said.

Pure data and functions, part of the state machine in ``response.py``. A response without an environment is an
episode of one turn. Used by ``dispatcher.py``, ``response.py``, ``turns.py`` and
``event_log/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from bapo_megatron.types import GIVEN, FinishReason, ResponseTokens

TURN: Literal["turn"] = "turn"
"""The reason of a segment that ends a turn of the model, but not the response: its environment answers."""

SegmentEnd = FinishReason | Literal["turn"]
"""Why a segment is the last of its turn, or of its response."""


@dataclass(frozen=True)
class Answer:
    """An environment's answer to a turn: the tokens that the model is given, or the end of the response.

    Made by ``TurnTaker``, and again from its record in the write-ahead log.
    """

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

    @property
    def tokens(self) -> ResponseTokens:
        """The given tokens with all columns: mask False, log-prob 0, and no version that sampled them."""
        count = len(self.token_ids_R)
        versions_R, mask_R = np.full(count, GIVEN, np.int32), np.zeros(count, np.bool_)
        return ResponseTokens(self.token_ids_R, np.zeros(count, np.float32), versions_R, loss_mask_R=mask_R)


@dataclass(frozen=True)
class Episode:
    """What a response has beside its tokens: the ends of its turns, and its environment's answers so far.

    Part of a ``Response``; ``turn_ended`` and ``answered`` make the next one.
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
        found = [reward for reward in self.rewards if reward is not None]
        return sum(found) if found else None

    @property
    def last_turn_start(self) -> int:
        """Tokens of the response before the model's last turn."""
        return max((end for end, text in self.turns if text is not None), default=0)


def turn_ended(episode: Episode, tokens: int, reason: SegmentEnd) -> Episode:
    """The episode after the end of a turn of the model, or of the response, at ``tokens`` tokens."""
    return replace(episode, turns=(*episode.turns, (tokens, None)), is_waiting=reason == TURN)


def answered(episode: Episode, tokens: int, answer: Answer) -> Episode:
    """The episode after its environment's answer, which brings the response to ``tokens`` tokens."""
    given = len(answer.token_ids_R)
    metrics = dict(episode.metrics)
    for name, value in answer.metrics.items():
        metrics[name] = metrics.get(name, 0.0) + value
    return replace(
        episode,
        turns=(*episode.turns, (tokens, answer.text)) if given else episode.turns,
        is_waiting=False,
        given_tokens=episode.given_tokens + given,
        rewards=(*episode.rewards, answer.reward),
        failure=answer.failure,
        detail=answer.detail,
        note=episode.note if answer.note is None else answer.note,
        metrics=metrics,
        seconds=episode.seconds + answer.seconds,
    )


def summary(episode: Episode) -> dict[str, Any]:
    """What the metrics of a step need of an episode, as JSON."""
    return {
        "turns": episode.sampled_turns,
        "given": episode.given_tokens,
        "rewards": list(episode.rewards),
        "failure": episode.failure,
        "metrics": dict(episode.metrics),
        "seconds": episode.seconds,
        "restarts": episode.restarts,
    }
