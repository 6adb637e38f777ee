"""Responses by hand: what engines and environments give them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bapo_megatron.rollout.sampler.response import Answer, Response, continued, given
from bapo_megatron.types import ResponseTokens, StepBatch


def segment(*ids: int, version: int = 1) -> ResponseTokens:
    """A segment; the log-prob of a token is minus a tenth of its id."""
    versions = np.full(len(ids), version, np.int32)
    return ResponseTokens(np.array(ids, np.int32), -np.array(ids, np.float32) / 10, versions)


def answer(*ids: int, **fields: Any) -> Answer:
    """An environment's answer."""
    return Answer(np.array(ids, np.int32), **fields)


def turn(response: Response, *ids: int) -> Response:
    """The response after a turn of the model."""
    return continued(response, segment(*ids), "turn")


def asked(response: Response, *ids: int, after: int | None = None) -> Response:
    """The response after an environment's answer."""
    return given(response, answer(*ids, text=str(ids), after=after))


class Row(NamedTuple):
    """A response of characters, or a branch of it."""

    text: str
    reason: str
    reward: float
    mask: str
    """1 for a token that is trained on, else -; empty without a mask."""
    versions: list[int]
    log_probs: list[float]
    branch: int
    has_prompt: bool


def rows_of(batch: StepBatch) -> list[list[Row]]:
    """The rows of each group."""
    return [
        [
            Row(
                "".join(map(chr, one.token_ids_R)),
                one.finish_reason,
                one.reward,
                "" if one.loss_mask_R is None else "".join("1" if x else "-" for x in one.loss_mask_R),
                one.versions_R.tolist(),
                one.log_probs_R.tolist(),
                one.branch,
                one.has_prompt,
            )
            for one in group.rollouts
        ]
        for group in batch.groups
    ]
