"""Data types of a run: prompts, rollouts, groups, pack layouts, weight broadcasts.

The package's parts and processes exchange them, and step files store some. Shapes (name suffixes): ``_P``
prompt tokens, ``_R`` response tokens. Token columns are numpy arrays, because pickling lists takes more than
ten times as long. Imports no torch, which would slow the start of reward workers by seconds: the types with
tensors are in ``tensor_types.py``.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Protocol, get_origin, get_type_hints

import numpy as np

from bapo_megatron.step_header import ColumnFile as ColumnFile
from bapo_megatron.step_header import GroupHeader as GroupHeader
from bapo_megatron.step_header import ResponseHeader as ResponseHeader
from bapo_megatron.step_header import RouteShape as RouteShape
from bapo_megatron.step_header import StepHeader as StepHeader
from bapo_megatron.step_header import StoredRoutes as StoredRoutes
from bapo_megatron.step_header import VersionSpan as VersionSpan

Metrics = dict[str, float | None]
"""Flat metric names to values, e.g. ``{"bapo/clip_high": 1.45}``; ``None`` for a missing value."""

FinishReason = Literal["stop", "length", "abort", "turns", "failed"]
"""Stop reason. `stop`: the model sampled a stop token, or its environment ended the episode. `length`: the
response reached its token limit. `abort`: the engine ended the request early; the unfinished response is
continued. `turns`: `environment.max_turns`. `failed`: an environment step failed."""

GIVEN = -1
"""Version of tokens from an environment instead of a policy. Their loss mask is False, their log-prob 0."""


@dataclass(frozen=True)
class Prompt:
    """A problem of the dataset: its prompt, tokenized with the chat template, and what its reward function
    reads (ground truth, data source, extra info, messages)."""

    prompt_id: int
    """Row number in the dataset file."""
    token_ids_P: np.ndarray
    """Token ids before the response, int32."""
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    opens_thinking: bool = False
    """Whether the chat template ends with ``<think>``: the response then begins inside the thinking."""
    source: str = ""
    """Name of its source in ``data.sources``; empty for ``data.path``."""
    reward: str = ""
    """Reward function of its source; empty: ``reward.function``."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Chat messages with all fields of the row; empty in a journal, which does not need them."""
    turns: list[dict[str, str]] = field(default_factory=list)
    """For a reward in an environment: earlier turns, role (``assistant`` or ``environment``) and content."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. No top-p or top-k: log-probs must match the sampled distribution."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    """Seed: same seed, prefix and weights give the same tokens. SGLang ignores it."""


@dataclass(frozen=True)
class GenerateRequest:
    """Request to continue ``input_ids`` (a prompt, or a prompt and the response so far). The answer has the
    same ``request_id``. A long response takes several requests (``rollout.segment_tokens``)."""

    request_id: str
    input_ids: np.ndarray
    params: SamplingParams
    prefix_tokens: int = 0
    """Number of trailing input ids that belong to the response: the offset into the seeded draws."""
    routes: RouteShape | None = None
    """Shape of the routes in the answer (``rollout.route_replay``); None: no routes."""


class ResponseColumn(NamedTuple):
    """File format of a per-token response column: array name, dtype, default value, whether it has a file of
    its own. Annotates a field of ``ResponseTokens``."""

    array: str
    """Name of its array in step files and the write-ahead log."""
    dtype: type[np.generic] | None
    """None: the dtype of the values, which may have several dimensions."""
    fill: float | None = None
    """Value for the tokens of a response without the column, which makes it optional: its field may be None,
    and files have its array only if some response has it. -1 in an unsigned dtype is its largest value."""
    apart: bool = False
    """Whether a step stores it in a file of its own instead of the step file."""


@dataclass(frozen=True)
class _TokenIds:
    """Base class with one field, a response's token ids; a training sample joins them with the prompt's."""

    token_ids_R: Annotated[np.ndarray, ResponseColumn("token_ids", np.int32)]
    """Token ids, including the stop token that ended the response."""


@dataclass(frozen=True)
class ResponseColumns:
    """Per-token columns of a response besides its token ids, [R] each: log-probs, versions, loss mask,
    routes, teacher log-probs.

    A new column is one field here: segments, rollouts, samples, step files and the write-ahead log then have
    it. Engines supply its values (``rollout/engines/sglang/wire.py``, ``engines/local_decoding.py``);
    ``data.packing.trained_columns`` defines its use. Without a ``fill`` older files become unreadable.
    """

    log_probs_R: Annotated[np.ndarray, ResponseColumn("log_probs", np.float32)]
    """Log-probs of the tokens by their engine: natural log of softmax(logits / temperature)."""
    versions_R: Annotated[np.ndarray, ResponseColumn("versions", np.int32)]
    """Weight version that sampled each token; ``GIVEN`` for environment tokens."""
    loss_mask_R: Annotated[np.ndarray | None, ResponseColumn("loss_masks", np.bool_, fill=True)] = field(
        default=None, kw_only=True
    )
    """Loss mask: False for untrained tokens such as tool output. None: all True."""
    routes_R: Annotated[np.ndarray | None, ResponseColumn("routes", None, fill=-1, apart=True)] = field(
        default=None, kw_only=True
    )
    """Routes, the experts of each token, in the shape ``RouteShape``. None: unknown."""
    teacher_log_probs_R: Annotated[
        np.ndarray | None, ResponseColumn("teacher_log_probs", np.float32, fill=math.nan)
    ] = field(default=None, kw_only=True)
    """Log-probs under the frozen teacher, natural log, temperature 1. None without distillation."""


@dataclass(frozen=True)
class ResponseTokens(ResponseColumns, _TokenIds):
    """Tokens of a response, or of a part of it, with all per-token columns (``RESPONSE_COLUMNS``). Positional
    arguments: token ids, log-probs, versions."""

    @property
    def columns(self) -> dict[str, Any]:
        """The columns by field name, as keyword arguments of this class and its subclasses."""
        return {name: getattr(self, name) for name in RESPONSE_COLUMNS}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The columns by their names in files, without missing optional ones."""
        found = self.columns
        return {c.array: found[name] for name, c in RESPONSE_COLUMNS.items() if found[name] is not None}

    @staticmethod
    def joined(parts: Sequence[ResponseTokens]) -> ResponseTokens:
        """Return the concatenated tokens of ``parts``; an optional column is None if no part has it. Raises
        TypeError for values of another kind, ValueError for other shapes or not one value per token."""
        columns: dict[str, Any] = {name: _joined(name, c, parts) for name, c in RESPONSE_COLUMNS.items()}
        tokens = len(columns["token_ids_R"])
        for name, values in columns.items():
            if values is not None and len(values) != tokens:
                raise ValueError(f"{name} has {len(values)} values for {tokens} tokens; give one for each")
        return ResponseTokens(**columns)

    @staticmethod
    def split(arrays: Mapping[str, np.ndarray], lengths: Iterable[int]) -> Iterator[ResponseTokens]:
        """Yield the responses of these ``lengths``, as copies, from the concatenated ``arrays`` of a file.
        Raises KeyError if a required column is missing."""
        found = {
            name: arrays[column.array] if column.fill is None else arrays.get(column.array)
            for name, column in RESPONSE_COLUMNS.items()
        }
        at = 0
        for length in lengths:  # copies: a view would keep all arrays in memory
            end = at + length
            part: dict[str, Any] = {n: None if x is None else x[at:end].copy() for n, x in found.items()}
            yield ResponseTokens(**part)
            at = end


