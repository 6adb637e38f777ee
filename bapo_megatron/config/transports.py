"""Table of weight transports from trainer to engines, ``TRANSPORTS``: the values of `rollout.sglang.sync`.

An entry has the dotted paths of the sender class, in the trainer, and of the class that drives engines, in
the sampler process, and states which engines it fits. For another transport write a sender in
``rollout/weight_sync/`` and add an entry, and a measured rate in ``planning/traffic.py``. A sender transfers
buckets, memory handles, or parts that send themselves (``types.SelfSendingPart``). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

_SYNC = "bapo_megatron.rollout.weight_sync"
_UPDATES = "bapo_megatron.rollout.engines.weight_updates"


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Table entry of a weight transport: dotted paths of its sender and driver classes, whether engines must
    be colocated, and the engine protocol that it needs."""

    sender: str | None = None
    """Path of the trainer's side, a ``WeightSync`` that takes ``weight_sync/disk.SenderParts``. It calls
    ``begin``, ``receive``, ``confirm`` and ``resume``. None: disk sync, every transport's fallback."""
    driver: str = f"{_UPDATES}:WeightUpdates"
    """Path of the side of the sampler's process, ``WeightUpdates`` or a subclass, which answers them. The
    default finds sleeping engines alone, which ``begin`` names."""
    colocated: bool | None = None
    """Whether engines must be colocated (True), must not be (False), or may be either."""
    why: str = ""
    """Why the other engines cannot take it, for the message."""
    protocol: str | None = None
    """Name of the protocol of ``interfaces.py`` by which engines take its ``WeightParts``; they name the
    transport in ``transports``. None: it has no parts, and every engine takes it."""
    reads_trainer_memory: bool = False
    """Whether engines read the memory of the process that trains on their GPU, which must be one."""
    folders: int = 0
    """Versions of the weights in the run directory at a time, at most, without a fallback."""


TRANSPORTS = {
    "disk": Transport(folders=2),
    "broadcast": Transport(
        sender=f"{_SYNC}.broadcast:BroadcastSync",
        driver=f"{_UPDATES}:BroadcastUpdates",
        colocated=False,
        why="NCCL has no two ranks on one GPU",
        protocol="ReceivesBroadcast",
    ),
    "ipc": Transport(
        sender=f"{_SYNC}.ipc:IpcSync",
        colocated=True,
        why="no others read the trainer's memory",
        protocol="ReceivesHandles",
        reads_trainer_memory=True,
        folders=1,  # which is read at a server's start
    ),
}
"""The transports by the names that `sync` takes. Classes are imported only when chosen."""

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[tuple(TRANSPORTS)]


def placement_problems(sync: str, colocated: bool) -> Iterator[str]:
    """Yield an error if ``sync`` does not fit colocated, or separate, engines; none for an unknown name."""
    fitting = [name for name, transport in TRANSPORTS.items() if transport.colocated in (None, colocated)]
    if sync not in TRANSPORTS or sync in fitting:  # an unknown name is a mistake of the field's type
        return
    why = TRANSPORTS[sync].why
    if colocated:
        yield f"colocated needs sync={' or '.join(reversed(fitting))}, not {sync}: {why}"
    else:
        yield f"sync={sync} needs colocated=true: {why}; use {' or '.join(fitting)}"
