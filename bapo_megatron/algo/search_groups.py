"""Search groups: the parts of an update that have clipping bounds of their own (``bounds_tokens``).

The rule reads the update's data alone, so groups are the same in every layout and with every pack length.
"""

from __future__ import annotations

import functools
from itertools import accumulate

import torch
from torch import Tensor

from bapo_megatron.algo.tokens import constant_on
from bapo_megatron.types import MicroBatch


@functools.lru_cache(maxsize=8)
def group_of_sequences(trained_tokens: tuple[int, ...], bounds_tokens: int) -> tuple[int, ...]:
    """The group of each sequence of an update: consecutive sequences, about ``bounds_tokens`` tokens a group.

    The update's tokens are divided into ``n = max(1, round(total / bounds_tokens))`` equal stretches, and a
    sequence belongs to the stretch that holds its middle. A sequence longer than a stretch may leave one
    empty, which then is no group.

    Args:
        trained_tokens: trained tokens of each sequence, in the order of the update.
        bounds_tokens: tokens of a group.

    Returns:
        For each sequence the number of its group, ascending from 0 without gaps.
    """
    total = sum(trained_tokens)
    stretches = max(1, round(total / bounds_tokens))
    ends = accumulate(trained_tokens)
    # Whole numbers: (end - tokens / 2) * stretches / total, without rounding.
    found = [
        min(stretches - 1, (2 * end - tokens) * stretches // max(1, 2 * total))
        for end, tokens in zip(ends, trained_tokens, strict=True)
    ]
    numbers = {stretch: number for number, stretch in enumerate(dict.fromkeys(found))}
    return tuple(numbers[stretch] for stretch in found)


def group_count(batch: MicroBatch, bounds_tokens: int) -> int:
    """Number of groups of the update that ``batch`` is a pack of."""
    return 1 + max(_groups(batch, bounds_tokens), default=0)


def group_of_tokens(batch: MicroBatch, bounds_tokens: int) -> Tensor:
    """The group of each token of a pack, int64 [T]; 0 for tokens that are not trained on."""
    table = constant_on(batch.sequence_T.device, (0, *_groups(batch, bounds_tokens)), torch.int64)
    return table[batch.sequence_T + 1]


def _groups(batch: MicroBatch, bounds_tokens: int) -> tuple[int, ...]:
    if len(batch.trained_tokens) != batch.sequences:
        raise ValueError(
            f"the pack knows the lengths of {len(batch.trained_tokens)} of {batch.sequences} sequences, "
            "which groups of bounds_tokens need: make it by pack_samples"
        )
    return group_of_sequences(batch.trained_tokens, bounds_tokens)
