"""The protocols of a run (policy, engine, sampler, weight sync): what may be replaced, and its contract."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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
"""A digest check: takes the digest of an engine's weights, raises if other engines have other weights."""


class Saving(Protocol):
    """An asynchronous checkpoint write: training goes on while it is under way."""

    def is_written(self) -> bool:
        """Whether this rank's part is on disk, or has failed."""

    def finish(self) -> None:
        """Make the parts a checkpoint, when all are written. Collective; raises if one has failed."""


class Policy(Protocol):
    """The trained model behind its parallelism: callers see packs, sums and updates."""

    version: int
    """Optimizer steps made since the run began."""

    @property
    def data_rank(self) -> int:
        """The data-parallel rank: which replica of the model this process belongs to."""

    @property
    def pack_layout(self) -> PackLayout:
        """The constraints of this rank's packs."""

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """``fn`` summed over the packs of all ranks by a forward pass: float64, equal on every rank."""

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """``token_sums`` of pi_old's log-probs, which the packs hold: no pass of the model."""

    def log_probs(self, batches: Sequence[MicroBatch], trained_only: bool = False) -> list[TokenStats]:
        """Log-probs and entropies of this rank's packs, at the rollout temperature.

        ``trained_only``: zeros for tokens whose mask is 0.
        """

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """``values`` added up over the model's replicas, on the CPU, equal on every rank. Collective.

        The ranks of one replica give the same values, and each replica is counted once.
        """

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn | SearchedLoss) -> UpdateResult:
        """One optimizer step on element 0 of ``loss``, divided by the update's count of unmasked tokens."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last update, 0 before the first."""

    def state_digest(self) -> dict[str, list[str]]:
        """Digests of the bits of weights and optimizer, the same at every layout; equal on every rank.

        A name has one digest where all copies agree, else also those of the copies that differ. Collective.
        """

    def hf_weights(self) -> NamedTensors:
        """All weights, whole, tensor by tensor. Every rank of a replica must run the iterator to its end."""

    def offload(self, keep_weights: bool = False) -> int:
        """Give up the device's memory while engines sample on it; the bytes that are freed.

        The host keeps what is needed. Until ``reload`` whatever reads weights or optimizer raises
        RuntimeError. ``keep_weights``: ``hf_weights`` still works, until a second call without it. A
        checkpoint that is being written is not disturbed. Does nothing where the memory is given up already.
        """

    def reload(self) -> None:
        """Undo ``offload``, bit for bit. Does nothing if it was not called."""

    def save(self, path: Path) -> Saving:
        """Begin to write a checkpoint of model, optimizer and schedule as they are now. Collective."""

    def load(self, path: Path, version: int) -> None:
        """Read what ``save`` wrote at ``version``, at any layout. Collective."""


class Engine(Protocol):
    """An inference engine with a copy of the policy's weights: one server, or a model in this process.

    All calls come from one event loop. tests/contract holds every engine to this contract. A call that fails
    raises; the engine's state is unknown then.
    """

    name: str
    """Address of the server, or another name that tells the engine from others."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample the answer to one request. ValueError, before it is sent, if it is malformed."""

    async def abort(self) -> None:
        """Abort the requests in flight: they return what they have, with finish reason ``abort``."""

    async def pause(self) -> None:
        """Stop sampling after the token in hand; requests in flight wait."""

    async def resume(self) -> None:
        """Continue to sample after ``pause``."""

    async def load(self, folder: Path, version: int, confirm: Confirm) -> None:
        """Load the weights of an HF folder. Requests in flight continue; later tokens carry ``version``.

        No token is sampled from the new weights before ``confirm`` has returned.
        """

    async def weight_version(self) -> int:
        """The version given with the weights that were loaded last; 0 for those it started with."""

    async def is_alive(self) -> bool:
        """Health check: whether it answers, also while it is paused. Never raises, never takes long."""

    async def close(self) -> None:
        """Release what it holds in this process. A server keeps running."""


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
        """End an update after all buckets: the digest of the weights, as ``load`` gives it to ``confirm``."""

    async def set_version(self, version: int) -> None:
        """The weights that came have this version."""

    async def resume_after_update(self) -> None:
        """Sample again, unless ``pause`` holds. Requests in flight continue under the new weights."""


@runtime_checkable
class ReleasesMemory(Engine, Protocol):
    """An ``Engine`` that gives up its GPU memory while the policy trains on the same GPU (time-sharing).

    After an error of either call what it holds is unknown: its server must be ended.
    """

    async def release_memory(self) -> None:
        """End the requests in flight and give up the memory. It may return before the memory is free."""

    async def wake(self, folder: Path, version: int, confirm: Confirm) -> None:
        """Take the memory back, with the weights of an HF folder as by ``load``, and sample again."""


@runtime_checkable
class ReceivesHandles(ReleasesMemory, Protocol):
    """An engine that can also wake with weights that it reads from the trainer's memory.

    In order, instead of ``wake``: ``begin_wake``; ``receive_handles`` until it has all weights;
    ``confirm_weights``; ``finish_wake``. After an error its server must be ended.
    """

    async def begin_wake(self) -> None:
        """Take back the memory of the weights, and be ready to receive them."""

    async def receive_handles(self, handles: Sequence[bytes]) -> None:
        """Load some weights: for each tensor-parallel rank a pickle of (name, tensor) pairs, which names
        memory of the trainer and holds no data. That memory may change when the next call has returned."""

    async def confirm_weights(self, version: int, confirm: Confirm) -> None:
        """The weights are whole, and of ``version``: give ``confirm`` their digest, as ``load`` does."""

    async def finish_wake(self) -> None:
        """Take back the rest of the memory, and sample again."""


class Need(Enum):
    """What a sampler cannot go on without, in place of its answer."""

    WEIGHTS = "weights"
    """The present weights: no engine has them."""


class Sampler(Protocol):
    """The rollout sampler: turns prompts into finished, rewarded groups. Lives on rank 0."""

    def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Begin before ``first_step``, at the ``state`` of the checkpoint before it, if there is one."""

    def next_batch(self, step: int, wait_s: float) -> StepBatch | Need | None:
        """The training batch of ``step``; None if it does not exist yet after ``wait_s`` seconds.

        ``Need.WEIGHTS``: no engine works, and one needs the present weights once more.

        The same step gets the same groups however often it is asked for, also after a restart.
        """

    def evaluated(self, step: int, wait_s: float) -> Path | Need | None:
        """The file of the responses to held-out problems at the weights of ``step``, like ``next_batch``."""

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Have the engines sample from the weights in ``folder``, which the updates of ``step`` have made."""

    def state(self) -> dict[str, Any]:
        """The sampler's part of a checkpoint, plain JSON."""

    def checkpointed(self, oldest: int) -> None:
        """Note that a checkpoint is durable, and that the oldest that is kept is of step ``oldest``.

        The sampler may delete what no continuation from there needs.
        """

    def close(self) -> None:
        """Stop sampling and release everything."""


class WeightSync(Protocol):
    """Weight synchronization: brings the policy's weights to the engines."""

    def push(self, policy: Policy, step: int) -> None:
        """Have every working engine sample from ``policy.version``, which ``step`` has made. Collective."""
