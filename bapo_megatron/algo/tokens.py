"""What the sums and the loss share: masked tokens, and ratios that stay finite."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""``log r`` is clamped to plus or minus this before ``exp``, in sums and loss: the ratio stays finite.
A token beyond it has no gradient."""


def unmasked(mask_T: Tensor, *fields: Tensor) -> list[Tensor]:
    """The fields as float64, 0 at masked tokens. Selected, not multiplied: 0 * nan would be nan."""
    live_T = mask_T != 0
    return [torch.where(live_T, field_T, 0.0).double() for field_T in fields]


def ratio(log_ratio_T: Tensor) -> Tensor:
    """r, from its logarithm."""
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def check_shapes(*fields: Tensor) -> None:
    """ValueError unless all fields have one shape."""
    shapes = [tuple(field.shape) for field in fields]
    if len(set(shapes)) > 1:
        raise ValueError(f"the fields of the tokens differ in shape: {shapes}")
