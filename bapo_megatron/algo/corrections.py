"""Off-policy corrections that combine with any loss: rejection of responses, truncated importance weights.

``trainer/corrections.py`` applies both on the host before packing, alike on every rank. Each limit of the
rejection is on one of two ratios:

- ``pi_old / pi_rollout``, trainer against engine at the start of a step: known before its updates;
- ``pi / pi_rollout``, the policy in training: measured before an update, by a forward pass unless
  the ratio is known.

No token of a rejected response is trained on in that update; only the metrics ``corrections/rejected_*`` of
the update count it. With ``algorithm.importance_cap`` the weights (TIS) multiply the tokens' weights in the
loss.

Pure functions on numpy arrays and numbers. Commands read the settings, so numpy is imported late. Legend:
``_R`` tokens of a response, ``_N`` those that are trained on.
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

    Section `algorithm.corrections` of a recipe, read by ``trainer/corrections.py``.
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
        """Whether any limit is set, so that responses may be rejected."""
        return self.compares_old or self.off_policy_delta is not None


def is_outside(log_ratio_N: np.ndarray, config: CorrectionsConfig) -> bool:
    """Rejection rule on ``pi_old / pi_rollout``: geometric mean over [N], or one token, outside its range.

    The range of the geometric mean is verl's ``rollout_rs=seq_mean_k1``, that of the worst token its former
    veto (github.com/verl-project/verl, ``rollout_corr_helper.py``). A ratio on a limit is inside; a response
    without tokens is, too. A nan is outside any limit. ``log_ratio_N``: ``log(pi_old / pi_rollout)``, nats.
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
    """Off-policy sequence mask, ``A < 0 and mean_t log(pi_rollout / pi) > delta``: whether it rejects.

    DeepSeek-V3.2 (arXiv 2512.02556, Eq. 9). ``mean_gap``: the mean over the response's tokens, nats; 0
    without tokens.
    """
    return advantage < 0 and not mean_gap <= delta  # nan is above any limit


def truncated_importance(
    old_log_prob_R: np.ndarray, rollout_log_prob_R: np.ndarray, cap: float
) -> np.ndarray:
    """Truncated importance weights ``w_t = min(pi_old / pi_rollout, cap)`` of the tokens, [R].

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; the separation
    of the behaviour policy from the policy that the ratio starts at is that of Hilton et al., "Batch
    size-invariance for policy optimization" (arXiv 2110.00641).

    float32. From log pi_old and log pi_rollout, nats; ``cap``: the largest weight, above 0.
    """
    return _truncated(_log_weight(old_log_prob_R, rollout_log_prob_R), cap)


def truncated_sequence_importance(
    old_log_prob_R: np.ndarray, rollout_log_prob_R: np.ndarray, trained_R: np.ndarray, cap: float
) -> np.ndarray:
    """Truncated importance weight of a response: ``w = min(prod_t pi_old / pi_rollout, cap)``, [R].

    The product is over the response's trained tokens: verl's ``rollout_is=sequence``, TRL's
    ``sequence_truncate``. The longer the response, the further the product is from 1.

    Otherwise as ``truncated_importance``, with one number for all tokens. ``trained_R``: bool, the trained
    tokens.
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
