"""The part of a run's configuration that is about SGLang servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt


@dataclass(frozen=True)
class SglangConfig:
    """SGLang servers, for `rollout.engine=sglang`."""

    urls: tuple[str, ...] = ()
    """Servers that run already, e.g. http://node7:30000. None: the run starts servers of its own."""
    servers: Annotated[int, Ge(1)] = 1
    """How many the run starts on rank 0's machine, each on `tensor` GPUs."""
    python: Path | None = None
    """Interpreter of SGLang's environment. None: BAPO_SGLANG_PYTHON, or .venv-sglang/bin/python."""
    tensor: Annotated[int, Ge(1)] = 1
    """Tensor parallel size of a server."""
    first_gpu: Annotated[int, Ge(0)] = 0
    """The first GPU of the first server that the run starts."""
    memory_fraction: Annotated[float, Gt(0), Lt(1)] = 0.85
    """Share of a GPU's memory for weights and KV cache."""
    context: int | None = None
    """Longest sequence. None: the longest of the run."""
    flags: tuple[str, ...] = ()
    """More flags of sglang.launch_server."""
    on_update: Literal["retract", "in_place"] = "retract"
    """Responses in the making when weights change. `retract`: their keys and values are computed again under
    the new weights. `in_place`: they keep the old ones; faster, but such servers have no prefix cache."""
    sync: Literal["disk", "broadcast"] = "disk"
    """How weights reach the servers. `disk`: a folder in the run directory, which they must see. `broadcast`:
    over NCCL between GPUs, gloo on a CPU; from disk after all, if that fails."""
    bucket_mb: Annotated[float, Gt(0)] = 512.0
    """Megabytes (2^20 bytes) of each of the two buffers of a broadcast."""
    address: str | None = None
    """Of rank 0's machine, as servers reach it, for a broadcast. None: its host name, or 127.0.0.1 if the
    servers are on it."""
    start_minutes: Annotated[float, Gt(0)] = 15.0
    """Longest wait for a server to load its model."""
    update_minutes: Annotated[float, Gt(0)] = 10.0
    """Longest wait for a server to load new weights."""
    request_minutes: Annotated[float, Gt(0)] = 60.0
    """Longest wait for the answer to one request, in the server's queue and at work. Then it is aborted, and
    goes on from the tokens that it has."""
    lost_minutes: Annotated[float, Gt(0)] = 30.0
    """Longest wait while no server works; then the run saves a checkpoint and ends."""
    max_in_flight: Annotated[int, Ge(1)] = 256
    """Requests at a server at a time."""
