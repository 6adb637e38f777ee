"""Truncated importance sampling (TIS): ``w = min(pi_old / pi_rollout, cap)``, by token or by response.

With ``algorithm.importance_cap``: ``trainer/corrections.py`` computes the weights before the first update of
a step, and they multiply the tokens' weights in the loss. Pure functions on numpy arrays.

Legend: ``_R`` tokens of a response. Used by ``trainer/corrections.py``.
"""

from __future__ import annotations

import math

import numpy as np


def truncated_importance(
    old_log_prob_R: np.ndarray, rollout_log_prob_R: np.ndarray, cap: float
) -> np.ndarray:
    """Truncated importance weights ``w_t = min(pi_old / pi_rollout, cap)`` of the tokens, [R].

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; the separation
    of the behaviour policy from the policy that the ratio starts at is that of Hilton et al., "Batch
    size-invariance for policy optimization" (arXiv 2110.00641).

    Args:
        old_log_prob_R: log pi_old, nats.
        rollout_log_prob_R: log pi_rollout, nats.
        cap: the largest weight, above 0.

    Returns:
        float32 [R].
    """
    return _truncated(_log_weight(old_log_prob_R, rollout_log_prob_R), cap)


def truncated_sequence_importance(
    old_log_prob_R: np.ndarray, rollout_log_prob_R: np.ndarray, trained_R: np.ndarray, cap: float
) -> np.ndarray:
    """Truncated importance weight of a response: ``w = min(prod_t pi_old / pi_rollout, cap)``, [R].

    The product is over the response's trained tokens: verl's ``rollout_is=sequence``, TRL's
    ``sequence_truncate``. The longer the response, the further the product is from 1.

    Args:
        old_log_prob_R: log pi_old, nats.
        rollout_log_prob_R: log pi_rollout, nats.
        trained_R: bool, the tokens that are trained on.
        cap: the largest weight, above 0.

    Returns:
        float32 [R], one number for all tokens.
    """
    log_weight = _log_weight(old_log_prob_R, rollout_log_prob_R)[trained_R].sum()
    return _truncated(np.full(len(old_log_prob_R), log_weight), cap)


def _log_weight(old_log_prob_R: np.ndarray, rollout_log_prob_R: np.ndarray) -> np.ndarray:
    difference_R: np.ndarray = old_log_prob_R.astype(np.float64) - rollout_log_prob_R
    return difference_R


def _truncated(log_weight_R: np.ndarray, cap: float) -> np.ndarray:
    weight_R: np.ndarray = np.exp(np.minimum(log_weight_R, math.log(cap))).astype(np.float32)
    return weight_R
