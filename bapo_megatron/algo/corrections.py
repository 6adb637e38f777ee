"""Off-policy corrections for any loss: rejection of responses, truncated importance weights (TIS).

``is_outside`` and ``is_off_policy`` return whether to reject a response, by the limits of
``CorrectionsConfig``; the ``truncated_*`` functions return importance weights, [R]. Each limit applies to one
of two ratios:

- ``pi_old / pi_rollout``, trainer against engine at the start of a step: known before its updates;
- ``pi / pi_rollout``, the policy in training: measured before an update, by a forward pass unless known.

An update trains no token of a rejected response; only its metrics ``corrections/rejected_*`` and ``masks/*``
count it. With ``algorithm.importance_cap`` the weights multiply the tokens' weights in the loss.
``trainer/corrections.py`` applies both on the host before packing, with the same result on every rank.

Pure functions on numpy arrays and numbers. Legend: ``_R`` tokens of a response, ``_N`` its trained tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class CorrectionsConfig:
    """Rejection of whole responses, with any loss; truncated importance weights are `importance_cap`.

    Limits on pi_old / pi_rollout and pi / pi_rollout; section `algorithm.corrections` of a recipe.
    """

    geometric_min: Annotated[float | None, Gt(0), Lt(1)] = None
    """Reject a response if the geometric mean of its tokens' pi_old / pi_rollout is below this. Needs
    `old_log_probs=trainer`, as the next three. None: no limit."""
    geometric_max: Annotated[float | None, Gt(1)] = None
    """Reject a response if that mean is above this."""
    worst_token_min: Annotated[float | None, Gt(0), Lt(1)] = None
    """Reject a response with a token whose pi_old / pi_rollout is below this; 1e-4 is a usual veto."""
    worst_token_max: Annotated[float | None, Gt(1)] = None
    """Reject a response with a token whose pi_old / pi_rollout is above this."""
    off_policy_delta: Annotated[float | None, Gt(0)] = None
    """Off-policy sequence mask (DeepSeek-V3.2): reject a response with a negative advantage if the mean of
    log(pi_rollout / pi) over its tokens is above this, in nats. Costs one forward pass in each update whose
    ratio is not known. None: no mask."""

    @property
    def compares_old(self) -> bool:
        """Whether a limit on pi_old / pi_rollout is set."""
        limits = (self.geometric_min, self.geometric_max, self.worst_token_min, self.worst_token_max)
        return any(limit is not None for limit in limits)

    @property
    def rejects(self) -> bool:
        """Whether any limit is set."""
        return self.compares_old or self.off_policy_delta is not None


def is_outside(log_ratio_N: np.ndarray, config: CorrectionsConfig) -> bool:
    """Rejection rule on ``pi_old / pi_rollout``: geometric mean over [N], or one token, outside its range.

    The mean's range is verl's ``rollout_rs=seq_mean_k1``, the worst token's its former veto
    (github.com/verl-project/verl, ``rollout_corr_helper.py``). A ratio on a limit is inside, and so is a
    response without tokens; a nan is outside. ``log_ratio_N``: ``log(pi_old / pi_rollout)``, nats.
    """
    if not len(log_ratio_N):
        return False
    log_ratio_N = log_ratio_N.astype("float64")
    mean = float(log_ratio_N.mean())
    return not (
        _within(mean, config.geometric_min, config.geometric_max)
        and _within(float(log_ratio_N.min()), config.worst_token_min, None)
        and _within(float(log_ratio_N.max()), None, config.worst_token_max)
    )


def _within(log_ratio: float, low: float | None, high: float | None) -> bool:
    above = low is None or log_ratio >= math.log(low)
    return above and (high is None or log_ratio <= math.log(high))


def is_off_policy(advantage: float, mean_gap: float, delta: float) -> bool:
    """Off-policy sequence mask: reject if ``A < 0 and mean_t log(pi_rollout / pi) > delta``.

    DeepSeek-V3.2 (arXiv 2512.02556, Eq. 9). ``mean_gap``: the mean over the response's tokens, nats.
    """
    return advantage < 0 and not mean_gap <= delta  # nan is above any limit


def truncated_importance(
    old_log_prob_R: np.ndarray, rollout_log_prob_R: np.ndarray, cap: float
) -> np.ndarray:
    """Truncated importance weights ``w_t = min(pi_old / pi_rollout, cap)`` of the tokens, float32 [R].

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; Hilton et al.,
    "Batch size-invariance for policy optimization" (arXiv 2110.00641), separate the behaviour policy from the
    ratio's reference policy. Log-probs in nats; ``cap`` above 0.
    """
    return _truncated(_log_weight(old_log_prob_R, rollout_log_prob_R), cap)


def truncated_sequence_importance(
    old_log_prob_R: np.ndarray, rollout_log_prob_R: np.ndarray, trained_R: np.ndarray, cap: float
) -> np.ndarray:
    """Truncated importance weight of a response, ``w = min(prod_t pi_old / pi_rollout, cap)``, float32 [R].

    The product is over the tokens in ``trained_R`` (bool): verl's ``rollout_is=sequence``, TRL's
    ``sequence_truncate``. The longer the response, the further it is from 1. All tokens get the same weight.
    """
    import numpy as np

    log_weight = _log_weight(old_log_prob_R, rollout_log_prob_R)[trained_R].sum()
    return _truncated(np.full(len(old_log_prob_R), log_weight), cap)


def _log_weight(old_log_prob_R: np.ndarray, rollout_log_prob_R: np.ndarray) -> np.ndarray:
    difference_R: np.ndarray = old_log_prob_R.astype("float64") - rollout_log_prob_R
    return difference_R


def _truncated(log_weight_R: np.ndarray, cap: float) -> np.ndarray:
    import numpy as np

    weight_R: np.ndarray = np.exp(np.minimum(log_weight_R, math.log(cap))).astype(np.float32)
    return weight_R
