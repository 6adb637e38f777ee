"""The data types of a run that hold tensors: micro-batches, the statistics of their tokens, losses.

Apart from ``types.py``, which needs no torch: a reward worker, which imports ``types``, must start within a
second. Users may import these names from ``types``, too. Shapes (suffix of a name): ``_T`` tokens of a pack,
``_L`` layers, ``_K`` experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, get_origin, get_type_hints

import torch
from torch import Tensor


class TokenStats(NamedTuple):
    """Per-token log-probs and entropies of the policy at the rollout temperature, aligned with the labels.

    A ``TokenFn`` gets them with the ``MicroBatch`` of the same tokens: often only a chunk of a pack's.
    """

    log_prob_T: Tensor
    """log pi(label); differentiable in an update."""
    entropy_T: Tensor
    """Entropy of the next-token distribution, nats; differentiable for terms of the loss alone."""


class Column(NamedTuple):
    """The dtype of a per-token column of a pack, and its fill value for tokens that are not trained on."""

    dtype: torch.dtype
    fill: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: one pack, or a chunk of it, in the ``thd`` layout of concatenated sequences (documents).

    A column's value, but for input id and position, stands at the position of the token that *predicts* the
    token it is about. Prompts, padding, dummy packs (which even out the ranks' numbers of packs) and response
    tokens that a loss mask excludes hold fill values in every column but the ids and the position, so they
    count nowhere. A new column is one annotated field here (``COLUMNS``), and one line in
    ``data.packing.trained_columns``, which gives its values.

    Documents lie one after the other; document ``d`` takes ``cu_seqlens[d]:cu_seqlens[d + 1]``, the padding
    at its own end included. Padding at the end of the pack is cut into documents of its own.
    """

    token_T: Annotated[Tensor, Column(torch.int64)]
    """Input ids of the model."""
    label_T: Annotated[Tensor, Column(torch.int64)]
    """The id of the token after this one."""
    position_T: Annotated[Tensor, Column(torch.int64)]
    """Position in the document, for RoPE."""
    mask_T: Annotated[Tensor, Column(torch.float32)]
    """The loss mask: 1 where the label is a response token that is trained on, else 0."""
    weight_T: Annotated[Tensor, Column(torch.float32)]
    """The weight of the token in the loss (1 for a mean over tokens), its importance weight included."""
    advantage_T: Annotated[Tensor, Column(torch.float32)]
    """The advantage of the response that the label belongs to."""
    rollout_log_prob_T: Annotated[Tensor, Column(torch.float32)]
    """log pi_rollout(label), by the engine that sampled it."""
    old_log_prob_T: Annotated[Tensor, Column(torch.float32)]
    """log pi_old(label), the denominator of the loss's ratio: of pi_rollout, or of the trainer's policy at
    the start of the step."""
    reference_log_prob_T: Annotated[Tensor, Column(torch.float32)]
    """log pi_ref(label), by the frozen reference policy; 0 in a run without ``algorithm.reference_kl``."""
    teacher_log_prob_T: Annotated[Tensor, Column(torch.float32)]
    """log pi_teacher(label), at temperature 1; 0 in a run without ``algorithm.distillation``."""
    version_T: Annotated[Tensor, Column(torch.int32)]
    """Policy version that sampled the label."""
    oldest_version_T: Annotated[Tensor, Column(torch.int32)]
    """Oldest policy version that sampled the label, or a token before it in its response."""
    sequence_T: Annotated[Tensor, Column(torch.int64, fill=-1)]
    """Index of the label's sequence among the ``sequences`` of the update, unique over packs and replicas.

    The sum of a value over each sequence, of this rank's and chunk's tokens, is
    ``value_T.new_zeros(batch.sequences + 1).index_add_(0, batch.sequence_T + 1, value_T)[1:]``.
    Under context parallelism a rank holds only some tokens of a sequence, and the output layer hands a loss
    only a chunk of them at a time. The index is the same everywhere, so such sums, as elements of a
    ``TokenFn``'s vector, add up to those of whole sequences.
    """
    cu_seqlens: tuple[int, ...]
    """Bounds of the documents, cumulative, [documents + 1]."""
    rows: tuple[tuple[int, int, int], ...]
    """For each real document: index of its sample in the update, offset in the pack, predicting tokens
    (without the document's padding)."""
    sequences: int
    """Samples of the whole update, on all replicas."""
    sources: tuple[int, ...] = ()
    """The source of each of the ``sequences``, by its number among ``data.sources``; -1 for none of them.
    Empty in a run of one file."""
    trained_tokens: tuple[int, ...] = ()
    """Number of trained tokens of each of the ``sequences``, from which every rank computes the same search
    groups (``algo/losses/clip.py``). Empty in a pack that was not made by ``pack_samples``."""
    route_TLK: Tensor | None = None
    """The column of routes, the experts of each token in each layer, as they are stored (``RouteShape``): the
    row of a prompt's token, of padding, and of every other unknown route is the mark throughout. It stays on
    the host, for each model chunk to take its layers. None in all packs of an update without routes."""
    replays_routes: bool = True
    """Whether tokens with a route take its experts; else they are compared with the trainer's own choice."""

    @classmethod
    def of(
        cls,
        cu_seqlens: tuple[int, ...],
        rows: tuple[tuple[int, int, int], ...] = (),
        sequences: int = 0,
        **columns: Tensor,
    ) -> MicroBatch:
        """A pack with these columns; every other column holds its fill value throughout."""
        filled: dict[str, Any] = {
            n: torch.full((cu_seqlens[-1],), c.fill, dtype=c.dtype) for n, c in COLUMNS.items()
        }
        return cls(**filled | columns, cu_seqlens=cu_seqlens, rows=rows, sequences=sequences)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document."""
        return max(end - start for start, end in pairwise(self.cu_seqlens))

    def take(self, index: slice | Tensor) -> MicroBatch:
        """The tokens at ``index``, of every column alike; the other fields still describe the whole pack."""
        taken = self._each(lambda column_T: column_T[index])
        return taken if self.route_TLK is None else replace(taken, route_TLK=self.route_TLK[index])

    def to(self, device: torch.device) -> MicroBatch:
        """The micro-batch with every column but the routes on ``device``; copies may still be under way."""
        return self._each(lambda column_T: column_T.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        columns: dict[str, Any] = {name: change(getattr(self, name)) for name in COLUMNS}
        return replace(self, **columns)


COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(MicroBatch, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""The table of per-token columns: the annotated fields of ``MicroBatch``."""


