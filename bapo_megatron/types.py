"""The data types of a run: prompts, rollouts, groups, layouts of packs, weight broadcasts.

Plain data, which travels between folders, processes and files. Shapes (suffix of a name): ``_P`` tokens of a
prompt, ``_R`` tokens of a response. Columns of tokens are numpy arrays: pickling a list of Python numbers
takes more than ten times as long. No torch, with which reward workers would take seconds to start: types that
hold tensors are in ``tensor_types.py``, and their names can be imported from here.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    get_origin,
    get_type_hints,
)

import numpy as np

from bapo_megatron.step_header import ColumnFile as ColumnFile
from bapo_megatron.step_header import GroupHeader as GroupHeader
from bapo_megatron.step_header import ResponseHeader as ResponseHeader
from bapo_megatron.step_header import RouteShape as RouteShape
from bapo_megatron.step_header import StepHeader as StepHeader
from bapo_megatron.step_header import StoredRoutes as StoredRoutes
from bapo_megatron.step_header import VersionSpan as VersionSpan

if TYPE_CHECKING:
    from bapo_megatron.tensor_types import COLUMNS as COLUMNS
    from bapo_megatron.tensor_types import Column as Column
    from bapo_megatron.tensor_types import MicroBatch as MicroBatch
    from bapo_megatron.tensor_types import SearchedLoss as SearchedLoss
    from bapo_megatron.tensor_types import TokenFn as TokenFn
    from bapo_megatron.tensor_types import TokenStats as TokenStats
    from bapo_megatron.tensor_types import UpdateResult as UpdateResult

_WITH_TENSORS = ("COLUMNS", "Column", "MicroBatch", "SearchedLoss", "TokenFn", "TokenStats", "UpdateResult")

Metrics = dict[str, float | None]
"""Flat names to values, e.g. ``{"bapo/clip_high": 1.45}``; ``None`` where a value does not exist."""

FinishReason = Literal["stop", "length", "abort", "turns", "failed"]
"""Stop reason. `stop`: the model sampled a stop token, or its environment ended the episode. `length`: the
response reached its limit of tokens. `abort`: the engine ended the request early; the response is unfinished,
and is continued. `turns`: `environment.max_turns`. `failed`: a step of its environment failed."""

GIVEN = -1
"""Version of tokens that an environment gave: no policy sampled them. Their loss mask is False, and their
log-prob 0."""


@dataclass(frozen=True)
class Prompt:
    """A problem, tokenized with the chat template; ``ground_truth`` to ``extra_info`` are for its reward."""

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
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The chat messages, with all fields of the row; none where they are no longer needed, in a journal."""
    turns: list[dict[str, str]] = field(default_factory=list)
    """For a reward in an environment: the turns before the one that is judged, role (``assistant`` or
    ``environment``) and content."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one generation request.

    There is no top-p or top-k: the log-probs must be those of the sampled distribution.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    """Seed of the draws: same seed, prefix and weights give the same tokens. SGLang ignores it."""


@dataclass(frozen=True)
class GenerateRequest:
    """A generation request: continue ``input_ids`` (a prompt, or a prompt and the response so far).

    The answer has the same ``request_id``. A long response takes several (``rollout.segment_tokens``).
    """

    request_id: str
    input_ids: np.ndarray
    params: SamplingParams
    prefix_tokens: int = 0
    """Number of trailing input ids that are the response so far: the offset into the seeded draws."""
    routes: RouteShape | None = None
    """The shape of the routes that the answer must have (``rollout.route_replay``); None: it needs none."""


class ResponseColumn(NamedTuple):
    """A per-token column of a response in files: an annotation of the fields of ``ResponseTokens``."""

    array: str
    """Name of its array in the step files and in the write-ahead log."""
    dtype: type[np.generic] | None
    """None: that of the values, which may have more dimensions than one."""
    fill: float | None = None
    """The value for each token of a response without the column, and the mark of an optional column: its
    field may be None, and files have its array only if some response has the column. As unsigned numbers
    have it: -1 is their largest."""
    apart: bool = False
    """Whether a step has a file of its own for it, and the step file has not."""


@dataclass(frozen=True)
class _TokenIds:
    """The first column: apart from the others, because a training sample has its own with the prompt's."""

    token_ids_R: Annotated[np.ndarray, ResponseColumn("token_ids", np.int32)]
    """Token ids, with the stop token that ended the response."""


