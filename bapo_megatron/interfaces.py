"""Protocols between a run's replaceable parts: policy, engines, sampler, weight sync.

Folders ``policy``, ``rollout`` and ``checkpoint`` never import each other; ``trainer/build.py`` connects
their objects through these contracts, and a new engine or transport implements one of them. "Collective":
every rank must make the call, in the same order.
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

if TYPE_CHECKING:  # torch takes a second to import, and light commands import this module
    from torch import Tensor

    from bapo_megatron.tensor_types import MicroBatch, SearchedLoss, TokenFn, TokenStats, UpdateResult

NamedTensors = Iterator[tuple[str, "Tensor"]]
"""Iterator over weights: Hugging Face name and full (unsharded) tensor."""

Confirm = Callable[[str], Awaitable[None]]
"""Digest check, which an engine awaits with the hash of its new weights before it samples from them. Raises
if they differ from the sent weights or from the other engines' weights."""


class Saving(Protocol):
    """Checkpoint write in progress, returned by ``Policy.save``, while training continues. Each rank polls
    ``is_written``; once it is true on all ranks, all call ``finish``."""

    def is_written(self) -> bool:
        """Return whether this rank's part is on disk or has failed. Local; does not wait."""

    def finish(self) -> None:
        """Commit the checkpoint once all ranks' parts are written. Collective; raises if a part failed."""


class Policy(Protocol):
    """The trained model (the actor), one object per rank: log-probs and updates on packs, weights,
    checkpoints.

    A pack is a micro-batch of concatenated sequences (``MicroBatch``). Properties are local. Methods are
    collective except ``load_reference``, ``offload`` and ``reload``; ``log_probs`` and
    ``reference_log_probs`` are collective only within a replica (the ranks that hold one copy of the model),
    but with experts split over replicas (EP, ETP) over all ranks, with the same number of packs on each.
    Implemented by ``MegatronPolicy``.
    """

    version: int
    """Number of optimizer steps since the run began."""

    @property
    def data_rank(self) -> int:
        """Data-parallel rank: the replica of the model that holds this process."""

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts; its updates then have ``UpdateResult.experts``."""

    @property
    def pack_layout(self) -> PackLayout:
        """Constraints on this rank's packs."""

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """Return the sum of ``fn`` over all ranks' packs by a forward pass: float64, equal on every rank."""

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """``token_sums`` at pi_old, from the log-probs stored in the packs: no forward pass."""

    def log_probs(self, batches: Sequence[MicroBatch], trained_only: bool = False) -> list[TokenStats]:
        """Return log-probs and entropies of this rank's packs at the rollout temperature; with
        ``trained_only``, zeros for tokens with mask 0."""

    def load_reference(self, folder: Path) -> None:
        """Load the frozen reference policy, an HF folder of the policy's shape, into host memory. Local."""

    def reference_log_probs(self, batches: Sequence[MicroBatch]) -> list[TokenStats]:
        """``log_probs`` of the trained tokens at the reference weights; the policy's own weights stay as they
        are."""

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """All-reduce (sum) ``values`` over data-parallel ranks; returns the sum on the CPU of every rank.
        Collective. The ranks of one replica must pass the same ``values``."""

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn | SearchedLoss) -> UpdateResult:
        """Make one optimizer step on element 0 of ``loss``, divided by the update's count of unmasked tokens.
        Raises FloatingPointError on every rank, without a step, for a non-finite loss or gradient norm."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last update; 0 before the first."""

    def state_digest(self) -> dict[str, list[str]]:
        """Return bit digests of weights and optimizer, equal at every layout and on every rank. Collective. A
        name has one digest if all copies agree, otherwise one per distinct copy."""

    def hf_weights(self) -> NamedTensors:
        """Return an iterator that all-gathers the weights, one full tensor at a time. Collective: every rank
        must exhaust it, even after an error."""

    def offload(self, keep_weights: bool = False) -> int:
        """Offload weights and optimizer to the host and free the gradients; return the freed device bytes.

        Until ``reload``, methods that read weights or optimizer raise RuntimeError. ``keep_weights`` leaves
        the weights on the device, and ``hf_weights`` works, until a second call without it. A checkpoint
        write in progress continues. Does nothing if everything is offloaded already.
        """

    def reload(self) -> None:
        """Restore the state from the host, bit for bit. Does nothing if nothing is offloaded."""

    def save(self, path: Path) -> Saving:
        """Begin an asynchronous checkpoint of model and optimizer in the folder ``path``. Collective."""

    def load(self, path: Path, version: int) -> None:
        """Load a checkpoint that ``save`` wrote at ``version``, at any layout. Collective. Raises
        CheckpointError on every rank if it is damaged."""


class Engine(Protocol):
    """Inference engine with a copy of the policy's weights: a server, or a model in this process.

    All calls are async and come from the engine pool's event loop (in the sampler's process, or ``bapo
    eval``). A call that raises leaves the engine in an unknown state, except for ValueError from ``generate``
    (a malformed request). Optional abilities are ``ReceivesBroadcast``, ``ReleasesMemory`` and
    ``ReceivesHandles``. One call (``load``, or ``wake`` for a sleeping engine) makes a complete weight
    update, by any transport. tests/contract tests every engine against this protocol.
    """

    name: str
    """Unique name: the server's address, if there is one."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample the answer to one request. Raises ValueError if the request is malformed."""

    async def abort(self) -> None:
        """Abort the requests in flight; each returns its tokens so far with finish reason ``abort``."""

    async def load(self, folder: Path, /, version: int, confirm: Confirm) -> None:
        """Load the weights of an HF folder. Requests in flight continue; later tokens carry ``version``. The
        engine awaits ``confirm`` with the weights' digest before it samples from them. A cancelled call ends
        immediately and leaves the weights unknown."""

    async def weight_version(self) -> int:
        """Return the version of the last loaded weights; 0 before any load."""

    async def is_alive(self) -> bool:
        """Return whether the engine answers, even during a load. Never raises and returns quickly."""

    async def close(self) -> None:
        """Release the client's resources in this process; a server keeps running."""


