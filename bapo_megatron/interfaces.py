"""The protocols between a run's replaceable parts: policy, engines, sampler, weight sync.

The folders ``policy``, ``rollout`` and ``checkpoint`` never import each other: these are the contracts
between them, and ``trainer/build.py`` connects the objects. "Collective": every rank must make the call, in
the same order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from bapo_megatron.types import (
    BroadcastGroup,
    GenerateRequest,
    Generation,
    PackLayout,
    StepHeader,
    WeightParts,
)

if TYPE_CHECKING:  # commands that start nothing import this module, too, and torch takes a second
    from torch import Tensor

    from bapo_megatron.tensor_types import MicroBatch, SearchedLoss, TokenFn, TokenStats, UpdateResult

NamedTensors = Iterator[tuple[str, "Tensor"]]
"""An iterator over weights: Hugging Face name and whole tensor."""

Confirm = Callable[[str], Awaitable[None]]
"""A digest check: an engine awaits it, with the hash of its new weights, before it samples from them. Raises
if they are not those that were sent, or not those of the other engines."""


class Saving(Protocol):
    """A checkpoint write in progress, made by ``Policy.save``: training continues meanwhile.

    Each rank polls ``is_written``; when it is true on all of them, all call ``finish``.
    """

    def is_written(self) -> bool:
        """Whether this rank's part is on disk, or has failed. Local; does not wait."""

    def finish(self) -> None:
        """Commit the checkpoint, when all ranks' parts are written. Collective; raises if one failed."""