@dataclass(frozen=True)
class ResponseColumns:
    """The per-token columns of a response beside its token ids, [R] each.

    A new column is one field here: segments, rollouts, samples, step files and the write-ahead log then have
    it. The engines give its values (``rollout/engines/sglang/wire.py``, ``engines/local_decoding.py``), and
    ``data.packing.trained_columns`` says what training makes of it. It must have a ``fill``, or files of
    earlier versions could not be read.
    """

    log_probs_R: Annotated[np.ndarray, ResponseColumn("log_probs", np.float32)]
    """Log-probs of the tokens, natural log, of the softmax of logits / temperature, by their engine."""
    versions_R: Annotated[np.ndarray, ResponseColumn("versions", np.int32)]
    """Weight version that sampled each token; ``GIVEN`` where an environment gave it."""
    loss_mask_R: Annotated[np.ndarray | None, ResponseColumn("loss_masks", np.bool_, fill=True)] = field(
        default=None, kw_only=True
    )
    """Loss mask: False for tokens that are not trained on, such as a tool's output. None: all True."""
    routes_R: Annotated[np.ndarray | None, ResponseColumn("routes", None, fill=-1, apart=True)] = field(
        default=None, kw_only=True
    )
    """Routes: the experts of each token, as of ``RouteShape``. None: unknown."""
    teacher_log_probs_R: Annotated[
        np.ndarray | None, ResponseColumn("teacher_log_probs", np.float32, fill=math.nan)
    ] = field(default=None, kw_only=True)
    """Log-probs under the frozen teacher, natural log, temperature 1. None without distillation."""


@dataclass(frozen=True)
class ResponseTokens(ResponseColumns, _TokenIds):
    """The tokens of a response, or of a part of it, with all per-token columns (``RESPONSE_COLUMNS``).

    Positional arguments: token ids, log-probs, versions.
    """

    @property
    def columns(self) -> dict[str, Any]:
        """The columns by field: keyword arguments of this class and of those made from it."""
        return {name: getattr(self, name) for name in RESPONSE_COLUMNS}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The columns as files have them, by their names there; without optional ones that it lacks."""
        found = self.columns
        return {c.array: found[name] for name, c in RESPONSE_COLUMNS.items() if found[name] is not None}

    def first(self, count: int) -> Self:
        """The same with its first ``count`` tokens."""
        kept: dict[str, Any] = {n: None if x is None else x[:count] for n, x in self.columns.items()}
        return replace(self, **kept)

    @staticmethod
    def joined(parts: Sequence[ResponseTokens]) -> ResponseTokens:
        """The tokens of ``parts`` end to end. TypeError for a column with values of another kind.

        An optional column is None if no part has it. ValueError if a column has not one value for each token:
        all later tokens would get the values of others.
        """
        columns: dict[str, Any] = {name: _joined(name, c, parts) for name, c in RESPONSE_COLUMNS.items()}
        tokens = len(columns["token_ids_R"])
        for name, values in columns.items():
            if values is not None and len(values) != tokens:
                raise ValueError(f"{name} has {len(values)} values for {tokens} tokens; give one for each")
        return ResponseTokens(**columns)

    @staticmethod
    def split(arrays: Mapping[str, np.ndarray], lengths: Iterable[int]) -> Iterator[ResponseTokens]:
        """The responses of these ``lengths`` that lie end to end in the ``arrays`` of a file: copies.

        KeyError if a column is missing that is not optional.
        """
        found = {
            name: arrays[column.array] if column.fill is None else arrays.get(column.array)
            for name, column in RESPONSE_COLUMNS.items()
        }
        at = 0
        for length in lengths:  # copies: a view would hold the memory of all
            end = at + length
            part: dict[str, Any] = {n: None if x is None else x[at:end].copy() for n, x in found.items()}
            yield ResponseTokens(**part)
            at = end


RESPONSE_COLUMNS: dict[str, ResponseColumn] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(ResponseTokens, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""The table of a response's per-token columns, by field: the annotated fields of ``ResponseTokens``."""


