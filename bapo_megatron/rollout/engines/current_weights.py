"""The current weights of a run's engines, where they are in a folder, and how one engine gets them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bapo_megatron.rollout.engines.digest_quorum import DigestQuorum
from bapo_megatron.rollout.engines.slot import EngineSlot


@dataclass(frozen=True, eq=False)
class CurrentWeights:
    """The current weight version, as an HF folder."""

    folder: Path
    version: int
    quorum: DigestQuorum
    load_s: float
    """Deadline of an engine's load."""

    async def load(self, slot: EngineSlot) -> None:
        """Load them into an engine. Raises unless it then has the right ones."""
        engine = slot.engine
        if not slot.is_up:
            await engine.abort()  # what it still does for nobody
        await engine.load(self.folder, self.version, partial(self.quorum.confirm, engine.name))
        if (found := await engine.weight_version()) != self.version:
            raise RuntimeError(f"says it has weights {found} after it was sent {self.version}")
