"""The seams of a run: what may be replaced, and what a replacement must do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from bapo_megatron.types import (
    BroadcastGroup,
    BucketSpec,
    GenerateRequest,
    Generation,
    MicroBatch,
    PackLayout,
    SearchedLoss,
    StepBatch,
    TokenFn,
    TokenStats,
    UpdateResult,
)

NamedTensors = Iterator[tuple[str, Tensor]]
"""Weights under their Hugging Face names."""

Confirm = Callable[[str], Awaitable[None]]
"""Takes the digest of an engine's weights. Raises if they are not what other engines have."""


class Saving(Protocol):
    """A checkpoint that is being written while the training goes on."""

    def is_written(self) -> bool:
        """Whether this rank's part is on disk, or has failed."""

    def finish(self) -> None:
        """Make the parts a whole, when all are written. Collective; raises if one has failed."""


class Policy(Protocol):
    """The trained model. Parallelism is its secret: callers see packs, sums and updates."""

    version: int
    """Optimizer steps made since the run began."""

    @property
    def data_rank(self) -> int:
        """Which replica of the model this process belongs to."""

    @property
    def pack_layout(self) -> PackLayout:
        """What packs this rank takes."""

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """Forward only: ``fn`` summed over the packs of all ranks, float64, equal on every rank."""

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """``token_sums`` as if the policy were pi_old, the ratio's denominator: no pass of the model."""

    def log_probs(self, batches: Sequence[MicroBatch]) -> list[TokenStats]:
        """Log-probs and entropies of this rank's packs, at the rollout temperature."""

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """``values`` added up over the model's replicas, on the CPU, equal on every rank. Collective.

        The ranks of one replica give the same values, and each replica is counted once.
        """

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn | SearchedLoss) -> UpdateResult:
        """One optimizer step on element 0 of ``loss``, divided by the update's count of unmasked tokens."""

    @property
    def learning_rate(self) -> float:
        """That of the last update, 0 before the first."""

    def optimizer_digest(self) -> list[float]:
        """A few sums over the optimizer's whole state, exact for one layout. Collective, equal everywhere."""

    def hf_weights(self) -> NamedTensors:
        """All weights, tensor by tensor. Every rank of a replica must run the iterator to its end."""

    def save(self, path: Path) -> Saving:
        """Begin to write model, optimizer and schedule as they are now. Collective."""

    def load(self, path: Path, version: int) -> None:
        """Read what ``save`` wrote at ``version``, at any layout. Collective."""


class Engine(Protocol):
    """Samples from a copy of the policy: one server, or a model in this process. Used within one event loop.

    tests/contract holds every engine to this contract. What fails raises; the engine's state is unknown then.
    """

    name: str
    """Its address, or what else tells it from others."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Answer one request. ValueError, before it is sent, if it is malformed."""

    async def abort(self) -> None:
        """End the requests in flight: they return what they have, with finish reason ``abort``."""

    async def pause(self) -> None:
        """Stop sampling after the token in hand; requests in flight wait."""

    async def resume(self) -> None:
        """Go on after ``pause``."""

    async def load(self, folder: Path, version: int, confirm: Confirm) -> None:
        """Take over the weights of an HF folder. Requests in flight go on; later tokens carry ``version``.

        No token is sampled from the new weights before ``confirm`` has returned.
        """

    async def weight_version(self) -> int:
        """The version given with the last weights that were taken over; 0 for those it started with."""

    async def is_alive(self) -> bool:
        """Whether it answers, also while it is paused. Never raises, never takes long."""

    async def close(self) -> None:
        """Release what it holds here. A server goes on."""


@runtime_checkable
class ReceivesBroadcast(Engine, Protocol):
    """An ``Engine`` that can also take weights by broadcast, bucket by bucket, from a process group's rank 0.

    In order: ``join_group`` once; then for each version ``begin_update``, ``receive`` for every bucket,
    ``end_update``, ``set_version``, ``resume_after_update``. What fails raises; its weights are unknown then.
    """

    broadcast_ranks: int
    """Ranks that it has in the group: its tensor parallel size."""

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """Leave the group, if it is in one of that name."""

    async def join_group(self, group: BroadcastGroup, first_rank: int, timeout_s: float) -> None:
        """Join the sender's group as ``first_rank`` and those that follow. Done when all have joined."""

    async def begin_update(self) -> None:
        """Stop sampling and be ready to receive. An update that a failure has left open is ended first."""

    async def receive(self, bucket: BucketSpec, group_name: str, timeout_s: float) -> None:
        """Take and load one bucket."""

    async def end_update(self, timeout_s: float) -> str:
        """All buckets came: the digest of the weights, as ``load`` gives it to ``confirm``."""

    async def set_version(self, version: int) -> None:
        """The weights that came have this version."""

    async def resume_after_update(self) -> None:
        """Sample again, unless ``pause`` holds. Requests in flight continue under the new weights."""


class Sampler(Protocol):
    """Turns prompts into finished, rewarded groups. Lives on rank 0."""

    def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Begin before ``first_step``, at the ``state`` of the checkpoint before it, if there is one."""

    def next_batch(self, step: int, wait_s: float) -> StepBatch | Literal["weights"] | None:
        """The groups that ``step`` trains on; None if they do not exist yet after ``wait_s`` seconds.

        ``weights``: no engine works, and one needs the present weights once more.

        The same step gets the same groups however often it is asked for, also after a restart.
        """

    def evaluated(self, step: int, wait_s: float) -> Path | Literal["weights"] | None:
        """The file of the responses to held-out problems at the weights of ``step``, like ``next_batch``."""

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Sample from the weights in ``folder``, which the updates of ``step`` have made."""

    def state(self) -> dict[str, Any]:
        """What a continuation needs; plain JSON."""

    def checkpointed(self, oldest: int) -> None:
        """A checkpoint is durable, and the oldest that is kept is of step ``oldest``.

        What no continuation from there needs may go.
        """

    def close(self) -> None:
        """End it."""


class WeightSync(Protocol):
    """Brings the policy's weights to the engines."""

    def push(self, policy: Policy, step: int) -> None:
        """Every engine that works samples from ``policy.version``, made by ``step``, after it. Collective."""
