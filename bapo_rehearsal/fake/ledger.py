"""Allocation ledger: a rank's allocations and releases in order, and the memory peak of each phase.

A block is one storage with all its views. It is released with its storage, as in CUDA's caching allocator, or
when the storage is resized to 0. ``program_line`` attributes an allocation, call or wait to a program line.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_SMALLEST = 512
"""Rounding unit of CUDA's caching allocator, bytes (c10/cuda/CUDACachingAllocator, kMinBlockSize)."""
_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_ROOT = Path(__file__).parents[2]
_PYTHON = f"/python{sys.version_info.major}.{sys.version_info.minor}/"


@dataclass(slots=True)
class Block:
    """One allocated storage: its size in bytes, where the program allocated it, and its kind of memory."""

    size: int
    device: str
    shape: tuple[int, ...]
    dtype: str
    op: str
    """The kernel that allocated it."""
    module: str
    """Name of the innermost module in its forward pass, or "backward of" the running autograd node."""
    line: str
    """Program line that called the kernel; large blocks only."""
    phase: str
    kind: str = ""
    """Label of model state, such as weights, gradients or optimizer; empty for other memory."""
    saved: bool = False
    """Whether autograd saved it for a backward pass."""
    communicated: bool = False
    """Whether a collective wrote or sent it."""


class Ledger:
    """Log of storage allocations and releases, filled by the meter; ``peak`` replays it up to a phase's peak.

    Weak references detect releases, so garbage collection decides when memory of a cycle is free.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.windows: dict[str, tuple[int, int]] = {}
        """First event of each phase, and the one after its last."""
        self._events: list[int] = []  # number + 1 of an allocated block, -(number + 1) of a released block
        self._numbers: dict[int, int] = {}  # block numbers by StorageImpl address
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._emptied: set[int] = set()
        """Numbers of the blocks whose storage is resized to 0."""

    def block(self, tensor: torch.Tensor) -> Block | None:
        """Block of a tensor's storage; None if it is unknown."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        return None if number is None else self.blocks[number]

    def add(self, tensor: torch.Tensor, op: str, module: str, line: str, phase: str) -> Block:
        """Record the allocation of a tensor's storage. Returns its block, unchanged for a known storage."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._numbers:
            return self.blocks[self._numbers[address]]
        number = len(self.blocks)
        device = tensor.device.type
        unit = _SMALLEST if device == "cuda" else 1
        size = -(-storage.nbytes() // unit) * unit
        block = Block(size, device, tuple(tensor.shape), str(tensor.dtype)[6:], op, module, line, phase)
        self.blocks.append(block)
        self._numbers[address] = number
        self._events.append(number + 1)

        def died(_: object) -> None:
            if self._numbers.get(address) == number:
                del self._numbers[address]
            del self._references[number]
            if number not in self._emptied:
                self._events.append(-number - 1)

        self._references[number] = weakref.ref(storage, died)
        return block

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that ``resize_`` released or re-allocated a storage's memory."""
        number = self._numbers.get(storage._cdata)
        if number is None or (storage.nbytes() == 0) == (number in self._emptied):
            return
        if storage.nbytes() == 0:
            self._emptied.add(number)
            self._events.append(-number - 1)
        else:
            self._emptied.remove(number)
            self._events.append(number + 1)

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        start = len(self._events)
        try:
            yield
        finally:
            self.windows[name] = (start, len(self._events))

    def peak(self, phase: str, device: str) -> tuple[int, list[Block]]:
        """Peak bytes of a device in ``phase``, and the blocks allocated at the peak."""
        start, end = self.windows[phase]
        alive = self._replay(start)
        live = best = sum(self.blocks[number].size for number in alive if self._is_on(number, device))
        at = start
        for index in range(start, end):
            number = abs(self._events[index]) - 1
            if self._is_on(number, device):
                live += self.blocks[number].size if self._events[index] > 0 else -self.blocks[number].size
                if live > best:
                    best, at = live, index + 1
        return best, [self.blocks[number] for number in self._replay(at) if self._is_on(number, device)]

    def _is_on(self, number: int, device: str) -> bool:
        return self.blocks[number].device == device

    def _replay(self, events: int) -> set[int]:
        """Numbers of the blocks allocated after the first ``events`` events."""
        alive: set[int] = set()
        for event in self._events[:events]:
            if event > 0:
                alive.add(event - 1)
            else:
                alive.remove(-event - 1)
        return alive


def sizes_by_kind(blocks: list[Block]) -> Counter[str]:
    """Bytes of blocks by kind: model state, activations, communication, passing."""
    sizes: Counter[str] = Counter()
    for block in blocks:
        sizes[kind_of(block)] += block.size
    return sizes


def kind_of(block: Block) -> str:
    """Kind of memory of a block; "passing" is temporary memory."""
    if block.kind:
        return block.kind
    if block.saved:
        return "activations"
    return "communication" if block.communicated else "passing"


def program_line() -> str:
    """``file:line`` of the innermost frame that is neither torch's, Python's nor the rehearsal's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_program(frame.f_code.co_filename, frame.f_code.co_name):
            return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@cache
def is_of_program(file: str, function: str) -> bool:
    """Whether a function belongs to the program or its libraries: not torch, Python or the rehearsal."""
    if function in ("__torch_function__", "__torch_dispatch__"):
        return False  # a mode's handler lies between two frames of the program
    return not file.startswith((_TORCH, _OWN, "<")) and ("site-packages" in file or _PYTHON not in file)


def short_path(file: str) -> str:
    """Path of a file below site-packages, Transformer Engine's sources, or the project."""
    if "site-packages/" in file:
        return file.rpartition("site-packages/")[2]
    if "/transformer_engine/pytorch/" in file:
        return "transformer_engine/pytorch/" + file.rpartition("/transformer_engine/pytorch/")[2]
    return file.removeprefix(f"{_ROOT}/")
