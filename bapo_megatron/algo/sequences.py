"""Sums and means per sequence of an update, for losses with a whole-response ratio and for rejection.

``sequence_sums`` returns, for a pack, a vector of length 2 S: the S sums ``sum_t log r_t`` (``r_t = pi /
pi_old`` of token t), then the S token counts. A pack may hold only part of a response (a chunk of the output
layer, a context-parallel share), so the caller first sums the vectors over packs and ranks; then
``sequence_means`` returns the mean log-ratio of each sequence, [S], and ``PerSequence`` gives each token its
sequence's value. Legend: ``_T`` tokens of a pack, ``_S`` sequences of the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bapo_megatron.tensor_types import MicroBatch, TokenStats


@torch.no_grad()
def sequence_sums(stats: TokenStats, batch: MicroBatch) -> Tensor:
    """Token function of ``sum_t log(pi / pi_old)`` (nats) and the token count per sequence, float64 [2 S]."""
    return sums_by_sequence(stats.log_prob_T - batch.old_log_prob_T, batch)


@torch.no_grad()
def sums_by_sequence(value_T: Tensor, batch: MicroBatch) -> Tensor:
    """Sum of ``value_T`` over each sequence, and its token count: float64 [2 S], additive; ignores masked."""
    live_T = batch.mask_T != 0
    pair = torch.stack([torch.where(live_T, value_T, 0.0).double(), live_T.double()])
    sums = pair.new_zeros(2, batch.sequences + 1)  # the first column is for tokens of no sequence
    return sums.index_add_(1, batch.sequence_T + 1, pair)[:, 1:].flatten()


def sequence_means(sums: Tensor) -> Tensor:
    """Mean of each sequence, sum / count, [S], from the (reduced) vector [2 S]; 0 without tokens. For
    ``sequence_sums``, the log of the geometric mean of the sequence's ratios."""
    totals_S, tokens_S = sums.chunk(2)
    return totals_S / tokens_S.clamp(min=1)


class PerSequence:
    """Table of an update's per-sequence values, [S]; ``of_tokens`` returns the value of each token of a pack,
    [T]. Keeps one copy per device, since a copy to a GPU makes the host wait and every chunk of a pack looks
    values up."""

    def __init__(self, values_S: Tensor) -> None:
        """``values_S``: float64 [S], in the order of ``batch.sequence_T``."""
        self.values_S = values_S
        # The zero is for tokens of no sequence, with index -1.
        first = torch.cat([values_S.new_zeros(1), values_S])
        self._copies = {first.device: first}

    def of_tokens(self, batch: MicroBatch) -> Tensor:
        """Value of each token's sequence, [T]; 0 where masked."""
        device = batch.mask_T.device
        if device not in self._copies:
            self._copies[device] = next(iter(self._copies.values())).to(device)
        values_T = self._copies[device][batch.sequence_T + 1]
        return torch.where(batch.mask_T != 0, values_T, 0.0)