RESPONSE_COLUMNS: dict[str, ResponseColumn] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(ResponseTokens, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""Per-token columns of a response, by field: the annotated fields of ``ResponseTokens``."""


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
    """An engine's answer to one request: a segment (the next tokens of a response) and its finish reason."""

    request_id: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class Rollout(ResponseTokens):
    """A finished response with its reward and the log-probs and weight versions of its tokens. Step files
    store it within a ``Group``; training reads it as a ``Sample``. Its tokens may come from several weight
    versions, because it joins one or more ``Generation``s and an environment's answers."""

    finish_reason: FinishReason
    reward: float
    """Reward with all penalties; ``reward.failed`` if scoring failed and the response stays in its group."""
    stored_routes: StoredRoutes | None = None
    """Location of its routes, if it was read from a step file and they are known."""
    named_rewards: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, from functions that return them; ``reward`` is their sum, with penalties."""
    branch: int = 0
    """Its branch number within its episode; branches are consecutive, from 0."""
    has_prompt: bool = True
    """Whether it continues its group's prompt; otherwise its own prompt is among its tokens."""


@dataclass(frozen=True)
class Group:
    """GRPO group: the ``G`` finished and scored responses to one prompt (Algorithm 1 of BAPO, line 5). Fewer
    if some could not be scored; more rollouts than responses if episodes have branches."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True)
class StepBatch:
    """Training batch of one step: all its GRPO groups with tokens, and its sampling metrics. The content of a
    step file, except routes, which have a file of their own. A trainer rank holds the ``StepHeader`` instead
    and reads only its own samples from the file."""

    groups: tuple[Group, ...]
    metrics: Metrics


@dataclass(frozen=True)
class PackLayout:
    """Packing constraints of a data-parallel rank: its share of the packs and their shape, for
    ``pack_samples``."""

    data_rank: int = 0
    """Data-parallel rank: the replica of the model that holds this process."""
    data_size: int = 1
    """Number of model replicas; each has the same number of packs."""
    length_multiple: int = 1
    """Divides every pack's length (TP under sequence parallelism); a multiple of ``document_multiple``."""
    count_multiple: int = 1
    """Divides the number of packs per replica (PP in the interleaved schedule)."""
    document_multiple: int = 1
    """Divides the length of every document (2 CP under context parallelism)."""
    fixed_length: bool = False
    """Whether all packs of an update have one length, on all ranks (interleaved schedule)."""
    quadratic: float = 0.0
    """Relative cost of attention: a document of n tokens costs n + quadratic n^2, in units of a token's
    linear work. A 32B model: 65 GFLOP per token and 0.655 MFLOP n for its attention: 1e-5."""


@dataclass(frozen=True)
class BroadcastGroup:
    """Process group of a weight broadcast, as receivers need it to join: rendezvous address and port, name,
    world size, backend. The trainer is rank 0 and sends."""

    address: str
    """Sender's host, as the receivers reach it."""
    port: int
    name: str
    world_size: int
    """Number of ranks: the sender and every tensor-parallel rank of every receiver."""
    backend: str
    """Communication backend: ``nccl`` or ``gloo``."""


@dataclass(frozen=True)
class BucketSpec:
    """Layout of a bucket, a byte buffer with several weight tensors, for its receivers. The tensors' bytes
    are contiguous, in this order, without gaps."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """torch dtype names without ``torch.``."""
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


class SelfSendingPart(Protocol):
    """Part of new weights of a custom transport: ``send`` makes a server load it (docs/sglang.md)."""

    async def send(self, server: Any, timeout_s: float) -> None:
        """Make a server load the part through its client (such as ``SglangServer.load_part``). Runs in the
        sampler's process, which receives a pickle of the part."""


WeightPart = BucketSpec | Sequence[bytes] | SelfSendingPart
"""Part of a version's weights: the layout of a bucket that the sender broadcasts; a bucket's memory handles,
for each tensor-parallel rank a pickle of (name, tensor) pairs without data; or a part that sends itself."""

WeightParts = AsyncIterator[WeightPart]
"""Weights of one version for an engine, which requests a part after loading the previous one. The trainer may
reuse the memory of handles once the next part is loaded."""
