"""Per-token math of losses and metrics: importance ratio, masking, masked sums, high-probability tokens.

``ratio`` and ``likely`` map tensors [T] to [T], ``live_sum`` sums unmasked tokens. On any device; none makes
the host wait for a GPU, except ``constant_on`` at the first use of a constant.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Clamp of |log r|, in nats, before ``exp``: the ratio stays finite. A token beyond it has no gradient."""

ROUNDING = 1e-4
"""Rounding error, in nats, of log-probs and entropies of bfloat16 or float32 models."""


@functools.lru_cache(maxsize=64)
def constant_on(
    device: torch.device, values: tuple[float, ...], dtype: torch.dtype = torch.float64
) -> Tensor:
    """Constant tensor of ``values`` on ``device``, cached to save blocking GPU copies: do not modify it."""
    return torch.tensor(values, dtype=dtype, device=device)


def unmasked(mask_T: Tensor, *fields: Tensor) -> list[Tensor]:
    """Fields as float64, with 0 at masked tokens (``where``, because the product 0 * nan is nan)."""
    live_T = mask_T != 0
    return [torch.where(live_T, field_T, 0.0).double() for field_T in fields]


def live_sum(value_T: Tensor, live_T: Tensor) -> Tensor:
    """Float64 sum of ``value_T`` over the tokens where ``live_T``, whatever the others hold."""
    return torch.where(live_T, value_T, 0.0).double().sum()


def ratio(log_ratio_T: Tensor) -> Tensor:
    """Importance ratio ``r = exp(log r)``, [T], with log r clamped to +-``LOG_RATIO_LIMIT``."""
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def likely(log_prob_T: Tensor, entropy_T: Tensor) -> Tensor:
    """High-probability tokens, ``log pi(y) > -H`` (BAPO's Definition 1), bool [T], up to rounding. For most
    tokens the policy is almost certain: both sides are 0 up to rounding, and the token is likely."""
    return log_prob_T + entropy_T > -ROUNDING
