"""Policy-gradient losses, chosen by ``algorithm.loss``: a registered name, or ``package.module:Name``.

A loss is one file with one subclass of ``Loss``. It says what the loss of a pack is and which tokens have a
gradient; clip fractions, diagnostics, the entropy rule and PAPO follow from that.

Legend: ``_T`` tokens of a pack.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from bapo_megatron.algo.bounds import BoundsConfig, fixed
from bapo_megatron.algo.measurements import LossTerms, Measurement
from bapo_megatron.algo.settings import check_settings, settings_of
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT, ratio, unmasked
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.dotted_path import load_dotted_path
from bapo_megatron.types import MicroBatch, TokenFn, TokenStats

__all__ = [
    "LOSSES",
    "Loss",
    "LossTerms",
    "Search",
    "TokenLoss",
    "TokenRule",
    "Tokens",
    "build_loss",
    "load_loss",
]

LOSSES = {
    "clip": "bapo_megatron.algo.losses.clip:ClipLoss",
    "cispo": "bapo_megatron.algo.losses.cispo:Cispo",
    "sapo": "bapo_megatron.algo.losses.sapo:Sapo",
    "dppo_tv": "bapo_megatron.algo.losses.dppo:DppoTv",
    "dppo_kl": "bapo_megatron.algo.losses.dppo:DppoKl",
    "ce_gppo": "bapo_megatron.algo.losses.ce_gppo:CeGppo",
    "aspo": "bapo_megatron.algo.losses.aspo:Aspo",
    "maspo": "bapo_megatron.algo.losses.maspo:Maspo",
    "gspo": "bapo_megatron.algo.losses.gspo:Gspo",
    "m2po": "bapo_megatron.algo.losses.m2po:M2po",
    "vespo": "bapo_megatron.algo.losses.vespo:Vespo",
}
"""The registered names, and where their classes are."""


@dataclasses.dataclass(frozen=True)
class Search:
    """What a loss must know of a whole update before it can be taken: clipping bounds, sequence ratios."""

    measure: TokenFn
    """Additive sums of one pack: a float64 vector of one length in all packs."""
    find: Callable[..., Any]
    """What the loss gets as ``found``, from the sums of ``measure`` over all packs and ranks."""
    scope: Literal["update", "lagged", "micro_batch"]
    """Over which tokens ``measure`` is summed: see ``BoundsConfig.scope``."""
    size: int = 0
    """Length of the vector of ``measure``; 0 if it depends on the update."""
    known: Any = None
    """``found`` where it is known without any sums; None where it is not."""
    is_ratio: bool = False
    """Whether ``found`` is the ratio or the mask of the loss itself. Then it is measured also where
    ``algorithm.known_ratio`` takes the ratio as 1, but for ``old_log_probs=trainer``, where it is 1."""
    carried: Callable[[Any], Any] | None = None
    """What the next search of the same batch gets, as the second argument of ``find``, of what this one has
    found: a value of plain JSON, which checkpoints keep. The first search of a batch gets None. Without it
    ``find`` has one argument."""


class Loss(ABC):
    """The loss of an update. It is made of the run's ``AlgorithmConfig``; ``terms`` is all it must have.

    A constructor that cannot use a setting raises ConfigError. The settings of a loss are the arguments of
    its constructor after ``algorithm``, with defaults; ``algorithm.loss_settings`` gives them. Their
    annotations state types and ranges, ``Annotated[float, Gt(0)]``, which are checked before work starts.
    ``narrow = functools.partial(MyLoss, width=0.1)`` in the same module names another choice,
    ``package.module:narrow``.
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


class Tokens(NamedTuple):
    """The tokens of a pack as a ``TokenLoss`` sees them: float64 [T], without gradient, 0 where masked."""

    log_ratio_T: Tensor
    """log(pi / pi_old), nats."""
    ratio_T: Tensor
    """pi / pi_old, with log r clamped to ``LOG_RATIO_LIMIT``."""
    advantage_T: Tensor
    log_prob_T: Tensor
    """log pi of the sampled token, nats."""
    old_log_prob_T: Tensor
    """log pi_old: the rollout's, or the trainer's own (``algorithm.old_log_probs``)."""
    rollout_log_prob_T: Tensor
    """log pi_rollout."""

    @classmethod
    def of(cls, stats: TokenStats, batch: MicroBatch) -> Tokens:
        """The tokens of one pack."""
        log_prob_T = stats.log_prob_T.detach()
        log_ratio_T, *fields = unmasked(
            batch.mask_T,
            log_prob_T - batch.old_log_prob_T,
            batch.advantage_T,
            log_prob_T,
            batch.old_log_prob_T,
            batch.rollout_log_prob_T,
        )
        return cls(log_ratio_T, ratio(log_ratio_T), *fields)


class TokenRule(NamedTuple):
    """What a ``TokenLoss`` makes of each token: ``loss = -sum_t weight A value``."""

    value_T: Tensor
    """float64: what the advantage is multiplied with in the objective."""
    factor_T: Tensor
    """float64: the derivative of the value by log pi, ``g``; 0 where the token has no gradient."""
    clipped_T: Tensor
    """bool: the tokens that the loss clips or masks."""


class TokenLoss(Loss):
    """A loss in which a token's term depends on nothing but the token: subclasses define ``rule``.

    The gradient is the rule's factor by construction, so a stop-gradient of a paper is a choice of the
    factor: ``d loss / d log pi = -weight A g``. A token beyond ``LOG_RATIO_LIMIT`` has no gradient.
    """

    @abstractmethod
    def rule(self, tokens: Tokens) -> TokenRule:
        """Value, gradient factor and clipping of each token, without gradient."""

    def terms(self, stats: TokenStats, batch: MicroBatch, found: None) -> LossTerms:
        """Minus the weighted sum of the rule's values, with the rule's factors as derivatives."""
        tokens = Tokens.of(stats, batch)
        value_T, factor_T, clipped_T = self.rule(tokens)
        live_T = batch.mask_T != 0
        alive_T = live_T & (tokens.log_ratio_T.abs() <= LOG_RATIO_LIMIT)
        factor_T = torch.where(alive_T, factor_T, 0.0)
        log_prob_T, weight_T = unmasked(batch.mask_T, stats.log_prob_T, batch.weight_T)
        step_T = log_prob_T - log_prob_T.detach()  # 0, with the gradient of log pi
        loss = -(weight_T * tokens.advantage_T * (value_T + factor_T * step_T)).sum()
        return LossTerms(loss, factor_T, clipped_T & live_T)


class _LossSettings(Protocol):
    """The part of ``AlgorithmConfig`` that choosing a loss reads."""

    @property
    def loss(self) -> str:
        """A registered name, or ``package.module:Name``."""

    @property
    def loss_settings(self) -> Mapping[str, Any]:
        """Settings of the loss, by the names of its constructor's arguments."""

    @property
    def bounds(self) -> BoundsConfig:
        """The clipping bounds."""


def load_loss(name: str) -> Callable[..., Loss]:
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
    loss: Callable[..., Loss] = found
    return loss


def build_loss(algorithm: _LossSettings) -> Loss:
    """The loss of ``algorithm.loss`` with ``algorithm.loss_settings``.

    ConfigError if it cannot be had, does not take a setting, or would ignore settings of bounds.
    """
    build = load_loss(algorithm.loss)
    owner, settings = f"algorithm.loss={algorithm.loss}", algorithm.loss_settings
    check_settings("algorithm.loss_settings", owner, settings_of(build), settings)
    loss = build(algorithm, **algorithm.loss_settings)
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
