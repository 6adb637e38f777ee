"""GPU hand-over (time-sharing by offload and onload) between the policy and engines on the same GPUs.

    to_policy   engines: abort, pause, release memory | ranks: wait until it is free | policy: reload
    to_engines  policy: offload | engines: reclaim memory, load weights, compare digests, sample

The loop calls ``GpuHandover`` on every rank before sampling, training and saving. With
``parallel.offload=false`` the policy keeps its memory. An engine that fails to release its memory is killed
and restarted at the next hand-over to the engines; one that fails to wake is killed and restarted
immediately. No engine starts while the policy trains. Engines wake with weights from a folder, written before
the policy is offloaded (weight_sync/disk), or read them from the policy's GPU memory (weight_sync/ipc); the
policy is then offloaded in two parts:

    to_engines  policy: offload all but weights | engines: weights' memory, load, digests | policy: offload
                the weights | engines: remaining memory, sample
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, perf_counter, sleep

import torch

from bapo_megatron.config import RunConfig
from bapo_megatron.errors import RunStopped
from bapo_megatron.interfaces import HandsOver, Policy
from bapo_megatron.policy.device import free_gpu_bytes, gpu_name, release_cached_memory
from bapo_megatron.rollout.engines.backend import EngineServers
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.runtime.distributed import all_gather, broadcast_from_main, on_all_ranks
from bapo_megatron.runtime.event_kinds import OnEvent
from bapo_megatron.types import Metrics

_POLL_S = 0.2
"""Seconds between two queries of free memory."""


class GpuHandover:
    """Switch of the GPUs between the policy, which has them initially, and colocated engines; one object per
    rank. ``to_policy`` and ``to_engines`` are collective and block; they do nothing if engines have their own
    GPUs, if stored rollouts are replayed, or if that side has the GPUs already."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        sampler: SamplerClient | None,
        servers: EngineServers | None,
        on_event: OnEvent,
        handing_over: HandsOver | None = None,
    ) -> None:
        """``sampler``, ``servers``: None except on rank 0. ``handing_over``: sync that sends in the
        hand-over."""
        engine = config.rollout.engine_config
        self.is_colocated = engine.colocated and config.rollout.replay is None
        """Whether engines share the GPUs with the policy."""
        self._policy, self._sampler, self._servers, self._on_event = policy, sampler, servers, on_event
        self._handing_over = handing_over
        self._offloads = config.parallel.offload
        self._limit_s, self._kept_bytes = 60 * engine.release_minutes, int(1e9 * engine.kept_gb)
        self.policy_has_gpus = True
        """Whether the policy has the GPUs and may train."""
        self._released: list[str] = []
        """On rank 0: sleeping engines, which have released their memory."""
        self._handed: list[str] = []
        """On rank 0: engines that have received the weights and do not sample yet."""
        self._baseline_free: int | None = None
        """Free bytes on this rank's GPU with the policy offloaded and all engines asleep."""
        self._free_after_release: int | None = None
        """Free bytes after engines released their memory, before the policy was reloaded."""
        self._free_beside_weights: int | None = None
        """Free bytes with only the policy's weights on the GPU, before engines read them."""
        self._seconds: Metrics = {}

    def to_policy(self) -> None:
        """Release the engines' memory, wait until the driver reports it free, reload the policy. Raises
        RunStopped, on every rank, if the sampler process or the memory is lost. The policy is still reloaded
        for a last checkpoint if it fits (``policy_has_gpus``)."""
        if not self.is_colocated or self.policy_has_gpus:
            return
        start = perf_counter()
        problem = _stopped_by(self._release_engines) or self._wait_for_memory()
        self._free_after_release = free_gpu_bytes()  # before the reload, which takes from it
        if self._offloads:
            on_all_ranks(self._reload)
        self.policy_has_gpus = True
        self._seconds["time/release_s"] = perf_counter() - start
        if problem is not None:
            raise problem

    def to_engines(self) -> None:
        """Offload the policy, then wake the engines. Raises RunStopped, on every rank, if the host lacks
        memory for the policy, or the sampler process or a server cannot continue."""
        if not self.is_colocated or not self.policy_has_gpus:
            return
        start = perf_counter()
        self.policy_has_gpus = False  # even if the hand-over fails: `to_policy` must reload it
        if self._handing_over is not None:
            # Before offloading the weights: engines read them from GPU memory.
            self._hand_over_weights(self._handing_over)
        on_all_ranks(self._offload_policy)  # on every rank before any engine takes memory
        on_all_ranks(self._wake_engines)
        self._seconds["time/wake_s"] = perf_counter() - start

    def metrics(self) -> Metrics:
        """Return the seconds of the last hand-over in each direction; empty if engines are not colocated."""
        return dict(self._seconds)

    def _hand_over_weights(self, handing_over: HandsOver) -> None:
        """Send the weights to sleeping engines through the sync, to any other engines through a folder."""
        asleep = broadcast_from_main(self._asleep())
        self._handed = []
        if asleep:
            on_all_ranks(self._offload_all_but_weights)
            self._released = []
            self._handed = handing_over.hand_over(self._policy, asleep)
        lack = self._servers is not None and set(self._servers.urls) > set(self._handed)
        if broadcast_from_main(lack):
            handing_over.write(self._policy)

    def _offload_all_but_weights(self) -> None:
        self._offload(keep_weights=True)
        release_cached_memory()
        self._free_beside_weights = free_gpu_bytes()

    def _offload_policy(self) -> None:
        beside, self._free_beside_weights = self._free_beside_weights, None
        freed = self._offload()
        release_cached_memory()
        # With ipc, engines have already taken memory, so the present free memory is not the baseline.
        self._update_baseline(free_gpu_bytes() if beside is None else beside + freed)

    def _offload(self, keep_weights: bool = False) -> int:
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

    def _update_baseline(self, free: int | None) -> None:
        """Set the baseline to ``free``, or lower it; ``free``: measured with policy offloaded and engines
        asleep.

        Memory that training allocated since the engines fell asleep (NCCL buffers, workspaces, Adam's moments
        of a policy that stays) belongs to the trainer: the baseline shrinks by it, and no engine is blamed.
        """
        if self._baseline_free is None or free is None:
            self._baseline_free = free
        elif self._free_after_release is not None:
            self._baseline_free -= max(0, self._free_after_release - free)

    def _release_engines(self) -> None:
        if self._sampler is None or self._servers is None:
            return
        self._servers.hold()  # first: no supervisor may restart a server while the policy trains
        try:
            self._released = self._sampler.release()
        finally:
            self._servers.end(spared=self._released)  # an unconfirmed server may still hold memory

    def _asleep(self) -> list[str]:
        """Return the sleeping engines with a live process, on rank 0."""
        running = self._servers.running() if self._servers is not None else []
        return [name for name in running if name in self._released]

    def _wake_engines(self) -> None:
        if self._sampler is None or self._servers is None:
            return
        handed, asleep = self._handed, self._asleep()
        self._released, self._handed = [], []
        woken = self._sampler.update("resume") if handed else []
        woken += self._sampler.wake(asleep) if asleep else []
        self._servers.end(spared=woken)  # kill failed ones before new ones take their memory
        try:
            self._servers.start()
        except RuntimeError as error:
            raise RunStopped(str(error)) from error
        self._sampler.admit()

    def _wait_for_memory(self) -> RunStopped | None:
        """Wait until the engines' memory is free on every rank; kill engines that keep it. Return the error
        if the memory is still not free. Collective."""
        if not (shortage := self._memory_shortage()):
            return None
        on_all_ranks(lambda: self._on_event({"kind": "memory_kept", "reason": shortage}))
        on_all_ranks(self._end_engines)
        if not (shortage := self._memory_shortage()):
            return None
        return RunStopped(
            f"the engines' GPU memory is not free though they were killed: {shortage}. Another program has "
            f"it (see nvidia-smi), or the engines' kept_gb is too low"
        )

    def _memory_shortage(self) -> str:
        """Return all GPUs' shortage of free memory after ``release_minutes``; empty if none. Collective."""
        return "; ".join(shortage for shortage in all_gather(self._own_shortage()) if shortage)

    def _end_engines(self) -> None:
        if self._servers is not None:
            self._servers.end()
        self._released = []

    def _own_shortage(self) -> str | None:
        """Return this GPU's shortage of free memory after ``release_minutes``; None without a shortage."""
        deadline = monotonic() + self._limit_s
        while self._baseline_free is not None and (free := free_gpu_bytes()) is not None:
            needed = self._baseline_free - self._kept_bytes
            if free >= needed:
                break
            if monotonic() >= deadline:
                return f"{free / 1e9:.1f} of {needed / 1e9:.1f} GB are free on {gpu_name()}"
            sleep(_POLL_S)
        return None


def _stopped_by(work: Callable[[], None]) -> RunStopped | None:
    """Return, on every rank, the RunStopped that ``work`` raises on any rank. Collective."""
    try:
        on_all_ranks(work)
    except RunStopped as stopped:
        return stopped
    return None
