"""Public names of BAPO (arXiv 2510.18927) in one place: bounds settings, presets, search, loss on tensors.

Settings (``BoundsConfig``), presets (``paper()``, ``grpo()``, ...) and the search (``search_bounds``) come
from ``bounds.py``, the loss and its sums on tensors from ``surrogate.py``, which is imported at the first use
of one of its names: recipes import presets from here without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bapo_megatron.algo.bounds import Bounds as Bounds
from bapo_megatron.algo.bounds import BoundsConfig as BoundsConfig
from bapo_megatron.algo.bounds import balanced as balanced
from bapo_megatron.algo.bounds import clip_higher as clip_higher
from bapo_megatron.algo.bounds import describe as describe
from bapo_megatron.algo.bounds import eq8_literal as eq8_literal
from bapo_megatron.algo.bounds import fixed as fixed
from bapo_megatron.algo.bounds import floored as floored
from bapo_megatron.algo.bounds import grpo as grpo
from bapo_megatron.algo.bounds import high_values as high_values
from bapo_megatron.algo.bounds import low_values as low_values
from bapo_megatron.algo.bounds import paper as paper
from bapo_megatron.algo.bounds import positive_share as positive_share
from bapo_megatron.algo.bounds import preset_name as preset_name
from bapo_megatron.algo.bounds import published_code as published_code
from bapo_megatron.algo.bounds import search_bounds as search_bounds
from bapo_megatron.algo.bounds import sum_count as sum_count

if TYPE_CHECKING:
    from bapo_megatron.algo.surrogate import TokenBounds as TokenBounds
    from bapo_megatron.algo.surrogate import clipped_tokens as clipped_tokens
    from bapo_megatron.algo.surrogate import contribution_sums as contribution_sums
    from bapo_megatron.algo.surrogate import gradient_factor as gradient_factor
    from bapo_megatron.algo.surrogate import policy_loss as policy_loss
    from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT as LOG_RATIO_LIMIT

_ON_TENSORS = (
    *("LOG_RATIO_LIMIT", "TokenBounds", "clipped_tokens"),
    *("contribution_sums", "gradient_factor", "policy_loss"),
)


def __getattr__(name: str) -> Any:
    """Return a public name of ``surrogate.py``; raise AttributeError for any other."""
    if name not in _ON_TENSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("bapo_megatron.algo.surrogate"), name)
