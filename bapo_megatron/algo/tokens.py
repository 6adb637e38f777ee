"""What the sums and the loss share: masked tokens, and ratios that stay finite."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""``log r`` is clamped to plus or minus this before ``exp``, in sums and loss: the ratio stays finite.
A token beyond it has no gradient."""

ROUNDING = 1e-4
"""Nats. What log-probs and entropies of bfloat16 or float32 models differ by for no reason of the policy."""


def unmasked(mask_T: Tensor, *fields: Tensor) -> list[Tensor]:
    """The fields as float64, 0 at masked tokens. Selected, not multiplied: 0 * nan would be nan."""
    live_T = mask_T != 0
    return [torch.where(live_T, field_T, 0.0).double() for field_T in fields]


def ratio(log_ratio_T: Tensor) -> Tensor:
    """r, from its logarithm."""
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def likely(log_prob_T: Tensor, entropy_T: Tensor) -> Tensor:
    """bool: high probability in the sense of Definition 1, ``log pi(y) > E[log pi] = -H``, up to rounding.

    Where the policy is certain both sides are 0 but for rounding, and most tokens of a language model are
    such: they count as likely.
    """
    return log_prob_T + entropy_T > -ROUNDING


def check_shapes(*fields: Tensor) -> None:
    """ValueError unless all fields have one shape."""
    shapes = [tuple(field.shape) for field in fields]
    if len(set(shapes)) > 1:
        raise ValueError(f"the fields of the tokens differ in shape: {shapes}")
