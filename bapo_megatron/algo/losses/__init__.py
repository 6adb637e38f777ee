"""Policy-gradient losses: registry and base classes, ``loss = -sum_t weight_t A_t value_t``.

``build_loss`` creates the loss of ``algorithm.loss``, a registered name or ``package.module:Name``. A new
loss subclasses ``TokenLoss`` (define ``rule``) or ``Loss`` (define ``terms``: from a pack's log-probs,
columns and search result to its loss, each token's gradient factor, and clipping). Clip fractions,
diagnostics, entropy rule and PAPO follow from these. ``Objective`` calls a loss on every rank, for the rank's
own packs; a loss makes no collective calls.

Legend: ``_T`` tokens of a pack (a micro-batch of packed sequences).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bapo_megatron.algo.measurements import LossTerms as LossTerms
from bapo_megatron.algo.measurements import Measurement
from bapo_megatron.algo.registered_losses import LOSSES as LOSSES
from bapo_megatron.algo.registered_losses import BoundsUse, check_bounds, loss_path
from bapo_megatron.algo.settings import check_settings, settings_of
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT, ratio, unmasked
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.dotted_path import load_dotted_path
from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats


@dataclasses.dataclass(frozen=True)
class Search:
    """A search that precedes a loss, over an update or parts of it: clipping bounds, sequence ratios, a mask.
    ``found = find(sum of measure over packs and ranks)``: ``UpdateLoss`` obtains the sums (in the cheapest
    way that ``scope`` allows) and calls ``find``. ``found``, equal on every rank, goes to ``Loss.terms``."""

    measure: TokenFn
    """Additive sums of one pack: a float64 vector of the same length for all packs."""
    find: Callable[[Tensor], Any]
    """Maps the sums of ``measure`` over all packs and ranks to the result ``found``."""
    scope: Literal["update", "lagged", "micro_batch"]
    """Tokens in the sums: see ``BoundsConfig.scope``."""
    size: int = 0
    """Length of ``measure``'s vector; 0 if it depends on the update."""
    known: Any = None
    """``found`` if it needs no sums (fixed bounds), otherwise None."""
    is_ratio: bool = False
    """Whether ``found`` is the ratio, mask or cap of the loss itself. Then it is measured even where
    ``algorithm.known_ratio`` takes the ratio as 1, except with ``old_log_probs=trainer``, where it is 1."""


class Loss(ABC):
    """Base class of a policy-gradient loss. Subclasses define ``terms``, which returns a pack's
    ``LossTerms``, and may set ``search`` and ``measurements``.

    The constructor receives the run's ``AlgorithmConfig`` and raises ConfigError for an unusable setting. Its
    further arguments, with defaults, are the loss's settings, from ``algorithm.loss_settings``. Their
    annotations state types and ranges, ``Annotated[float, Gt(0)]``, checked before work starts. A ``narrow =
    functools.partial(MyLoss, width=0.1)`` in the same module is another choice, ``package.module:narrow``.

    A loss keeps no state between updates: checkpoints contain nothing of it.
    """

    bounds: ClassVar[BoundsUse] = "unused"
    """Use of ``algorithm.bounds``: `searched`; `fixed`: reads c_low and c_high, rejects ranges; or `unused`:
    rejects bounds settings."""
    search: Search | None = None
    """The search before the loss; None if the loss needs only the pack."""
    measurements: Sequence[Measurement] = ()
    """The loss's own metrics."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm

    @abstractmethod
    def terms(self, stats: TokenStats, batch: MicroBatch, found: Any) -> LossTerms:
        """Return the loss of one pack, with the gradient factor and clipping of each token.

        A pack may come in parts (chunks of its tokens, or context-parallel parts of its sequences), so a
        token's loss may depend on other tokens only through ``found``.

        Args:
            stats: log-probs, differentiable, and entropies under the policy in training.
            batch: the pack. Tokens with mask 0 must not count, whatever they hold.
            found: the result of ``search.find``; None without a search.
        """


class Tokens(NamedTuple):
    """Per-token inputs of ``TokenLoss.rule``: ratio, advantage, and log-probs under the policy, pi_old and
    pi_rollout. float64 [T], without gradient; 0 (ratio 1) where masked."""

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

    @classmethod
    def of(cls, stats: TokenStats, batch: MicroBatch) -> Tokens:
        """Read the tokens of one pack."""
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
    """Per-token result of ``TokenLoss.rule``, [T]: the objective's value (``loss = -sum_t weight A value``),
    its gradient factor, and whether the token is clipped."""

    value_T: Tensor
    """float64: the advantage's factor in the objective, for example PPO's clipped ratio."""
    factor_T: Tensor
    """float64: ``g``, the derivative of the value by log pi; 0 without gradient."""
    clipped_T: Tensor
    """bool: tokens clipped or masked by the loss."""


class TokenLoss(Loss):
    """Base class of a per-token loss without a search, ``-sum_t weight A value``: subclasses define ``rule``.
    The gradient is ``d loss / d log pi = -weight A g`` by construction, so the choice of ``g`` implements a
    paper's stop-gradient. A token beyond ``LOG_RATIO_LIMIT`` has no gradient."""

    @abstractmethod
    def rule(self, tokens: Tokens) -> TokenRule:
        """Return value, gradient factor and clipping of each token, without gradient."""

    def terms(self, stats: TokenStats, batch: MicroBatch, found: None) -> LossTerms:
        """Return the rule's loss, with its factors as derivatives."""
        tokens = Tokens.of(stats, batch)
        value_T, factor_T, clipped_T = self.rule(tokens)
        live_T = batch.mask_T != 0
        alive_T = live_T & (tokens.log_ratio_T.abs() <= LOG_RATIO_LIMIT)
        factor_T = torch.where(alive_T, factor_T, 0.0)
        log_prob_T, weight_T = unmasked(batch.mask_T, stats.log_prob_T, batch.weight_T)
        step_T = log_prob_T - log_prob_T.detach()  # 0, with the gradient of log pi
        loss = -(weight_T * tokens.advantage_T * (value_T + factor_T * step_T)).sum()
        return LossTerms(loss, factor_T, clipped_T & live_T)


def load_loss(name: str) -> Callable[..., Loss]:
    """Import the loss of a registered name or dotted path. Raises ConfigError unless it is a ``Loss``."""
    path = loss_path(name)
    target = load_dotted_path("algorithm.loss", path, "class")
    cls = getattr(target, "func", target)  # unwraps functools.partial
    if not (isinstance(cls, type) and issubclass(cls, Loss)):
        raise ConfigError(
            f"algorithm.loss={name}: {target!r} is not a subclass of bapo_megatron.algo.losses.Loss; make "
            "it one"
        )
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(f"algorithm.loss={name}: {cls.__name__} lacks {', '.join(missing)}: define it")
    loss: Callable[..., Loss] = target
    return loss


def build_loss(algorithm: Any) -> Loss:
    """Create the loss of an ``AlgorithmConfig`` from ``algorithm.loss`` and ``algorithm.loss_settings``.
    Raises ConfigError for an unknown loss or setting, or for bounds settings that it would ignore."""
    build = load_loss(algorithm.loss)
    owner, settings = f"algorithm.loss={algorithm.loss}", algorithm.loss_settings
    check_settings("algorithm.loss_settings", owner, settings_of(build), settings)
    loss = build(algorithm, **algorithm.loss_settings)
    check_bounds(algorithm, loss.bounds)
    return loss
