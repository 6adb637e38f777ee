"""Policy-gradient losses, chosen by ``algorithm.loss``: a registered name, or ``package.module:Name``.

A loss is one file with one subclass of ``Loss``. It says what the loss of a pack is and which tokens have a
gradient; clip fractions, diagnostics, the entropy rule and PAPO follow from that.

Legend: ``_T`` tokens of a pack.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from bapo_megatron.algo.bounds import BoundsConfig, fixed
from bapo_megatron.algo.measurements import LossTerms, Measurement
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.dotted_path import load_dotted_path
from bapo_megatron.types import MicroBatch, TokenFn, TokenStats

__all__ = ["LOSSES", "Loss", "LossTerms", "Search", "build_loss", "load_loss"]

LOSSES = {"bapo": "bapo_megatron.algo.losses.bapo:BapoLoss"}
"""The registered names, and where their classes are."""


@dataclasses.dataclass(frozen=True)
class Search:
    """What a loss must know of a whole update before it can be taken: clipping bounds, sequence ratios."""

    measure: TokenFn
    """Additive sums of one pack: a float64 vector of one length in all packs."""
    find: Callable[[Tensor], Any]
    """What the loss gets as ``found``, from the sums of ``measure`` over all packs and ranks."""
    scope: Literal["update", "lagged", "micro_batch"]
    """Over which tokens ``measure`` is summed: see ``BoundsConfig.scope``."""
    size: int = 0
    """Length of the vector of ``measure``; 0 if it depends on the update."""
    known: Any = None
    """``found`` where it is known without any sums; None where it is not."""


class Loss(ABC):
    """The loss of an update. It is made of the run's ``AlgorithmConfig``; ``terms`` is all it must have.

    A constructor that cannot use a setting raises ConfigError. Parameters of a user's loss are arguments of
    its constructor with defaults; ``narrow = functools.partial(MyLoss, width=0.1)`` in the same module names
    another choice, ``package.module:narrow``.
    """

    bounds: ClassVar[Literal["searched", "fixed", "unused"]] = "unused"
    """What the loss does with ``algorithm.bounds``: searches them, reads c_low and c_high of fixed ones (and
    refuses others), or nothing (settings of bounds are refused)."""
    search: Search | None = None
    """What must be found before the loss is taken; None for a loss that needs nothing but the pack."""
    measurements: Sequence[Measurement] = ()
    """Metrics of its own, beside those of every loss."""

    def __init__(self, algorithm: Any) -> None:
        """``algorithm``: the run's ``AlgorithmConfig``."""
        self.algorithm = algorithm

    @abstractmethod
    def terms(self, stats: TokenStats, batch: MicroBatch, found: Any) -> LossTerms:
        """The loss of one pack, and what it does to each token.

        A pack may come in parts (chunks of its tokens, parts of its sequences on context-parallel ranks), so
        the loss of a token must not depend on other tokens but through ``found``.

        Args:
            stats: log-probs, differentiable, and entropies under the policy in training.
            batch: the pack. Tokens whose mask is 0 must count nowhere, whatever they hold.
            found: what ``search.find`` returned; None without a search.
        """


class _LossSettings(Protocol):
    """The part of ``AlgorithmConfig`` that choosing a loss reads."""

    @property
    def loss(self) -> str:
        """A registered name, or ``package.module:Name``."""

    @property
    def bounds(self) -> BoundsConfig:
        """The clipping bounds."""


def load_loss(name: str) -> Callable[[Any], Loss]:
    """The loss class of a registered name or a dotted path. ConfigError that says why it cannot be had."""
    known = ", ".join(sorted(LOSSES))
    path = LOSSES.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"algorithm.loss={name!r} is unknown: give {known}, or the path of a class as package.module:Name"
        )
    found = load_dotted_path("algorithm.loss", path, "class")
    cls = getattr(found, "func", found)  # of a functools.partial
    if not (isinstance(cls, type) and issubclass(cls, Loss)):
        raise ConfigError(
            f"algorithm.loss={name}: {found!r} is no subclass of bapo_megatron.algo.losses.Loss; make it one"
        )
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(f"algorithm.loss={name}: {cls.__name__} lacks {', '.join(missing)}: define it")
    loss: Callable[[Any], Loss] = found
    return loss


def build_loss(algorithm: _LossSettings) -> Loss:
    """The loss of ``algorithm.loss``. ConfigError if it cannot be had, or would ignore settings of bounds."""
    loss = load_loss(algorithm.loss)(algorithm)
    bounds = algorithm.bounds
    if loss.bounds == "fixed" and (bounds.low_start, bounds.high_start) != (bounds.low_end, bounds.high_end):
        raise ConfigError(
            f"algorithm.loss={algorithm.loss} reads fixed bounds and searches none, but algorithm.bounds "
            f"range from {bounds.low_start} to {bounds.low_end} and from {bounds.high_start} to "
            f"{bounds.high_end}: set algorithm.bounds=fixed(low, high)"
        )
    read = fixed(bounds.low_start, bounds.high_start) if loss.bounds == "fixed" else BoundsConfig()
    ignored = [
        f"algorithm.bounds.{item.name}={getattr(bounds, item.name)}"
        for item in dataclasses.fields(bounds)
        if getattr(bounds, item.name) != getattr(read, item.name)
    ]
    if loss.bounds != "searched" and ignored:
        unset = "fixed(low, high)" if loss.bounds == "fixed" else "BoundsConfig()"
        raise ConfigError(
            f"{', '.join(ignored)}: algorithm.loss={algorithm.loss} does not read that; leave it out, in "
            f"the recipe too: algorithm.bounds={unset}"
        )
    return loss
