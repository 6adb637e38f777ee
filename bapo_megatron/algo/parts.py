"""Registries of advantages, masks and added loss terms by name (ADVANTAGES, MASKS, TERMS), and their loader.

``load_part`` returns the function of a registered name or of a user's ``package.module:name``, with settings
bound to its trailing arguments. Raises ConfigError for an unknown name or wrong setting; within ``calling``
any error of the function becomes one. Imports no torch, unless a loaded function does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
"""Registered advantages: dotted paths of their functions, by name."""

CENTERED_ADVANTAGES = ("grpo", "dr_grpo", "rloo")
"""Advantages that sum to 0 in each group, and are 0 in a group of equal rewards."""


MASKS = _registered("masks", "cut_responses", "icepop", "second_moment", "rollout_rs")

RATIO_MASKS = ("icepop", "second_moment", "rollout_rs")
"""Masks by the ratio of trainer to engine: they need ``old_log_probs=trainer``."""

TERMS = _registered("terms", "entropy_bonus")


def part_path(field: str, name: str, known: Mapping[str, str], kind: str = "function") -> str:
    """Dotted path of a part, from its registered name or as given. Raises ConfigError for any other name."""
    if name in known:
        return known[name]
    if ":" not in name:
        raise ConfigError(
            f"{field}={name!r} is unknown: give {', '.join(known)}, or the path of a {kind} as "
            "package.module:name"
        )
    return name


def load_part(
    field: str, name: str, settings: Mapping[str, Any], known: Mapping[str, str], arguments: int = 1
) -> Callable[..., Any]:
    """Load a part's function and bind its settings. Raises ConfigError if the import or a setting fails.
    ``arguments``: number of arguments before the settings."""
    function = load_dotted_path(field, part_path(field, name, known), "function", name)
    owned = f"{field}.settings" if field.endswith("]") else f"{field}_settings"  # a list entry
    check_settings(owned, name, settings_of(function, arguments), settings)
    return partial(function, **settings)


@contextmanager
def calling(owner: str) -> Iterator[None]:
    """Context manager around a call of the part ``owner``: whatever it raises becomes a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # a user's function can raise anything
        raise ConfigError(f"{owner} failed with {error!r}; mend it") from error


@contextmanager
def tried_on(example: str) -> Iterator[None]:
    """Context manager around a trial call before the run: adds its input, ``example``, to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error} (tried before the run, on {example})") from error


def returned(value: Any) -> str:
    """Describe what a part returned, for the end of a message: ``returned float64 of shape [2]``."""
    if value is None:
        return "returned None"
    if not hasattr(value, "shape"):
        return f"returned a value of type {type(value).__name__}"
    kind, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    return f"returned {kind} of shape {shape}" if shape else f"returned a single {kind}"
