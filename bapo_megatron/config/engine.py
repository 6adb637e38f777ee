"""Engine-neutral configuration of rollout engines: addresses, deadlines, weight transfer.

``EngineConfig`` is the base class of the settings of each kind of engine, such as ``SglangConfig``; a user's
engine may add fields in a subclass. ``RunConfig.check`` asks each for its ``problems``. Used in this
folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt


@dataclass(frozen=True)
class EngineConfig:
    """Engine-neutral settings, for the sampler, the engine pool and weight sync. Engines add their own."""

    urls: tuple[str, ...] = ()
    """Servers that run already, e.g. http://node7:30000. None: the run starts servers of its own."""
    _: KW_ONLY
    max_in_flight: Annotated[int, Ge(1)] = 256
    """Requests at a server at a time."""
    request_minutes: Annotated[float, Gt(0)] = 60.0
    """Longest wait for the answer to one request, queueing included. Then it is aborted, and continued from
    the tokens that it has."""
    update_minutes: Annotated[float, Gt(0)] = 10.0
    """Longest wait for a server to load new weights."""
    lost_minutes: Annotated[float, Gt(0)] = 30.0
    """Longest wait while no server answers; then the run saves a checkpoint and ends."""
    colocated: bool = False
    """Time-sharing: the servers are on the GPUs that train. They release their memory while the policy
    trains, and get its weights when they sample again. `parallel.offload` offloads the policy meanwhile."""
    release_minutes: Annotated[float, Gt(0)] = 2.0
    """Longest wait until the driver says that the memory of colocated servers is free. Then they are killed,
    and started again when it is their turn to sample."""
    kept_gb: Annotated[float, Gt(0)] = 6.0
    """Most memory in GB (10^9 bytes) that colocated servers may keep on a GPU while the policy trains: CUDA's
    context, buffers of kernels and of NCCL."""
    sync: Literal["disk", "broadcast", "ipc"] = "disk"
    """Weight sync to the servers. `disk`: a folder in the run directory, which they must see. `broadcast`:
    over NCCL between GPUs, gloo on a CPU. `ipc`, for colocated servers: they read them from the trainer's
    memory (CUDA IPC; shared memory on a CPU). If `broadcast` or `ipc` fails: from disk."""
    bucket_mb: Annotated[float, Gt(0)] = 512.0
    """Megabytes (2^20 bytes) of each of the two buffers of a broadcast, and of the one of `ipc`."""
    address: str | None = None
    """Address of rank 0's machine, as servers reach it, for a broadcast. None: its host name, or 127.0.0.1 if
    the servers are on it."""

    def problems(self, longest_request: int) -> Iterator[str]:
        """Validation errors, each beginning with the field's name.

        ``longest_request``: most tokens of prompt and response together.
        """
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                yield f"urls: {url!r} is no address; write it as http://HOST:PORT"
        if len(set(self.urls)) < len(self.urls):
            yield f"urls names a server twice: {', '.join(sorted(self.urls))}"
        if self.colocated and self.urls:
            yield (
                f"colocated: the run must start the servers itself, to end those that keep their memory; "
                f"leave out urls={', '.join(self.urls)}"
            )
        if self.colocated and self.sync == "broadcast":
            yield "colocated needs sync=ipc or disk, not broadcast: NCCL has no two ranks on one GPU"
        if self.sync == "ipc" and not self.colocated:
            yield "sync=ipc needs colocated=true: no others read the trainer's memory; use disk or broadcast"

    def without_trainer(self) -> Self:
        """These settings for a run without a trainer: own GPUs, and weights once, from a folder."""
        return replace(self, sync="disk", colocated=False)
