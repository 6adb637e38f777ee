"""Public names of BAPO (arXiv 2510.18927) in one place: bounds settings, presets, search, loss on tensors.

Settings (``BoundsConfig``), presets (``paper()``, ``grpo()``, ...) and the search (``search_bounds``) come
from ``bounds.py``, the loss and its sums on tensors from ``surrogate.py``, which is imported at the first use
of one of its names: recipes import presets from here without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bapo_megatron.algo.bounds import (
    Bounds,
    BoundsConfig,
    balanced,
    clip_higher,
    describe,
    eq8_literal,
    fixed,
    grpo,
    high_values,
    low_values,
    paper,
    positive_share,
    preset_name,
    published_code,
    search_bounds,
    sum_count,
)

if TYPE_CHECKING:
    from bapo_megatron.algo.surrogate import (
        TokenBounds,
        clipped_tokens,
        contribution_sums,
        gradient_factor,
        policy_loss,
    )
    from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT

__all__ = [
    "LOG_RATIO_LIMIT",
    "Bounds",
    "BoundsConfig",
    "TokenBounds",
    "balanced",
    "clip_higher",
    "clipped_tokens",
    "contribution_sums",
    "describe",
    "eq8_literal",
    "fixed",
    "gradient_factor",
    "grpo",
    "high_values",
    "low_values",
    "paper",
    "policy_loss",
    "positive_share",
    "preset_name",
    "published_code",
    "search_bounds",
    "sum_count",
]


def __getattr__(name: str) -> Any:
    """Return a public name of ``surrogate.py``; raise AttributeError for any other."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("bapo_megatron.algo.surrogate"), name)
