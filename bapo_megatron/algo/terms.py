"""Terms added to the policy loss, token by token.

A function of ``algorithm.terms``, built-in or custom, maps the ``TokenStats`` and the ``MicroBatch`` of some
tokens to a cost per token, [T], differentiable in log-probs and entropies; its further arguments are
settings. ``build_terms`` makes each a ``Term``, the sum ``sum_t weight_t cost_t`` that the loss gains, with
the policy loss's weights and divisor. ``kl_terms`` returns the KL to a reference and to a teacher, which are
terms with their own settings (``reference_kl.py``).

A call may see part of a sequence: a token's cost may depend only on that token. Legend: ``_T`` tokens of a
pack (a micro-batch).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from annotated_types import Gt
from torch import Tensor

from bapo_megatron.algo.measurements import Measurement, PackView, UpdateSums
from bapo_megatron.algo.parts import TERMS, calling, load_part, returned, tried_on
from bapo_megatron.algo.reference_kl import kl_loss
from bapo_megatron.algo.reference_kl_config import DistillationConfig, ReferenceKlConfig
from bapo_megatron.algo.tokens import unmasked
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, TokenStats

Term = Callable[[TokenStats, MicroBatch], Tensor]
"""A loss term with its settings bound: maps a pack to its float64 sum, a scalar with gradient."""


def entropy_bonus(
    stats: TokenStats, batch: MicroBatch, coefficient: Annotated[float, Gt(0)] = 0.001
) -> Tensor:
    """Entropy bonus, ``-coefficient H``: the exact entropy of the next-token distribution, with its gradient.
    verl's ``entropy_coeff``, slime's ``--entropy-coef``. The entropy is at the rollout temperature."""
    return -coefficient * stats.entropy_T


def build_terms(algorithm: Any) -> dict[str, Term]:
    """The terms of ``algorithm.terms`` by metric name. Raises ConfigError for an unknown one or setting."""
    terms: dict[str, Term] = {}
    for number, part in enumerate(algorithm.terms):
        field = f"algorithm.terms[{number}]"
        cost = load_part(field, part.name, part.settings, TERMS, 2)
        terms[part.label] = _summed(f"{field}={part.name}", cost)
    return terms


def kl_terms(*configs: ReferenceKlConfig | DistillationConfig | None) -> list[Term]:
    """The loss terms for the KL to a reference policy and to a teacher, if enabled."""
    return [partial(kl_loss, config=config) for config in configs if config is not None and config.in_loss]


def _summed(owner: str, cost: Callable[[TokenStats, MicroBatch], Tensor]) -> Term:
    def term(stats: TokenStats, batch: MicroBatch) -> Tensor:
        cost_T = cost(stats, batch)
        if not isinstance(cost_T, Tensor) or cost_T.shape != batch.mask_T.shape:
            raise ConfigError(
                f"{owner} must return a tensor of shape {list(batch.mask_T.shape)}, the cost of each token, "
                f"but {returned(cost_T)}"
            )
        weight_T, cost_T = unmasked(batch.mask_T, batch.weight_T, cost_T)
        return (weight_T * cost_T).sum()

    return term


def term_measurement(label: str, term: Term) -> Measurement:
    """Measurement ``terms/NAME`` of a term: its part of ``policy/loss`` at the weights before the update."""

    def sums(view: PackView) -> Tensor:
        return term(view.stats, view.batch)[None]

    def metrics(sums: Tensor, update: UpdateSums) -> dict[str, float | None]:
        return {f"terms/{label}": float(sums) / update.tokens}

    return Measurement(f"terms/{label}", 1, sums, metrics)


def check_terms(algorithm: Any) -> None:
    """Preflight of the terms on a made-up pack. Raises ConfigError, also for a term without gradient."""
    batch = MicroBatch.of((0, 2), ((0, 0, 2),), 1, mask_T=torch.ones(2), weight_T=torch.ones(2))
    stats = TokenStats(*(torch.tensor([-1.0, -2.0], requires_grad=True) for _ in range(2)))
    for number, term in enumerate(build_terms(algorithm).values()):
        owner = f"algorithm.terms[{number}]={algorithm.terms[number].name}"
        with tried_on("a made-up pack of 2 tokens"), calling(owner):
            value = term(stats, batch)
        if not value.requires_grad:
            raise ConfigError(
                f"{owner} has no gradient: compute it from stats.log_prob_T or stats.entropy_T, not detached"
            )
