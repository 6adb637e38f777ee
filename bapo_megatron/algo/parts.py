"""Registry of a method's own parts beside its loss: advantages, masks and terms of the loss, by name.

A part is built in, or a function of a user's file, ``package.module:name``. Its arguments after the first
ones are its settings. Imports no torch: what is registered is known where a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bapo_megatron.algo.settings import check_settings, settings_of
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.dotted_path import load_dotted_path


def _registered(module: str, *names: str) -> dict[str, str]:
    return {name: f"bapo_megatron.algo.{module}:{name}" for name in names}


ADVANTAGES = _registered(
    "advantages",
    "grpo",
    "dr_grpo",
    "rloo",
    "grpo_leave_one_out",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
)
"""The registered advantages: their functions by name."""

CENTERED_ADVANTAGES = ("grpo", "dr_grpo", "rloo")
"""Those that add up to 0 in each group, and are 0 in one whose rewards are equal."""


MASKS = _registered("masks", "cut_responses", "icepop", "second_moment", "rollout_rs")
"""The registered masks."""

RATIO_MASKS = ("icepop", "second_moment", "rollout_rs")
"""Those that compare trainer and engine: they need a pi_old of the trainer."""

TERMS = _registered("terms", "entropy_bonus")
"""The registered terms of the loss."""


def part_path(field: str, name: str, known: Mapping[str, str]) -> str:
    """Dotted path of a part, by its registered name or as given. ConfigError for another name."""
    if name in known:
        return known[name]
    if ":" not in name:
        raise ConfigError(
            f"{field}={name!r} is unknown: give {', '.join(known)}, or the path of a function as "
            "package.module:name"
        )
    return name


def load_part(
    field: str, name: str, settings: Mapping[str, Any], known: Mapping[str, str], arguments: int = 1
) -> Callable[..., Any]:
    """Function of a part with its settings: ConfigError if it cannot be imported, or does not take one.

    ``arguments``: number of those before the settings.
    """
    function = load_dotted_path(field, part_path(field, name, known), "function", name)
    owned = f"{field}.settings" if field.endswith("]") else f"{field}_settings"  # of an entry of a list
    check_settings(owned, f"{field}={name}", settings_of(function, arguments), settings)
    return partial(function, **settings)
