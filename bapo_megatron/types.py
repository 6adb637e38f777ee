"""The data types of a run: prompts, rollouts, groups, micro-batches, losses, weight broadcasts.

Plain data, which travels between folders, processes and files. Shapes (suffix of a name): ``_P`` tokens of a
prompt, ``_R`` tokens of a response, ``_T`` tokens of a pack. Token ids, log-probabilities and versions of a
rollout are numpy arrays: a list of Python integers costs ten times as much to send and to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

Metrics = dict[str, float | None]
"""Flat names to values, e.g. ``{"bapo/clip_high": 1.45}``; ``None`` where a value does not exist."""

FinishReason = Literal["stop", "length", "abort"]
"""Stop reason. `stop`: the model sampled a stop token. `length`: the response reached its limit of tokens.
`abort`: the engine ended the request early; the response is unfinished, and is continued."""


@dataclass(frozen=True)
class Prompt:
    """A problem, tokenized with the chat template; ``ground_truth`` to ``extra_info`` are for its reward.

    Made by ``data/prompts.py``, sampled from by the sampler.
    """

    prompt_id: int
    """Row number in the dataset file."""
    token_ids_P: np.ndarray
    """Token ids up to where the response begins, int32."""
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    opens_thinking: bool = False
    """Whether the chat template ends with ``<think>``, so that the response begins inside the thinking."""
    source: str = ""
    """Name of the source among ``data.sources``; empty for that of ``data.path``."""
    reward: str = ""
    """The reward function of its source; empty: ``reward.function``."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """The chat messages, role and content; none where they are no longer needed, in a journal."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one generation request.

    There is no top-p or top-k: the log-probs must be those of the sampled distribution. Part of a
    ``GenerateRequest``.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    """Seed of the draws: same seed, prefix and weights give the same tokens. SGLang ignores it."""


@dataclass(frozen=True)
class GenerateRequest:
    """A generation request: continue ``input_ids`` (a prompt, or a prompt and the response so far).

    The answer has the same ``request_id``. A long response takes several requests
    (``rollout.segment_tokens``). Made by the dispatcher and by evaluations, answered by ``Engine.generate``.
    """

    request_id: str
    input_ids: np.ndarray
    params: SamplingParams
    prefix_tokens: int = 0
    """Number of trailing input ids that are the response so far: the offset into the seeded draws."""


@dataclass(frozen=True)
class Generation:
    """An engine's answer to one request: a segment, the next tokens of a response, and why they end.

    Made by engines.
    """

    request_id: str
    token_ids_R: np.ndarray
    """Token ids, int32, with the stop token that ended the response."""
    log_probs_R: np.ndarray
    """Log-probs of the tokens, float32, natural log, of the softmax of logits / temperature."""
    versions_R: np.ndarray
    """Weight version that sampled each token, int32."""
    finish_reason: FinishReason


@dataclass(frozen=True)
class Rollout:
    """A finished response with the log-probs and weight versions of its tokens, and its reward.

    Assembled from one or several ``Generation``s, so its tokens may be of different weights. Made by the
    state of the sampler.
    """

    token_ids_R: np.ndarray
    log_probs_R: np.ndarray
    versions_R: np.ndarray
    finish_reason: FinishReason
    reward: float
    """With all penalties; ``reward.failed`` if the response could not be scored."""
    loss_mask_R: np.ndarray | None = None
    """Loss mask, bool: False for tokens that are not trained on, such as a tool's output. None: all True."""


