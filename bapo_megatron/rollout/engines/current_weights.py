"""The current weights of the engine pool, as an HF folder, and their load into one engine.

``EnginePool`` has an engine loaded by it, also one that comes back from quarantine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bapo_megatron.rollout.engines.digest_quorum import DigestQuorum
from bapo_megatron.rollout.engines.slot import EngineSlot


@dataclass(frozen=True, eq=False)
class CurrentWeights:
    """The current weight version: its HF folder, its digest quorum, and the deadline of a load.

    The pool keeps one; None while the newest weights are in no folder (broadcast, IPC).
    """

    folder: Path
    version: int
    quorum: DigestQuorum
    load_s: float
    """Deadline of an engine's load."""

    async def load(self, slot: EngineSlot) -> None:
        """Load the weights into an engine, and verify version and digest; raises if they are wrong.

        Requests in flight continue, but for those of an engine in quarantine, which are aborted.
        """
        engine = slot.engine
        if not slot.is_up:
            # Orphaned requests of an engine in quarantine: they were sent again to other engines.
            await engine.abort()
        await engine.load(self.folder, self.version, partial(self.quorum.confirm, engine.name))
        if (found := await engine.weight_version()) != self.version:
            raise RuntimeError(f"reports weight version {found} after a load of {self.version}")