class Policy(Protocol):
    """The trained model (the actor), an object on each rank; its parallelism hides behind packs and sums.

    A pack is a micro-batch of concatenated sequences (``MicroBatch``). All methods but ``load_reference``,
    ``offload`` and ``reload`` are collective, properties local; ``hf_weights``, ``log_probs`` and
    ``reference_log_probs`` only within a replica, the ranks that hold one copy of the model. With experts cut
    over replicas (EP, ETP) ``log_probs`` and ``reference_log_probs`` are collective over all ranks, with as
    many packs on each, and ``hf_weights`` needs ``give_experts`` of the others. ``MegatronPolicy`` is it.
    """

    version: int
    """Optimizer steps made since the run began."""

    @property
    def data_rank(self) -> int:
        """The data-parallel rank: which replica of the model this process belongs to."""

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts, whose updates have ``UpdateResult.experts``."""

    @property
    def pack_layout(self) -> PackLayout:
        """The constraints of this rank's packs."""

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """Forward pass: the sum of ``fn`` over the packs of all ranks, float64, equal on every rank."""

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """``token_sums`` at pi_old, whose log-probs are a column of the packs: no forward pass."""

    def log_probs(self, batches: Sequence[MicroBatch], trained_only: bool = False) -> list[TokenStats]:
        """Log-probs and entropies of this rank's packs, at the rollout temperature.

        ``trained_only``: zeros for tokens whose mask is 0.
        """

    def load_reference(self, folder: Path) -> None:
        """Load the frozen reference policy, an HF folder of the policy's shape, into host memory. Local."""

    def reference_digest(self) -> list[str]:
        """Digests of the reference's weights, as the weights' of ``state_digest``. Collective."""

    def reference_log_probs(self, batches: Sequence[MicroBatch]) -> list[TokenStats]:
        """``log_probs`` of the trained tokens at the reference's weights; the policy's stay, bit for bit."""

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """All-reduce (sum) over data parallel ranks; the result is on the CPU of every rank. Collective.

        The ranks of one replica must give the same ``values``.
        """

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn | SearchedLoss) -> UpdateResult:
        """One optimizer step on element 0 of ``loss``, divided by the update's count of unmasked tokens.

        FloatingPointError, on every rank and without a step, for a loss or a gradient norm that is not
        finite.
        """

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last update, 0 before the first."""

    def state_digest(self) -> dict[str, list[str]]:
        """Digests of the bits of weights and optimizer, equal at every layout and on every rank. Collective.

        A name has one digest if all copies agree, else one for each different copy.
        """

    def hf_weights(self) -> NamedTensors:
        """All-gather of the weights, one whole tensor at a time. Collective within a replica: each of its
        ranks must run the iterator to its end, also after an error."""

    def give_experts(self) -> None:
        """Take part in the ``hf_weights`` of another replica, which may lack experts of this one (EP, ETP).

        Where one replica runs ``hf_weights``, the ranks of all others call this. Nothing without experts.
        """

    def offload(self, keep_weights: bool = False) -> int:
        """Offload weights and optimizer to the host and free the gradients; returns the device bytes freed.

        Until ``reload`` a method that reads weights or optimizer raises RuntimeError. ``keep_weights``: the
        weights stay, and ``hf_weights`` works, until a second call without it. A checkpoint write in progress
        is not disturbed. No effect if all is offloaded already.
        """

    def reload(self) -> None:
        """Bring the state back from the host, bit for bit. No effect if nothing is offloaded."""

    def save(self, path: Path) -> Saving:
        """Begin an asynchronous checkpoint of model and optimizer in the folder ``path``. Collective."""

    def load(self, path: Path, version: int) -> None:
        """Load a checkpoint that ``save`` wrote at ``version``, at any layout. Collective.

        CheckpointError, on every rank, if it is damaged.
        """


class Engine(Protocol):
    """An inference engine with a copy of the policy's weights: one server, or a model in this process.

    All calls are async and come from one event loop, that of the engine pool. A call that fails raises, and
    leaves the engine in an unknown state; but a ValueError of ``generate`` is the request's fault alone.
    Abilities of some engines: ``ReceivesBroadcast``, ``ReleasesMemory``, ``ReceivesHandles``. New weights
    take one call by every transport, ``load`` or, of an engine that sleeps, ``wake``: it begins an update,
    receives, confirms, resumes. tests/contract holds every engine (``LocalEngine``, ``SglangEngine``) to it.
    """

    name: str
    """Unique name: the address of the server, if there is one."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample the answer to one request. ValueError if it is malformed: no engine would take it."""

    async def abort(self) -> None:
        """Abort the requests in flight: each returns its tokens so far, with finish reason ``abort``."""

    async def pause(self) -> None:
        """Stop sampling at the next token boundary; requests in flight wait."""

    async def resume(self) -> None:
        """Continue to sample after ``pause``."""

    async def load(self, folder: Path, /, version: int, confirm: Confirm) -> None:
        """Load the weights of an HF folder. Requests in flight continue; later tokens carry ``version``.

        The engine awaits ``confirm`` with the weights' digest before it samples from them. A call that is
        cancelled ends at once, and leaves the weights unknown.
        """

    async def weight_version(self) -> int:
        """The version of the weights that were loaded last; 0 before any load."""

    async def is_alive(self) -> bool:
        """Health check: whether the engine answers, also while paused. Never raises, never takes long."""

    async def close(self) -> None:
        """Release the client's resources in this process. A server keeps running."""


@runtime_checkable
class ReceivesBroadcast(Engine, Protocol):
    """A receiver of weight broadcasts: an ``Engine`` that is some ranks of the trainer's broadcast group.

    ``leave_group`` and ``join_group`` are called once, then ``load`` for each version.
    """

    transports: Collection[str]
    """The transports of weights that it takes beside folders: ``broadcast``, ``ipc``."""
    broadcast_ranks: int
    """Number of the engine's ranks in the group: its tensor-parallel size."""

    async def leave_group(self, name: str) -> None:
        """Leave the group of that name, if the engine is in one."""

    async def join_group(self, group: BroadcastGroup, first_rank: int) -> None:
        """Join the sender's group as the ranks from ``first_rank`` on. Returns when all ranks have joined."""

    async def load(self, weights: Path | WeightParts, /, version: int, confirm: Confirm) -> None:
        """``Engine.load`` also of buckets that are broadcast.

        Before it asks for the first it pauses, and aborts requests that nobody waits for. It sets ``version``
        after ``confirm``.
        """


