"""Records of a rehearsal: the request for a rank and its metered result.

Both are picklable, since each rank runs in its own process. Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bapo_megatron.config import RunConfig

SEARCH, UPDATE, HAND_OVER, SAMPLE = "bounds search", "update", "hand over", "sample"
OFFLOADED = "offloaded"
"""Memory kind of an offloaded policy's host copies."""
REFERENCE = "reference"
"""Memory kind of the frozen reference's host copy."""
STEADY_UPDATE = (f"{SEARCH} 2", f"{UPDATE} 2")
"""Phases of a steady update: the second one, whose optimizer states exist."""


@dataclass(frozen=True)
class RankRequest:
    """Request to rehearse one rank of a recipe; ``model.hf_path`` needs only a config.json."""

    config: RunConfig
    rank: int
    packs: int
    """Packs per update on each replica."""
    device: Literal["cuda", "cpu"] = "cuda"
    """``cpu``: the program as it runs on gloo, for comparison with real ranks."""
    expert_imbalance: float = 1.0
    """Token copies routed to this rank's experts, as a multiple of the mean over EP."""
    names_phases: bool = False
    """Print each phase on stderr as it begins."""

    @property
    def world_size(self) -> int:
        return self.config.parallel.model_size * (self.config.parallel.data or 1)

    @property
    def place(self) -> dict[str, int]:
        """The rank's coordinates in the layout. megatron numbers TP first, then CP, DP and PP."""
        p = self.config.parallel
        rest, place = self.rank, {}
        for name, size in (("tensor", p.tensor), ("context", p.context), ("data", p.data or 1)):
            rest, place[name] = divmod(rest, size)
        return {**place, "stage": rest}


@dataclass(frozen=True)
class Call:
    """One collective or point-to-point call of a rank, with its place in the program."""

    op: str
    group: str
    """Kind of parallelism of the group: TP, CP, ..."""
    ranks: tuple[int, ...]
    size: int
    """Bytes of the whole message: after a gather, before a reduce-scatter."""
    dtype: str
    device: str
    peer: int | None
    """The other rank of a send or recv; the source of a broadcast."""
    line: str
    phase: str


class Wait(NamedTuple):
    """Key of a count of host waits or of guessed values: phase, kind of read, program line."""

    phase: str
    what: str
    line: str


@dataclass(frozen=True)
class Peak:
    """Peak memory of one device in one phase, in bytes, by kind."""

    size: int
    kinds: dict[str, int]


@dataclass(frozen=True)
class LargeTensor:
    """Tensors of one shape, kind, module and program line that are allocated at a peak, counted together."""

    size: int
    """Total bytes."""
    count: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    module: str
    line: str


@dataclass(frozen=True)
class RankResult:
    """Metered result of one rank, by phase; sizes in bytes. After an error: the records up to it, or none."""

    rank: int
    place: dict[str, int]
    layers: str
    """The rehearsed layers: te or torch."""
    packs: int
    gpu: dict[str, Peak] = field(default_factory=dict)
    """Peak GPU memory by phase."""
    host: dict[str, Peak] = field(default_factory=dict)
    largest: list[LargeTensor] = field(default_factory=list)
    """The largest tensors at the highest peak."""
    flops: dict[str, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    waits: dict[Wait, int] = field(default_factory=dict)
    guesses: dict[Wait, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    kernels: int = 0
    error: str | None = None
    """Phase, file, line and message of the rank's failure; None without one."""

    @property
    def peak_phase(self) -> str:
        """Phase with the highest GPU memory peak."""
        return max(self.gpu, key=lambda phase: self.gpu[phase].size)

    @property
    def highest(self) -> int:
        """Highest GPU memory peak, in bytes."""
        return max((peak.size for peak in self.gpu.values()), default=0)

    def update_waits(self) -> dict[Wait, int]:
        """Host waits of a steady update and its search."""
        return {wait: n for wait, n in self.waits.items() if wait.phase in STEADY_UPDATE}
