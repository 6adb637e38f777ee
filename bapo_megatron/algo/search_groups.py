"""Search groups: parts of an update with clipping bounds of their own, of about ``bounds_tokens`` tokens.

With ``algorithm.bounds.scope=micro_batch`` and ``bounds_tokens``. The groups depend on the update's data
alone: they are the same on every rank, in every layout and with every pack length. ValueError for a pack that
``data.packing.pack_samples`` has not made. ``losses/clip.py`` assigns each token to its group by this module.
"""

from __future__ import annotations

import functools
from itertools import accumulate

import torch
from torch import Tensor

from bapo_megatron.algo.tokens import constant_on
from bapo_megatron.tensor_types import MicroBatch


@functools.lru_cache(maxsize=8)
def group_of_sequences(trained_tokens: tuple[int, ...], bounds_tokens: int) -> tuple[int, ...]:
    """Search group of each sequence of an update: consecutive sequences, about ``bounds_tokens`` tokens each.

    The update's tokens are divided into ``n = max(1, round(total / bounds_tokens))`` equal intervals, and a
    sequence belongs to the interval that holds its middle. An interval without a sequence is no group.

    Args:
        trained_tokens: trained tokens of each sequence, in the order of the update.
        bounds_tokens: tokens of a group.

    Returns:
        For each sequence the number of its group, ascending from 0 without gaps.
    """
    total = sum(trained_tokens)
    intervals = max(1, round(total / bounds_tokens))
    ends = accumulate(trained_tokens)
    # In integers, so that no layout rounds differently: (end - tokens / 2) * intervals / total.
    found = [
        min(intervals - 1, (2 * end - tokens) * intervals // max(1, 2 * total))
        for end, tokens in zip(ends, trained_tokens, strict=True)
    ]
    numbers = {interval: number for number, interval in enumerate(dict.fromkeys(found))}
    return tuple(numbers[interval] for interval in found)


def group_count(batch: MicroBatch, bounds_tokens: int) -> int:
    """Number of search groups of the update that the pack ``batch`` belongs to."""
    return 1 + max(_groups(batch, bounds_tokens), default=0)


def group_of_tokens(batch: MicroBatch, bounds_tokens: int) -> Tensor:
    """Search group of each token of a pack, int64 [T]; 0 for tokens outside the loss."""
    table = constant_on(batch.sequence_T.device, (0, *_groups(batch, bounds_tokens)), torch.int64)
    return table[batch.sequence_T + 1]


def _groups(batch: MicroBatch, bounds_tokens: int) -> tuple[int, ...]:
    if len(batch.trained_tokens) != batch.sequences:
        raise ValueError(
            f"the pack knows the lengths of {len(batch.trained_tokens)} of {batch.sequences} sequences, "
            "which groups of bounds_tokens need: make it by pack_samples"
        )
    return group_of_sequences(batch.trained_tokens, bounds_tokens)
