"""Time-sharing of GPUs: the policy trains on them, or colocated engines sample, never both.

    train    engines: abort, pause, release memory | driver: is it free? | policy: reload
    sample   policy: offload | engines: take memory back, load weights, compare digests, sample

Each side moves only when the other is known to be out of the way. An engine that does not do what it is told
is killed, and its memory is free then; it is started again when engines are to sample. None is started while
the policy trains. The weights that engines wake with are written before the policy leaves (weight_sync/disk).
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, perf_counter, sleep
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.errors import RunStopped
from bapo_megatron.interfaces import Policy
from bapo_megatron.policy.device import free_gpu_bytes, gpu_name, release_cached_memory
from bapo_megatron.rollout.engines.backend import EngineServers
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.runtime.distributed import everywhere, share
from bapo_megatron.types import Metrics

_LOOK_S = 0.2


class TimeSharing:
    """Whose the GPUs are. All calls are collective, and do nothing where engines have GPUs of their own."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        sampler: SamplerClient | None,
        servers: EngineServers | None,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        """The policy has them at first. ``sampler`` and ``servers``: rank 0's; None elsewhere."""
        engine = config.rollout.engine_config
        self._is_shared = engine.colocated and config.rollout.replay is None
        self._policy, self._sampler, self._servers, self._on_event = policy, sampler, servers, on_event
        self._offloads = config.parallel.offload
        self._limit_s, self._kept_bytes = 60 * engine.release_minutes, int(1e9 * engine.kept_gb)
        self._trains = True
        self._released: list[str] = []
        """Rank 0's: engines that have released their memory."""
        self._room: int | None = None
        """Bytes that are free on this rank's GPU when neither side has anything there."""
        self._beside_sleepers: int | None = None
        """Bytes that were free there when engines had released their memory, before the policy came back."""
        self._seconds: Metrics = {}

    def train(self) -> None:
        """Give the GPUs to the policy. RunStopped, on every rank, if their memory cannot be had."""
        if not self._is_shared or self._trains:
            return
        start = perf_counter()
        _on_main(self._release_engines)
        self._wait_for_memory()
        self._beside_sleepers = free_gpu_bytes()
        if self._offloads:
            self._policy.reload()
        self._trains = True
        self._seconds["time/release_s"] = perf_counter() - start

    def sample(self) -> None:
        """Give the GPUs to the engines. RunStopped, on every rank, if the sampler's process cannot go on."""
        if not self._is_shared or not self._trains:
            return
        start = perf_counter()
        self._trains = False  # also if what follows fails: `train` must bring the policy back
        if self._offloads:
            self._policy.offload()
        release_cached_memory()
        self._measure_room()
        everywhere(None)  # all ranks are out of the way
        _on_main(self._wake_engines)
        self._seconds["time/wake_s"] = perf_counter() - start

    def metrics(self) -> Metrics:
        """Seconds of the last change each way; nothing where GPUs are not shared."""
        return dict(self._seconds)

    def _measure_room(self) -> None:
        """Measure the room on this GPU, with the policy away.

        What training has added since engines fell asleep (NCCL's buffers, workspaces, Adam's moments of a
        policy that stays) is the trainer's, and not theirs to give up.
        """
        free = free_gpu_bytes()
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
        except RunStopped:  # there may still be a checkpoint to write, without engines
            self._released = []
        self._servers.end(spared=self._released)

    def _wake_engines(self) -> None:
        if self._sampler is None or self._servers is None:
            return
        asleep = [name for name in self._servers.running() if name in self._released]
        self._released = []
        woken = self._sampler.wake(asleep) if asleep else []
        self._servers.end(spared=woken)
        self._servers.start()
        self._sampler.admit()

    def _wait_for_memory(self) -> None:
        """Wait until the driver says, on every rank, that what engines had is free. Engines that keep it are
        killed."""
        if not any(everywhere(self._missing())):
            return
        short = [one for one in everywhere(self._missing(self._limit_s)) if one]
        if not short:
            return
        self._on_event({"kind": "memory_kept", "reason": "; ".join(short)})
        _on_main(self._end_engines)
        if short := [one for one in everywhere(self._missing(self._limit_s)) if one]:
            raise RunStopped(
                f"GPU memory that engines had is not free though they are ended: {'; '.join(short)}. "
                f"Another program has it (see nvidia-smi), or the engines' kept_gb is too low"
            )

    def _end_engines(self) -> None:
        if self._servers is not None:
            self._servers.end()
        self._released = []

    def _missing(self, wait_s: float = 0.0) -> str | None:
        """What this rank's GPU lacks after at most ``wait_s``; None if nothing."""
        deadline = monotonic() + wait_s
        while self._room is not None and (free := free_gpu_bytes()) is not None:
            needed = self._room - self._kept_bytes
            if free >= needed:
                break
            if monotonic() >= deadline:
                return f"{free / 1e9:.1f} of {needed / 1e9:.1f} GB are free on {gpu_name()}"
            sleep(_LOOK_S)
        return None


def _on_main(work: Callable[[], None]) -> None:
    """``work``, which only rank 0 has, and on every rank the RunStopped that it raises. Collective."""
    stopped: RunStopped | None = None
    try:
        work()
    except RunStopped as error:
        stopped = error
    if (stopped := share(stopped)) is not None:
        raise stopped
