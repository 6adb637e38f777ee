"""Truncated importance sampling (TIS): token weights where pi_rollout is not the ratio's pi_old.

Legend: ``_R`` tokens of a response.
"""

from __future__ import annotations

import math

import numpy as np


def truncated_importance(
    old_log_prob_R: np.ndarray, rollout_log_prob_R: np.ndarray, cap: float
) -> np.ndarray:
    """Truncated importance weights ``min(pi_old / pi_rollout, cap)``, one for each token.

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
    log_weight_R = old_log_prob_R.astype(np.float64) - rollout_log_prob_R
    weight_R: np.ndarray = np.exp(np.minimum(log_weight_R, math.log(cap))).astype(np.float32)
    return weight_R