@dataclass(frozen=True)
class Group:
    """A GRPO group: the ``G`` responses to one prompt (Algorithm 1 of BAPO, line 5), finished and scored.

    Made by the sampler; a ``StepBatch`` has those of a step.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True)
class StepBatch:
    """The training batch of one step: all its GRPO groups, and the metrics of its sampling.

    Equal on every rank: rank 0 gets it from the sampler and broadcasts it. Advantages and packs come later.
    """

    groups: tuple[Group, ...]
    metrics: Metrics


class TokenStats(NamedTuple):
    """Per-token log-probs and entropies of the policy at the rollout temperature, aligned with the labels.

    A ``TokenFn`` gets them with the ``MicroBatch`` of the same tokens: often only a chunk of a pack's. Made
    by the output layer; ``Passes.old_sums`` makes them of the old log-probs, without a forward pass.
    """

    log_prob_T: Tensor
    """log pi(label); differentiable in an update."""
    entropy_T: Tensor
    """Entropy of the next-token distribution, nats; never differentiable."""


class Column(NamedTuple):
    """The dtype of a per-token column of a pack, and its fill value for tokens that are not trained on.

    An annotation of ``MicroBatch``'s fields.
    """

    dtype: torch.dtype
    fill: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: one pack, in the ``thd`` layout of concatenated sequences (documents).

    Made by ``data.packing.pack_samples``, consumed by ``Policy``. The annotated fields are the table of
    per-token columns (``COLUMNS``). A column's value stands at the position of the token that *predicts* the
    token it is about. Prompts, padding, dummy packs (which even out the ranks' numbers of packs) and response
    tokens that a loss mask excludes hold fill values in every column but the ids and the position, so they
    count nowhere.

    Documents lie one after the other; document ``d`` takes ``cu_seqlens[d]:cu_seqlens[d + 1]``, the padding
    at its own end included. Padding at the end of the pack is cut into documents of its own.

    A new column is one field here, and one line in ``data.packing.trained_columns``, which gives its values.
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
    version_T: Annotated[Tensor, Column(torch.int32)]
    """Policy version that sampled the label."""
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
    groups (``algo/search_groups.py``). Empty in a pack that was not made by ``pack_samples``."""

    @classmethod
    def of(
        cls,
        cu_seqlens: tuple[int, ...],
        rows: tuple[tuple[int, int, int], ...] = (),
        sequences: int = 0,
        **columns: Tensor,
    ) -> MicroBatch:
        """A pack with these columns; every other column holds its fill value throughout."""
        filled = {n: torch.full((cu_seqlens[-1],), c.fill, dtype=c.dtype) for n, c in COLUMNS.items()}
        return cls(
            **filled | columns,
            cu_seqlens=cu_seqlens,
            rows=rows,
            sequences=sequences,
            sources=(),
            trained_tokens=(),
        )

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document."""
        return max(end - start for start, end in pairwise(self.cu_seqlens))

    def take(self, index: slice | Tensor) -> MicroBatch:
        """The tokens at ``index``, of every column alike; the other fields still describe the whole pack."""
        return self._each(lambda column_T: column_T[index])

    def to(self, device: torch.device) -> MicroBatch:
        """The micro-batch with every column on ``device``; copies may still be under way."""
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


@dataclass(frozen=True)
class PackLayout:
    """The packing constraints of a data-parallel rank: its share of the packs, and rules for their shape.

    ``Policy.pack_layout`` makes it, ``pack_samples`` obeys it. ValueError if its multiples contradict.
    """

    data_rank: int = 0
    """The data-parallel rank: which replica of the model this process belongs to."""
    data_size: int = 1
    """Replicas of the model; each has the same number of packs."""
    length_multiple: int = 1
    """The length of a pack is a multiple of this (TP under sequence parallelism); itself a multiple of
    ``document_multiple``."""
    count_multiple: int = 1
    """The number of packs of a replica is a multiple of this (PP in the interleaved schedule)."""
    document_multiple: int = 1
    """The length of each document is a multiple of this (2 CP under context parallelism)."""
    fixed_length: bool = False
    """Whether all packs of an update, on all ranks, have one length (interleaved schedule)."""
    quadratic: float = 0.0
    """Relative cost of attention: a document of n tokens costs n + quadratic n^2, in a token's linear work.
    A 32B model has 65 GFLOP for a token, and 0.655 MFLOP n for its attention: 1e-5."""

    def __post_init__(self) -> None:
        if self.length_multiple % self.document_multiple:
            raise ValueError(
                f"length_multiple={self.length_multiple} is no multiple of "
                f"document_multiple={self.document_multiple}"
            )


@dataclass(frozen=True)
class BroadcastGroup:
    """The process group of a weight broadcast: rendezvous address, size, backend. Rank 0 is the sender.

    Plain data: the sender makes it, and the receiving engines join by it.
    """

    address: str
    """Host of the sender, as the receivers reach it."""
    port: int
    name: str
    world_size: int
    """Number of ranks: the sender, and every tensor-parallel rank of every receiver."""
    backend: str
    """Communication backend: ``nccl`` or ``gloo``."""


@dataclass(frozen=True)
class BucketSpec:
    """The layout of a bucket, a byte buffer with several weight tensors, for its receivers.

    The tensors' bytes lie end to end, in this order, without gaps. Made by ``Buckets.cut``.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Types as torch names them, without ``torch.``."""
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


TokenFn = Callable[[TokenStats, MicroBatch], Tensor]
"""A loss or a measurement: a function from tokens to a vector that is additive over tokens, packs, ranks.
Element 0 of a loss is minimized; the others are sums for metrics."""


@dataclass(frozen=True)
class SearchedLoss:
    """A loss with parameters that are searched on the policy's log-probs first: the clipping bounds.

    ``UpdateLoss`` makes it, and ``Policy.update`` measures, builds the loss, and minimizes it.
    """

    measure: TokenFn
    """The sums that the search needs."""
    loss_of: Callable[[Tensor], TokenFn]
    """The loss, from the sums of ``measure``."""
    over: Literal["update", "micro_batch"]
    """The tokens that ``measure`` is summed over: those of the update (all activations are held until the
    sums are known), or those of the micro-batches that the replicas process at the same time."""


class UpdateResult(NamedTuple):
    """The result of an optimizer step, equal on every rank: sums of the loss, gradient norm, learning rate.

    Returned by ``Policy.update``. ``Objective.metrics`` makes metrics of the sums.
    """

    sums: Tensor
    """float64: the loss function's additive vector summed over the update; element 0 is the loss sum."""
    grad_norm: float
    learning_rate: float