def _joined(name: str, column: ResponseColumn, parts: Sequence[ResponseTokens]) -> np.ndarray | None:
    values = [getattr(part, name) for part in parts]
    dtype = column.dtype
    if column.fill is not None:
        known = [value for value in values if value is not None]
        if not known:
            return None
        if dtype is None:
            dtype = known[0].dtype.type
            if len({(value.dtype, value.shape[1:]) for value in known}) > 1:
                raise ValueError(f"{name}: the values of some tokens have another shape or type")
        fill = np.asarray(column.fill).astype(dtype)
        values = [
            np.full((len(part.token_ids_R), *known[0].shape[1:]), fill) if value is None else value
            for part, value in zip(parts, values, strict=True)
        ]
    if not values:
        return np.zeros(0, dtype)
    joined = values[0] if len(values) == 1 else np.concatenate(values)
    return joined.astype(dtype, casting="same_kind", copy=False)


@dataclass(frozen=True, kw_only=True)
class Generation(ResponseTokens):
    """An engine's answer to one request: a segment, the next tokens of a response, and why they end."""

    request_id: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class Rollout(ResponseTokens):
    """A finished response with the log-probs and weight versions of its tokens, and its reward.

    What a step's file stores, within a ``Group``, and training reads as a ``Sample``. Assembled from one or
    several ``Generation``s and, in an environment, its answers, so its tokens may be of different weights.
    """

    finish_reason: FinishReason
    reward: float
    """With all penalties; ``reward.failed`` if it could not be scored and is not left out of its group."""
    stored_routes: StoredRoutes | None = None
    """Where its routes are, if it was read from a step's file and they are known."""
    named_rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards of a function that gives several by name; ``reward`` is their sum, with penalties."""
    branch: int = 0
    """Number of the branch of its episode that it is; an episode's branches follow each other, from 0."""
    has_prompt: bool = True
    """Whether it continues the prompt of its group; if not, its own prompt is among its tokens."""


@dataclass(frozen=True)
class Group:
    """A GRPO group: the ``G`` responses to one prompt (Algorithm 1 of BAPO, line 5), finished and scored.

    Fewer where some could not be scored; more rollouts than responses where episodes have branches.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True)
class StepBatch:
    """The training batch of one step: all its GRPO groups, and the metrics of its sampling.

    The content of a step's file; routes are in a file of their own. A rank of the trainer has the
    ``StepHeader`` alone, and reads its own samples.
    """

    groups: tuple[Group, ...]
    metrics: Metrics


@dataclass(frozen=True)
class PackLayout:
    """The packing constraints of a data-parallel rank: its share of the packs, and rules for their shape.

    ``pack_samples`` obeys it. ValueError if its multiples contradict.
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
                f"length_multiple={self.length_multiple} is not a multiple of "
                f"document_multiple={self.document_multiple}"
            )


@dataclass(frozen=True)
class BroadcastGroup:
    """The process group of a weight broadcast: rendezvous address, size, backend. Rank 0 is the sender."""

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

    The tensors' bytes lie end to end, in this order, without gaps.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Types as torch names them, without ``torch.``."""
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


class SelfSendingPart(Protocol):
    """A part of new weights that says how a server gets it, for your own transport (docs/sglang.md)."""

    async def send(self, server: Any, timeout_s: float) -> None:
        """Have a server load the part, by its client (``SglangServer.load_part``, say). In the sampler's
        process, which gets a pickle of the part."""


WeightPart = BucketSpec | Sequence[bytes] | SelfSendingPart
"""A part of a version's weights: the layout of a bucket that the sender broadcasts; or a bucket's memory
handles, for each tensor-parallel rank a pickle of (name, tensor) pairs without data; or one that sends
itself."""

WeightParts = AsyncIterator[WeightPart]
"""The weights of one version, for an engine, which asks for a part when it has loaded the one before. The
trainer may reuse the memory of handles when the part after them was loaded."""


def __getattr__(name: str) -> Any:
    """The types that hold tensors, at their first use: only then is torch imported (PEP 562)."""
    if name in _WITH_TENSORS:
        return getattr(import_module("bapo_megatron.tensor_types"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
