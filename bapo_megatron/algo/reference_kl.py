"""KL to a frozen reference or teacher: ``k1 = -log q``, ``k2 = (log q)^2 / 2``, ``k3 = q - 1 - log q``.

    q = pi_ref / pi                                  at each sampled token
    loss = policy loss + beta sum_t weight_t k_t     place=loss (GRPO)
    R    = R_outcome   - beta sum_t k_t              place=reward (PPO): k at pi_old, before the advantages

``kl_loss`` returns the loss term of a pack, ``response_penalty`` the penalty in a response's reward, and
``kl_measurement`` the metrics. With the teacher's log-probs for pi_ref the loss term is on-policy
distillation (arXiv 2306.13649). The estimators are Schulman's (2020, "Approximating KL Divergence",
joschu.net/blog/kl-approx.html): for tokens of pi, k1 and k3 have the mean KL(pi || pi_ref), and k2 nearly. k3
in the loss is GRPO's (arXiv 2402.03300, Eq. 4), k1 in the reward is RLHF PPO's (arXiv 1909.08593, Eq. 2).

A good estimate of the value need not have a good gradient (arXiv 2506.09477; arXiv 2510.01555). The
derivatives with respect to log pi of the token are

    k1: 1        k2: log(pi / pi_ref)        k3: 1 - q

For tokens of pi the mean gradient with k2 is that of KL(pi || pi_ref) in each token's state; with k3 that of
KL(pi_ref || pi), equal to first order near the reference; with k1 it is 0. A penalty in the reward is not a
loss: with k1 its policy gradient is that of KL over whole responses, up to the scale of the group's
advantages.

Tokens come from the sampling policy, and without ``unbiased`` the loss has no factor pi / pi_old, as in GRPO:
in a step's updates after the first the mean is still over the old policy's tokens. With it the term is
``r k``, r = pi / pi_old. The mean of its gradient, ``r (k + dk)``, over tokens of pi_old is in each state the
gradient of E[k] over tokens of pi: with k3, ``r log(pi / pi_ref)``, that of KL(pi || pi_ref), even at r = 1.
States remain those of the old policy. ``importance_cap`` corrects from pi_rollout to pi_old, because the
weight is the policy loss's.

Pure functions. Legend: ``_T`` tokens of a pack (a micro-batch), ``_N`` trained tokens of a response.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bapo_megatron.algo.measurements import Measurement, PackView, UpdateSums
from bapo_megatron.algo.reference_kl_config import DistillationConfig, ReferenceKlConfig
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT, ratio, unmasked
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.types import Metrics


def kl_estimate(
    log_prob_T: Tensor, reference_log_prob_T: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Estimate of KL(pi || pi_ref) for each token, [T]: ``-log q``, ``(log q)^2 / 2`` or ``q - 1 - log q``.

    ``q = pi_ref / pi``, from log-probs of the sampled token in nats, float64. Differentiable in
    ``log_prob_T``. k3 limits log q to 20 (``LOG_RATIO_LIMIT``) to stay finite; a token beyond that has no
    gradient.
    """
    log_q_T = reference_log_prob_T - log_prob_T
    if estimator == "k1":
        return -log_q_T
    if estimator == "k2":
        return log_q_T.square() / 2
    log_q_T = log_q_T.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(log_q_T) - log_q_T


def _other_T(batch: MicroBatch, config: ReferenceKlConfig | DistillationConfig) -> Tensor:
    """Log-probs of the teacher or the reference, nats, [T]."""
    is_teacher = isinstance(config, DistillationConfig)
    return batch.teacher_log_prob_T if is_teacher else batch.reference_log_prob_T


def kl_loss(stats: TokenStats, batch: MicroBatch, config: ReferenceKlConfig | DistillationConfig) -> Tensor:
    """KL loss of one pack, ``beta sum_t weight_t k_t``, a float64 scalar, differentiable in the log-probs.

    To the reference or the teacher, by the kind of ``config``, whose ``unbiased`` multiplies each ``k_t`` by
    pi / pi_old. Weights (importance weights, sequence means) and the divisor in the optimizer step are the
    policy loss's.
    """
    fields = (stats.log_prob_T, _other_T(batch, config), batch.weight_T)
    log_prob_T, other_T, weight_T = unmasked(batch.mask_T, *fields)
    estimate_T = kl_estimate(log_prob_T, other_T, config.estimator)
    if isinstance(config, ReferenceKlConfig) and config.unbiased:
        [old_T] = unmasked(batch.mask_T, batch.old_log_prob_T)
        estimate_T = ratio(log_prob_T - old_T) * estimate_T
    return config.coefficient * (weight_T * estimate_T).sum()


def response_penalty(
    old_log_prob_N: Tensor, reference_log_prob_N: Tensor, config: ReferenceKlConfig
) -> float:
    """Penalty subtracted from a response's reward, ``beta sum_t k_t``: k at pi_old, over trained tokens. With
    k1 the sum is log(pi_old / pi_ref) of the whole response. ``_N``: log-probs in nats."""
    estimate_N = kl_estimate(old_log_prob_N.double(), reference_log_prob_N.double(), config.estimator)
    return config.coefficient * float(estimate_N.sum())


def kl_measurement(config: ReferenceKlConfig | DistillationConfig) -> Measurement:
    """Measurement of the distance to the reference or the teacher: means over the tokens in the loss, nats.

    - ``reference_kl/k1``, ``distillation/k1``, and ``.../k3``: estimates at the weights before the update
    - ``distillation/loss``, ``reference_kl/penalty``: beta times the configured estimate: in the loss with
      the tokens' weights, as its part of ``policy/loss``; in the reward at pi_old
    """
    is_teacher = isinstance(config, DistillationConfig)
    name, cost_name = ("distillation", "loss") if is_teacher else ("reference_kl", "penalty")
    names = [f"{name}/{metric}" for metric in ("k1", "k3", cost_name)]

    def sums(view: PackView) -> Tensor:
        batch, given_T = view.batch, _other_T(view.batch, config)
        log_prob_T, other_T = unmasked(batch.mask_T, view.stats.log_prob_T, given_T)
        estimates = [kl_estimate(log_prob_T, other_T, kind).sum() for kind in ("k1", "k3")]
        if config.in_loss:
            return torch.stack([*estimates, kl_loss(view.stats, batch, config)])
        [old_T] = unmasked(batch.mask_T, batch.old_log_prob_T)
        cost = config.coefficient * kl_estimate(old_T, other_T, config.estimator).sum()
        return torch.stack([*estimates, cost])

    def metrics(sums: Tensor, update: UpdateSums) -> Metrics:
        return dict(zip(names, (sums / update.tokens).tolist(), strict=True))

    return Measurement(name, len(names), sums, metrics)