TokenFn = Callable[[TokenStats, MicroBatch], Tensor]
"""A loss or a measurement: a function from tokens to a vector that is additive over tokens, packs, ranks.
Element 0 of a loss is minimized; the others are sums for metrics."""


@dataclass(frozen=True)
class SearchedLoss:
    """A loss with parameters that are searched on the policy's log-probs first, such as the clipping bounds.

    ``Policy.update`` measures, builds the loss, and minimizes it.
    """

    measure: TokenFn
    """The sums that the search needs."""
    loss_of: Callable[[Tensor], TokenFn]
    """The loss, from the sums of ``measure``."""
    over: Literal["update", "micro_batch"]
    """The tokens that ``measure`` is summed over: those of the update (all activations are held until the
    sums are known), or those of the micro-batches that the replicas process at the same time."""


class UpdateResult(NamedTuple):
    """The result of an optimizer step, equal on every rank: sums of the loss, gradient norm, rate."""

    sums: Tensor
    """float64: the loss function's additive vector summed over the update; element 0 is the loss sum."""
    grad_norm: float
    learning_rate: float
    routes: Tensor | None = None
    """float64 [7] of an update with routes, as ``trainer/checks.py`` reads them; else None."""
    experts: Tensor | None = None
    """float64 [layers, experts + 2] of a mixture of experts, by layer: tokens of each expert, tokens, sum of
    their router entropies in nats (``policy/experts.py``); else None."""
