"""Records of a rehearsal as plain data: the request for a rank, and its metered result.

Both can be pickled, since each rank is rehearsed in a process of its own. Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bapo_megatron.config import RunConfig

SEARCH, UPDATE, HAND_OVER, SAMPLE = "bounds search", "update", "hand over", "sample"
OFFLOADED = "offloaded"
"""Kind of memory of an offloaded policy's host copies."""
REFERENCE = "reference"
"""Kind of memory of the frozen reference's host copy."""
STEADY_UPDATE = (f"{SEARCH} 2", f"{UPDATE} 2")
"""Phases of a steady update, which is the second one: its optimizer has its states."""


@dataclass(frozen=True)
class RankRequest:
    """Request to rehearse one rank of a recipe whose ``model.hf_path`` has at least a config.json."""

    config: RunConfig
    rank: int
    packs: int
    """Packs of an update on each replica."""
    device: Literal["cuda", "cpu"] = "cuda"
    """``cpu``: the program as it runs on gloo, to compare with real ranks."""
    expert_imbalance: float = 1.0
    """Copies of tokens that this rank's experts get, as a multiple of the mean over EP."""
    names_phases: bool = False
    """Print each phase on stderr as it begins."""

    @property
    def world_size(self) -> int:
        return self.config.parallel.model_size * (self.config.parallel.data or 1)

    @property
    def place(self) -> dict[str, int]:
        """The rank's coordinates in the layout: megatron numbers TP first, then CP, DP and PP."""
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
    """The group by its kind of parallelism: TP, CP, ..."""
    ranks: tuple[int, ...]
    size: int
    """Bytes of the whole message: the gathered one, or the one before a reduction is scattered."""
    dtype: str
    device: str
    peer: int | None
    """The other rank of a send or recv, the source of a broadcast."""
    line: str
    phase: str


class Wait(NamedTuple):
    """Place of a host wait, the key of its count: phase, kind of read, line of the program."""

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
    """Tensors of one shape and origin that are allocated at a peak, counted together, for the page."""

    size: int
    """Bytes of all of them."""
    count: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    module: str
    line: str


@dataclass(frozen=True)
class RankResult:
    """Metered result of one rank, by phase of its program; sizes in bytes."""

    rank: int
    place: dict[str, int]
    layers: str
    """The rehearsed layers: te or torch."""
    packs: int
    gpu: dict[str, Peak] = field(default_factory=dict)
    """Peaks of the GPU's memory by phase."""
    host: dict[str, Peak] = field(default_factory=dict)
    largest: list[LargeTensor] = field(default_factory=list)
    """The largest tensors at the highest peak, grouped by where they come from."""
    flops: dict[str, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    waits: dict[Wait, int] = field(default_factory=dict)
    guesses: dict[Wait, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    kernels: int = 0
    error: str | None = None
    """Why the rank failed, with phase, file and line; None if it did not."""

    @property
    def peak_phase(self) -> str:
        """The phase with the highest peak of the GPU's memory."""
        return max(self.gpu, key=lambda phase: self.gpu[phase].size)

    @property
    def highest(self) -> int:
        """Bytes of the highest peak of the GPU's memory."""
        return max((peak.size for peak in self.gpu.values()), default=0)

    def update_waits(self) -> dict[Wait, int]:
        """Host waits of a steady update, with its search."""
        return {wait: n for wait, n in self.waits.items() if wait.phase in STEADY_UPDATE}
