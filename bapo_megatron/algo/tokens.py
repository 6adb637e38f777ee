"""Per-token math of losses and metrics: masking, sums, clamped importance ratio, high-probability tokens."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Largest |log r| in nats: sums and loss clamp ``log r`` to it before ``exp``, so the ratio stays finite.
A token beyond it has no gradient."""

ROUNDING = 1e-4
"""Rounding error, in nats, of log-probs and entropies of bfloat16 or float32 models."""


@functools.lru_cache(maxsize=64)
def constant_on(
    device: torch.device, values: tuple[float, ...], dtype: torch.dtype = torch.float64
) -> Tensor:
    """The numbers ``values`` as a tensor on ``device``, copied once: every pack and chunk asks for the same.

    A copy to a GPU would make the host wait in each of them. The tensor is shared: do not write into it.
    """
    return torch.tensor(values, dtype=dtype, device=device)


def unmasked(mask_T: Tensor, *fields: Tensor) -> list[Tensor]:
    """The fields as float64, with 0 at masked tokens (by ``where``, not by a product: 0 * nan is nan)."""
    live_T = mask_T != 0
    return [torch.where(live_T, field_T, 0.0).double() for field_T in fields]


def selects(device: torch.device) -> bool:
    """Whether tokens are selected by index before they are added up: on a CPU, where that is the faster way.

    On a GPU the host would wait, in every chunk, to learn how many tokens there are: there all are taken, and
    those that do not count are masked.
    """
    return device.type == "cpu"


def live_sum(value_T: Tensor, live_T: Tensor) -> Tensor:
    """The float64 sum of ``value_T`` over the tokens where ``live_T``, whatever the others hold."""
    if selects(value_T.device):
        return value_T[live_T].double().sum()
    return torch.where(live_T, value_T, 0.0).double().sum()


def ratio(log_ratio_T: Tensor) -> Tensor:
    """The importance ratio r = exp(log r), with log r clamped to +-``LOG_RATIO_LIMIT``."""
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def likely(log_prob_T: Tensor, entropy_T: Tensor) -> Tensor:
    """High-probability tokens (bool), BAPO's Definition 1: ``log pi(y) > E[log pi] = -H``, up to rounding.

    For most tokens of a language model the policy is almost certain: both sides are 0 up to rounding, and
    the token counts as likely.
    """
    return log_prob_T + entropy_T > -ROUNDING


def check_shapes(*fields: Tensor) -> None:
    """Check that all fields have the same shape; ValueError if not."""
    shapes = [tuple(field.shape) for field in fields]
    if len(set(shapes)) > 1:
        raise ValueError(f"the fields of the tokens differ in shape: {shapes}")
