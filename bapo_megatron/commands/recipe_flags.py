"""Parser of ``bapo COMMAND RECIPE [flags]``: returns the recipe's configuration, overridden by flags.

``recipe_config`` returns it, ``recipe_command`` also the recipe's path. Both run the recipe, a Python file.
They raise ConfigError for a wrong recipe or a removed flag; they print and exit for an unknown flag, a bad
value, ``--help`` or no argument.
``check_names`` checks the engine, loss, advantage, masks and terms named in a configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bapo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from bapo_megatron.config import EnvironmentConfig, RunConfig

C = TypeVar("C")


def recipe_config(command: str, kind: type[C], arguments: Sequence[str]) -> C:
    """Return the recipe's configuration with flags applied. Raises ConfigError if it is not a ``kind``."""
    from bapo_megatron.config.recipe import load_recipe

    recipe = recipe_path(command, arguments)
    return parse_flags(command, recipe, load_recipe(recipe, kind), arguments)


def recipe_command(command: str, whole: Callable[[RunConfig], C], arguments: Sequence[str]) -> tuple[Path, C]:
    """Return the recipe's path, and ``whole(configuration)`` with flags applied; ``whole`` may add fields."""
    from bapo_megatron.config import RunConfig, load_recipe

    recipe = recipe_path(command, arguments)
    return recipe, parse_flags(command, recipe, whole(load_recipe(recipe, RunConfig)), arguments)


def recipe_path(command: str, arguments: Sequence[str]) -> Path:
    """Return the recipe's path, the first argument. Prints the usage and exits for --help or no argument;
    raises ConfigError for a flag."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: bapo {command} RECIPE [flags]\n\n`bapo {command} RECIPE --help` lists the flags.")
        sys.exit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        raise ConfigError(f"usage: bapo {command} RECIPE [flags]; the recipe comes first")
    return Path(arguments[0])


def parse_flags(command: str, recipe: Path, default: C, arguments: Sequence[str]) -> C:
    """Return ``default`` with its fields overridden by the flags after the recipe."""
    from bapo_megatron.config.flags import parse_options
    from bapo_megatron.config.removed import removed_settings

    words = (word.partition("=")[0] for word in arguments[1:])
    for told in removed_settings(word.removeprefix("--") for word in words if "." in word):
        raise ConfigError(told)
    described = f"Defaults are those of {recipe}."
    default = _with_named_data(default, arguments[1:])
    return parse_options(type(default), f"bapo {command} {recipe}", arguments[1:], default, described)


def _with_named_data(default: C, arguments: Sequence[str]) -> C:
    """Drop ``data.path`` from the defaults if a flag sets ``data.sources``, and vice versa."""
    flags = {word.partition("=")[0].removeprefix("--") for word in arguments}
    whole: Any = default
    run = getattr(whole, "run", whole)  # a command with flags of its own wraps the recipe
    if "data.sources" in flags:
        run = replace(run, data=replace(run.data, path=None))
    if "data.path" in flags:
        run = replace(run, data=replace(run.data, sources=()))
    changed: C = replace(whole, run=run) if hasattr(whole, "run") else run
    return changed


def check_names(config: RunConfig, own_code: bool = False) -> None:
    """Check engine, loss, advantage, masks, terms and endpoint settings. Raises ConfigError for an unknown
    name or a wrong setting. Without torch it prints what it cannot check.

    ``own_code``: also import and check custom code, which may exist only on the run's machines.
    """
    from bapo_megatron.reward.endpoint_settings import KINDS, read_settings
    from bapo_megatron.rollout.engines.backend import engine_backend

    if own_code or ":" not in config.rollout.engine:
        engine_backend(config.rollout.engine)
    _check_loss(config, own_code)
    _check_parts(config, own_code)
    if config.reward.function in KINDS:
        read_settings(config.reward.function, config.reward.settings, here=False)
    if own_code:
        _check_own_code(config)


def _check_loss(config: RunConfig, own_code: bool) -> None:
    """Check the loss; needs torch only for settings, which the loss class declares, or for own code."""
    from bapo_megatron.algo.registered_losses import LOSSES, check_bounds, loss_path

    algorithm = config.algorithm
    loss_path(algorithm.loss)
    if algorithm.loss in LOSSES and algorithm.loss != "clip":
        check_bounds(algorithm, "unused")
    if not (algorithm.loss_settings if algorithm.loss in LOSSES else own_code):
        return
    with _skipped_without_torch("algorithm.loss_settings"):
        from bapo_megatron.algo.losses import build_loss

        build_loss(algorithm)


@contextmanager
def _skipped_without_torch(field: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"{field} are not checked: torch is not installed here", file=sys.stderr)


def _check_parts(config: RunConfig, own_code: bool) -> None:
    """Check advantage, masks and terms; without ``own_code`` only kinds whose names are all registered."""
    from bapo_megatron.algo.advantages import check_advantage
    from bapo_megatron.algo.masks import check_masks

    algorithm = config.algorithm
    if own_code or ":" not in algorithm.advantage:
        check_advantage(algorithm, config.rollout.group_size)
    if own_code or not any(":" in part.name for part in algorithm.masks):
        check_masks(algorithm)
    if algorithm.terms and (own_code or not any(":" in part.name for part in algorithm.terms)):
        with _skipped_without_torch("algorithm.terms"):
            from bapo_megatron.algo.terms import check_terms

            check_terms(algorithm)


def _check_own_code(config: RunConfig) -> None:
    """Import and check the user's rewards and environments, except those with their own interpreter."""
    from bapo_megatron.environment.pool import read_traits
    from bapo_megatron.reward.functions import check_functions

    check_functions(config, (function for function in config.reward_functions if ":" in function))
    checked: list[EnvironmentConfig] = []
    for environment in config.environments.values():
        if environment.function and environment.python is None and environment not in checked:
            checked.append(environment)
            read_traits(environment)
