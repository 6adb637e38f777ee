"""``bapo rollout-server RECIPE [flags]``: an SGLang server with the recipe's model, in the foreground."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bapo_megatron.commands.recipe_flags import parse_flags, recipe_path
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.policy.device import has_cuda
from bapo_megatron.rollout.engines.sglang.server_process import ServeCommand, serve


def rollout_server_command(arguments: Sequence[str]) -> None:
    """Start the server, and wait until it ends.

    ``--rollout-only`` and ``--fork`` change nothing here: a Slurm job gives its servers the flags of its
    trainer.
    """
    arguments = list(_without_trainers(arguments))
    recipe = recipe_path("rollout-server", arguments)
    default = ServeCommand(load_recipe(recipe, RunConfig))
    command = parse_flags("rollout-server", recipe, default, arguments)
    command.run.check()
    serve(command, has_cuda())


def _without_trainers(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments without the flags that only a trainer has."""
    rest = iter(arguments)
    for word in rest:
        if word == "--fork":
            next(rest, None)
        elif word not in ("--rollout-only", "--rollout_only") and not word.startswith("--fork="):
            yield word
