"""Hand-over of GPUs (time-sharing): the policy trains on them, or colocated engines sample, never both.

    to_policy   engines: abort, pause, release memory | driver: is it free? | policy: reload
    to_engines  policy: offload | engines: take memory back, load weights, compare digests, sample

Each side moves only when the other is known to be out of the way. An engine that does not do what it is told
is killed, and its memory is free then; it is started again when engines are to sample. None is started while
the policy trains. The weights that engines wake with are written before the policy leaves (weight_sync/disk),
or the policy leaves in two parts, and they read its weights between (weight_sync/ipc):

    to_engines  policy: offload all but weights | engines: weights' memory, load, digests | policy: offload
                the weights | engines: the other memory, sample
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, perf_counter, sleep
from typing import Any

import torch

from bapo_megatron.config import RunConfig
from bapo_megatron.errors import RunStopped
from bapo_megatron.interfaces import Policy
from bapo_megatron.policy.device import free_gpu_bytes, gpu_name, release_cached_memory
from bapo_megatron.rollout.engines.backend import EngineServers
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.rollout.weight_sync.ipc import IpcSync
from bapo_megatron.runtime.distributed import all_gather, broadcast_from_main, on_all_ranks
from bapo_megatron.types import Metrics

_LOOK_S = 0.2


class GpuHandover:
    """GPU hand-over between the policy and colocated engines.

    All calls are collective, and do nothing where engines have GPUs of their own.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        sampler: SamplerClient | None,
        servers: EngineServers | None,
        on_event: Callable[[dict[str, Any]], None],
        ipc: IpcSync | None = None,
    ) -> None:
        """The policy has them at first. ``sampler`` and ``servers``: rank 0's; None elsewhere. ``ipc``: the
        run's weight sync, if it is that one."""
        engine = config.rollout.engine_config
        self.is_shared = engine.colocated and config.rollout.replay is None
        """Whether there are engines to take turns with."""
        self._policy, self._sampler, self._servers, self._on_event = policy, sampler, servers, on_event
        self._ipc = ipc
        self._offloads = config.parallel.offload
        self._limit_s, self._kept_bytes = 60 * engine.release_minutes, int(1e9 * engine.kept_gb)
        self._policy_has_gpus = True
        self._released: list[str] = []
        """Rank 0's: engines that have released their memory, and sleep."""
        self._handed: list[str] = []
        """Rank 0's: engines that have got the weights by handles, and do not sample yet."""
        self._room: int | None = None
        """Bytes that are free on this rank's GPU when neither side has anything there."""
        self._beside_sleepers: int | None = None
        """Bytes that were free there when engines had released their memory, before the policy came back."""
        self._free_beside_weights: int | None = None
        """Bytes that are free there beside the policy's weights alone, before engines read them."""
        self._seconds: Metrics = {}

    @property
    def policy_has_gpus(self) -> bool:
        """Whether the policy has the GPUs, and may train."""
        return self._policy_has_gpus

    def to_policy(self) -> None:
        """Give the GPUs to the policy.

        RunStopped, on every rank, if the sampler's process or the memory is lost. The policy is back all the
        same, for a last checkpoint, if it has room (``policy_has_gpus``).
        """
        if not self.is_shared or self._policy_has_gpus:
            return
        start = perf_counter()
        problem = _stop_of(self._release_engines) or self._wait_for_memory()
        self._beside_sleepers = free_gpu_bytes()
        if self._offloads:
            on_all_ranks(self._reload)
        self._policy_has_gpus = True
        self._seconds["time/release_s"] = perf_counter() - start
        if problem is not None:
            raise problem

    def to_engines(self) -> None:
        """Give the GPUs to the engines.

        RunStopped, on every rank, if the host has no room for the policy, or the sampler's process or a
        server cannot go on.
        """
        if not self.is_shared or not self._policy_has_gpus:
            return
        start = perf_counter()
        self._policy_has_gpus = False  # also if what follows fails: `to_policy` must bring it back
        if self._ipc is not None:
            self._give_weights(self._ipc)
        on_all_ranks(self._leave)
        on_all_ranks(self._wake_engines)
        self._seconds["time/wake_s"] = perf_counter() - start

    def metrics(self) -> Metrics:
        """Seconds of the last change each way; nothing where GPUs are not shared."""
        return dict(self._seconds)

    def _give_weights(self, ipc: IpcSync) -> None:
        """Give the weights to the engines that sleep, by handles, and to the rest, if any, by a folder."""
        asleep = broadcast_from_main(self._asleep())
        self._handed = []
        if takers := ipc.takers(asleep):
            on_all_ranks(self._set_aside)
            self._released = [name for name in asleep if name not in takers]
            self._handed = ipc.hand_over(self._policy, takers)
        lack = self._servers is not None and set(self._servers.urls) > set(self._handed)
        if broadcast_from_main(lack):
            ipc.write(self._policy)

    def _set_aside(self) -> None:
        """Let all of the policy leave but the weights."""
        self._offload(keep_weights=True)
        release_cached_memory()
        self._free_beside_weights = free_gpu_bytes()

    def _leave(self) -> None:
        beside, self._free_beside_weights = self._free_beside_weights, None
        left = self._offload()
        release_cached_memory()
        self._measure_room(free_gpu_bytes() if beside is None else beside + left)

    def _offload(self, keep_weights: bool = False) -> int:
        """Let the policy leave, if it is to; the bytes that are freed."""
        if not self._offloads:
            return 0
        try:
            return self._policy.offload(keep_weights)
        except (RuntimeError, MemoryError) as error:  # pinned memory: CUDA's own "out of memory"
            raise RunStopped(f"no host memory for the offloaded policy ({error})") from error

    def _reload(self) -> None:
        try:
            self._policy.reload()
        except torch.OutOfMemoryError as error:
            raise RunStopped(f"the policy does not fit on {gpu_name()} any more ({error})") from error

    def _measure_room(self, free: int | None) -> None:
        """Measure the room on this GPU by what is ``free`` there with the policy away and engines asleep.

        What training has added since engines fell asleep (NCCL's buffers, workspaces, Adam's moments of a
        policy that stays) is the trainer's, and not theirs to give up.
        """
        if self._room is None or free is None:
            self._room = free
        elif self._beside_sleepers is not None:
            self._room -= max(0, self._beside_sleepers - free)

    def _release_engines(self) -> None:
        if self._sampler is None or self._servers is None:
            return
        self._servers.hold()
        try:
            self._released = self._sampler.release()
        finally:
            self._servers.end(spared=self._released)

    def _asleep(self) -> list[str]:
        """Rank 0's: engines that sleep and whose process lives."""
        running = self._servers.running() if self._servers is not None else []
        return [name for name in running if name in self._released]

    def _wake_engines(self) -> None:
        if self._sampler is None or self._servers is None:
            return
        handed, asleep = self._handed, self._asleep()
        self._released, self._handed = [], []
        woken = self._sampler.finish_wake(handed) if handed else []
        woken += self._sampler.wake(asleep) if asleep else []
        self._servers.end(spared=woken)
        try:
            self._servers.start()
        except RuntimeError as error:
            raise RunStopped(str(error)) from error
        self._sampler.admit()

    def _wait_for_memory(self) -> RunStopped | None:
        """Wait until the driver says, on every rank, that what engines had is free; engines that keep it are
        killed. The error if it is not free then either."""
        if not (short := self._short()):
            return None
        on_all_ranks(lambda: self._on_event({"kind": "memory_kept", "reason": short}))
        on_all_ranks(self._end_engines)
        if not (short := self._short()):
            return None
        return RunStopped(
            f"GPU memory that engines had is not free though they are ended: {short}. Another program has it "
            f"(see nvidia-smi), or the engines' kept_gb is too low"
        )

    def _short(self) -> str:
        """What GPUs lack after ``release_minutes``, on every rank; empty if nothing. Collective."""
        return "; ".join(one for one in all_gather(self._missing()) if one)

    def _end_engines(self) -> None:
        if self._servers is not None:
            self._servers.end()
        self._released = []

    def _missing(self) -> str | None:
        """What this rank's GPU lacks after ``release_minutes``; None as soon as that is nothing."""
        deadline = monotonic() + self._limit_s
        while self._room is not None and (free := free_gpu_bytes()) is not None:
            needed = self._room - self._kept_bytes
            if free >= needed:
                break
            if monotonic() >= deadline:
                return f"{free / 1e9:.1f} of {needed / 1e9:.1f} GB are free on {gpu_name()}"
            sleep(_LOOK_S)
        return None


def _stop_of(work: Callable[[], None]) -> RunStopped | None:
    """The RunStopped of ``work`` on any rank, on every rank. Collective."""
    try:
        on_all_ranks(work)
    except RunStopped as stopped:
        return stopped
    return None