@runtime_checkable
class ReleasesMemory(Engine, Protocol):
    """A colocated ``Engine``: it releases its GPU memory while the policy trains on the same GPU.

    After an error of either call its memory is in an unknown state, and its server must be ended.
    """

    async def release_memory(self) -> None:
        """Abort the requests in flight and release the memory. It may return before the memory is free."""

    async def wake(self, folder: Path, /, version: int, confirm: Confirm) -> None:
        """Reclaim the memory, ``load`` the weights of an HF folder, and resume sampling."""


@runtime_checkable
class ReceivesHandles(ReleasesMemory, Protocol):
    """A receiver of weights by CUDA IPC: a colocated engine that maps the trainer's memory by handles."""

    transports: Collection[str]
    """As of ``ReceivesBroadcast``."""

    async def wake(self, weights: Path | WeightParts, /, version: int, confirm: Confirm) -> None:
        """``ReleasesMemory.wake`` also of memory handles.

        Before it asks for the first it reclaims the memory of the weights, and the rest after ``confirm``:
        the trainer holds its own weights on the same GPU until then.
        """


class Need(Enum):
    """A sampler's request to the trainer, in place of the answer of ``next_batch`` or ``evaluated``."""

    WEIGHTS = "weights"
    """The current weights once more: no engine has them."""


class Sampler(Protocol):
    """The rollout sampler: turns prompts into finished, rewarded groups, and samples held-out evaluations.

    On rank 0 only. Calls block, and sampling continues between them: ``start`` comes first, ``next_batch``
    and ``evaluated`` are polled. RunStopped if the run cannot continue, without engines or on a full disk,
    say. ``SamplerClient`` and, for a replay, ``ReplaySampler`` implement it.
    """

    def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Start sampling for ``first_step``. ``state``: the sampler's part of the checkpoint before it."""

    def next_batch(self, step: int, wait_s: float) -> StepHeader | Need | None:
        """The header of the batch of ``step``; None if it is not ready within ``wait_s`` seconds.

        ``Need.WEIGHTS``: no engine works, and one needs the current weights once more. A repeated call for
        the same step, also after a restart, gets the same groups.
        """

    def evaluated(self, step: int, wait_s: float) -> Path | Need | None:
        """The file of the responses to held-out problems at the weights of ``step``.

        For an evaluation that is due; None and ``Need.WEIGHTS`` as from ``next_batch``.
        """

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Load the weights in ``folder``, made by the updates of ``step``, into the engines."""

    def state(self) -> dict[str, Any]:
        """The sampler's part of a checkpoint, plain JSON."""

    def checkpointed(self, oldest: int) -> None:
        """Garbage collection after a checkpoint: delete journal files that a resume from step ``oldest``, the
        oldest checkpoint that is kept, does not need."""

    def close(self) -> None:
        """Stop sampling and release all resources."""


class WeightSync(Protocol):
    """Weight synchronization, from the policy to the engines: the sender of a transport.

    ``push`` is called before the first step, after the updates of every step, and again when the sampler
    answers ``Need.WEIGHTS``.
    """

    def push(self, policy: Policy, step: int) -> None:
        """Send the weights of ``policy.version``, made by the updates of ``step``, to every working engine.

        Colocated engines load them when they wake, lost ones when they recover. Collective, and blocking; a
        failed broadcast or IPC transfer falls back to disk. All ranks raise if the disk fails, too.
        """


@runtime_checkable
class HandsOver(WeightSync, Protocol):
    """A ``WeightSync`` whose weights arrive when colocated engines wake, in the GPU hand-over.

    ``push`` only announces them. All calls are collective.
    """

    def hand_over(self, policy: Policy, names: Sequence[str]) -> list[str]:
        """Transfer the weights to sleeping engines; returns the names of those that have them, on every rank.
        They do not sample yet. The others must be ended."""

    def write(self, policy: Policy) -> None:
        """Fallback: write the weights to disk, and have the engines load them from there."""
