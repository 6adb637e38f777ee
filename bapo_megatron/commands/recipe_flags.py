"""Parser of the command line ``bapo COMMAND RECIPE [flags]``: flags override the recipe's fields.

Every command with a recipe uses it. Loading runs the recipe, a Python file. ConfigError for a wrong recipe; a
wrong flag, ``--help`` or no argument at all prints and exits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bapo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from bapo_megatron.config import AlgorithmConfig, EnvironmentConfig, RunConfig

C = TypeVar("C")


def recipe_config(command: str, kind: type[C], arguments: Sequence[str]) -> C:
    """The recipe's configuration, overridden by the flags. ConfigError if it is not of the class ``kind``."""
    from bapo_megatron.config.recipe import load_recipe

    recipe = recipe_path(command, arguments)
    return parse_flags(command, recipe, load_recipe(recipe, kind), arguments)


def recipe_command(command: str, whole: Callable[[RunConfig], C], arguments: Sequence[str]) -> tuple[Path, C]:
    """The recipe, and its configuration with a command's own fields (``whole``), overridden by the flags."""
    from bapo_megatron.config import RunConfig, load_recipe

    recipe = recipe_path(command, arguments)
    return recipe, parse_flags(command, recipe, whole(load_recipe(recipe, RunConfig)), arguments)


def recipe_path(command: str, arguments: Sequence[str]) -> Path:
    """The path of the recipe, the first argument. Prints the usage and exits for --help or no argument."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: bapo {command} RECIPE [flags]\n\n`bapo {command} RECIPE --help` lists the flags.")
        sys.exit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        raise ConfigError(f"usage: bapo {command} RECIPE [flags]; the recipe comes first")
    return Path(arguments[0])


def parse_flags(command: str, recipe: Path, default: C, arguments: Sequence[str]) -> C:
    """The dataclass ``default`` with its fields overridden by the flags after the recipe."""
    from bapo_megatron.config.flags import parse_options
    from bapo_megatron.config.removed import removed_settings

    words = (word.removeprefix("run.").partition("=")[0] for word in arguments[1:])
    for told in removed_settings(word.removeprefix("--") for word in words if "." in word):
        raise ConfigError(told)
    described = f"Defaults are those of {recipe}."
    default = _with_named_data(default, arguments[1:])
    return parse_options(type(default), f"bapo {command} {recipe}", arguments[1:], default, described)


def _with_named_data(default: C, arguments: Sequence[str]) -> C:
    """Defaults without ``data.path`` if a flag names ``data.sources``, and the other way round."""
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
    """Check of registered names: engine, loss, and their settings. ConfigError for an unknown one.

    ``own_code``: dotted paths are imported and checked, too, as a run does. Else they are not: the module may
    exist on the run's machines alone.
    """
    from bapo_megatron.reward.endpoint_settings import KINDS, read_settings
    from bapo_megatron.rollout.engines.backend import engine_backend

    if own_code or ":" not in config.rollout.engine:
        engine_backend(config.rollout.engine)
    _check_loss(config, own_code)
    _check_parts(config.algorithm, own_code)
    if config.reward.function in KINDS:
        read_settings(config.reward.function, config.reward.settings, here=False)
    if own_code:
        _check_own_code(config)


def _check_loss(config: RunConfig, own_code: bool) -> None:
    """Check of the loss: of a registered one without torch, but for the settings that its class declares."""
    from bapo_megatron.algo.registered_losses import LOSSES, check_registered, loss_path

    algorithm = config.algorithm
    loss_path(algorithm.loss)
    if algorithm.loss in LOSSES:
        check_registered(algorithm, config.batch.hold_forwards)
    if not (algorithm.loss_settings if algorithm.loss in LOSSES else own_code):
        return
    try:
        from bapo_megatron.trainer.update_loss import checked_loss
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("algorithm.loss_settings are not checked: torch is not installed here", file=sys.stderr)
    else:
        checked_loss(config)


def _check_parts(algorithm: AlgorithmConfig, own_code: bool) -> None:
    """Check of advantage, masks and terms: without ``own_code`` where all of a kind are registered."""
    from bapo_megatron.algo.advantages import check_advantage
    from bapo_megatron.algo.masks import check_masks

    if own_code or ":" not in algorithm.advantage:
        check_advantage(algorithm)
    if own_code or not any(":" in part.name for part in algorithm.masks):
        check_masks(algorithm)
    if algorithm.terms and (own_code or not any(":" in part.name for part in algorithm.terms)):
        try:
            from bapo_megatron.algo.terms import check_terms
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            print("algorithm.terms are not checked: torch is not installed here", file=sys.stderr)
        else:
            check_terms(algorithm)


def _check_own_code(config: RunConfig) -> None:
    """Check of the user's rewards and environments, but those with an interpreter of their own."""
    from bapo_megatron.environment.pool import read_traits
    from bapo_megatron.reward.functions import check_functions

    check_functions(config, (function for function in config.reward_functions if ":" in function))
    checked: list[EnvironmentConfig] = []
    for environment in config.environments.values():
        if environment.function and environment.python is None and environment not in checked:
            checked.append(environment)
            read_traits(environment)