@runtime_checkable
class ReceivesBroadcast(Engine, Protocol):
    """``Engine`` that receives weights by NCCL or gloo broadcast, as one or more ranks of the trainer's
    broadcast group. Call ``leave_group`` and ``join_group`` once, then ``load`` for each version."""

    transports: Collection[str]
    """Supported weight transports besides folders: ``broadcast``, ``ipc``."""
    broadcast_ranks: int
    """Number of the engine's ranks in the group: its tensor-parallel size."""

    async def leave_group(self, name: str) -> None:
        """Leave the group ``name``, if the engine is a member."""

    async def join_group(self, group: BroadcastGroup, first_rank: int) -> None:
        """Join the sender's group as ranks from ``first_rank``; return when all ranks have joined."""

    async def load(self, weights: Path | WeightParts, /, version: int, confirm: Confirm) -> None:
        """``Engine.load`` that also accepts broadcast buckets. Before requesting the first bucket it pauses
        and aborts requests without a waiting caller. It sets ``version`` after ``confirm``."""


@runtime_checkable
class ReleasesMemory(Engine, Protocol):
    """``Engine`` on a GPU where the policy trains: ``release_memory`` frees its GPU memory, ``wake`` reclaims
    it. After an error in either call the memory is in an unknown state, and the server must be killed."""

    async def release_memory(self) -> None:
        """Abort the requests in flight and release the memory. May return before the memory is free."""

    async def wake(self, folder: Path, /, version: int, confirm: Confirm) -> None:
        """Reclaim the memory, ``load`` the weights of an HF folder, and resume sampling."""


@runtime_checkable
class ReceivesHandles(ReleasesMemory, Protocol):
    """``ReleasesMemory`` engine that receives weights by CUDA IPC when it wakes: it maps the memory of the
    trainer on its GPU by handles."""

    transports: Collection[str]
    """See ``ReceivesBroadcast``."""

    async def wake(self, weights: Path | WeightParts, /, version: int, confirm: Confirm) -> None:
        """``ReleasesMemory.wake`` that also accepts memory handles. Reclaims the weights' memory before the
        first part and the rest after ``confirm``: until then the trainer's weights are on the same GPU."""


class Need(Enum):
    """Request that ``Sampler.next_batch`` or ``evaluated`` returns in place of a result. The training loop
    answers WEIGHTS by ``WeightSync.push`` and asks the sampler again."""

    WEIGHTS = "weights"
    """Send the current weights again: no engine has them."""


class Sampler(Protocol):
    """The trainer's source of rollouts, on rank 0: samples groups of responses to prompts, and rewards them.

    ``start`` begins the sampling, which continues between calls. ``next_batch`` returns the header of a
    step's finished groups, ``evaluated`` the file of held-out responses; both block for at most ``wait_s``.
    Methods raise RunStopped if the run cannot continue (no engines, full disk). Implemented by
    ``SamplerClient`` (sampling in another process) and, for stored rollouts, ``ReplaySampler``.
    """

    def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Start sampling for ``first_step``. ``state``: the sampler's part of the previous checkpoint."""

    def next_batch(self, step: int, wait_s: float) -> StepHeader | Need | None:
        """Return the header of the batch of ``step``; None if it is not ready within ``wait_s`` seconds.
        ``Need.WEIGHTS``: no engine works, and one needs the current weights again. A repeated call for a
        step, even after a restart, returns the same groups."""

    def evaluated(self, step: int, wait_s: float) -> Path | Need | None:
        """Return the file of responses to the held-out problems at the weights of ``step``, a step with an
        evaluation. None and ``Need.WEIGHTS`` as in ``next_batch``."""

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Make the engines load the weights in ``folder``, the result of the updates of ``step``."""

    def state(self) -> dict[str, Any]:
        """Return the sampler's part of a checkpoint, as JSON values."""

    def checkpointed(self, oldest: int) -> None:
        """Delete journal files that no resume needs; the oldest checkpoint is that of step ``oldest``."""

    def close(self) -> None:
        """Stop sampling and release all resources."""


class WeightSync(Protocol):
    """Sender of the policy's weights to all engines by one transport (disk, broadcast or CUDA IPC). Every
    rank calls ``push`` before the first step, after each step's updates, and on ``Need.WEIGHTS``."""

    def push(self, policy: Policy, step: int) -> None:
        """Send the weights of ``policy.version``, the result of the updates of ``step``, to every working
        engine, and return when these have them; colocated engines load them on waking, lost ones on recovery.
        Collective. A failed broadcast falls back to disk; all ranks raise if the disk fails, too."""


@runtime_checkable
class HandsOver(WeightSync, Protocol):
    """``WeightSync`` whose colocated engines read the weights from the trainer's GPU memory: CUDA IPC, but
    not disk sync, which can also serve colocated engines. ``push`` only announces new weights. Before the
    engines sample ``GpuHandover`` calls ``hand_over``, then ``write`` if an engine lacks them. Collective."""

    def hand_over(self, policy: Policy, names: Sequence[str]) -> list[str]:
        """Transfer the weights to the sleeping engines ``names``; return, on every rank, the names of those
        that have them; these do not sample yet. The caller must kill the others. A failure does not raise:
        it is a run event, and the result is empty."""

    def write(self, policy: Policy) -> None:
        """Fallback: write an HF folder, which the restarted engines load."""
