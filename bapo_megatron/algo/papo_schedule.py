"""PAPO's schedule: weights of entropy-expanding and -contracting advantages, from a run's entropy.

    w = 1 + strength phase  (expanding),    w = 1 - strength phase  (contracting)

The phase, -1 to 1, measures how far the moving average of the run's entropy is below its target.
``PapoSchedule.observe`` takes each update's entropy, ``weights`` has the next update's two factors, and
``state`` is stored in checkpoints. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Gt, Lt


@dataclass(frozen=True)
class PapoConfig:
    """Settings of PAPO (arXiv 2605.11775): entropy-expanding and -contracting advantages are reweighted.

    Section `algorithm.polarity` of a recipe.
    """

    enabled: bool = False
    """Reweight the advantages. The bounds are then searched with the reweighted ones, which takes a forward
    pass also where the ratio is known."""
    strength: Annotated[float, Ge(0), Lt(1)] = 0.5
    """Largest change of a branch's weight: below 1, so that no branch gets the weight 0."""
    target_entropy: Annotated[float | None, Gt(0)] = None
    """Target entropy, nats per token. None: the entropy of the run's first update."""
    band: Annotated[float, Gt(0)] = 0.5
    """Distance from the target, as a fraction of it, at which the weights have changed by `strength`."""
    memory: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the moving average of the updates' entropies: the weight of the past."""


class BranchWeights(NamedTuple):
    """PAPO's weights: factors of the advantages of entropy-expanding and -contracting tokens."""

    expanding: float
    contracting: float


class PapoSchedule:
    """PAPO's schedule of one run: the next update's weights, from the entropies of earlier updates.

    ``UpdateLoss`` reads ``weights`` before an update and then calls ``observe`` with the update's mean
    entropy, which is equal on every rank. Checkpoints contain its ``state``.
    """

    def __init__(self, config: PapoConfig) -> None:
        self._config = config
        self._entropy: float | None = None
        self._target = config.target_entropy

    @property
    def phase(self) -> float:
        """Phase of the moving average of the entropy, -1 to 1, ``clip((target - entropy) / (band target), -1,
        1)``: 1 is far too low. 0 before the first update, and at a target of 0."""
        target = self._target or 0.0
        if self._entropy is None or target <= 0:
            return 0.0
        return max(-1.0, min(1.0, (target - self._entropy) / (self._config.band * target)))

    @property
    def weights(self) -> BranchWeights:
        """Weights of the next update: ``1 + strength phase`` (expanding), ``1 - strength phase``."""
        change = self._config.strength * self.phase
        return BranchWeights(1.0 + change, 1.0 - change)

    def observe(self, entropy: float) -> None:
        """Update the moving average with an update's mean entropy, nats per token, at its initial weights."""
        if self._target is None:
            self._target = entropy
        memory = self._config.memory
        self._entropy = entropy if self._entropy is None else memory * self._entropy + (1 - memory) * entropy

    def state(self) -> dict[str, Any] | None:
        """State for a checkpoint, as JSON types; None before the first update."""
        return None if self._entropy is None else {"entropy": self._entropy, "target": self._target}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore ``state``. A configured target replaces the stored one."""
        if state is not None:
            self._entropy = state["entropy"]
            self._target = self._config.target_entropy or state["target"]
