"""Shared parts of the GPU check's sections: row of the report, problem size, timers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

_LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


def commands_environment() -> dict[str, str]:
    """Environment of a section's subprocess: the current one without the launcher's variables."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHER}


@dataclass(frozen=True)
class Row:
    """One measurement; a check if it has a limit."""

    name: str
    measured: str
    limit: str = ""
    ok: bool | None = None
    """None: reported, not checked."""

    def line(self) -> str:
        """Row of a Markdown table."""
        verdict = {None: "", True: "ok", False: "FAILED"}[self.ok]
        return f"| {self.name} | {self.measured} | {self.limit} | {verdict} |"


@dataclass(frozen=True)
class Size:
    """Problem size; the defaults are for a GPU with at least 80 GB."""

    device: Literal["cuda", "cpu"]
    hidden: int = 1536
    layers: int = 28
    heads: int = 12
    kv_heads: int = 2
    ffn: int = 8960
    vocab: int = 151936
    """With the fields above, the shape of Qwen2.5-1.5B."""
    pack: int = 16384
    packs: int = 4
    documents: tuple[int, ...] = (4096, 8192, 64, 1, 16384)
    """Document lengths in the attention check."""
    canary_tokens: int = 4096

    tiny: bool = False
    """Too small for checks of time and memory."""

    @classmethod
    def smallest(cls, device: Literal["cuda", "cpu"]) -> Size:
        """Size that takes seconds on a CPU."""
        shape = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512}
        return cls(device, **shape, pack=256, packs=2, documents=(64, 16), canary_tokens=256, tiny=True)

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


def seconds(run: Callable[[], object], rounds: int = 3) -> float:
    """Shortest time of ``rounds`` runs, after one warm-up run."""
    run()
    times = []
    for _ in range(rounds):
        _wait()
        start = time.perf_counter()
        run()
        _wait()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_gib(run: Callable[[], object]) -> float | None:
    """Peak GiB that ``run`` allocates on the GPU above the memory before; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    _wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    _wait()
    return float(torch.cuda.max_memory_allocated() - before) / 2**30


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
