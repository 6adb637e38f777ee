"""``bapo rollout-server RECIPE [flags]``: an SGLang server with the recipe's model, in the foreground.

A run finds it by ``rollout.sglang.urls``. Slurm jobs start their servers with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bapo_megatron.commands.recipe_flags import recipe_command
from bapo_megatron.policy.device import has_cuda
from bapo_megatron.rollout.engines.sglang.server_process import ServeCommand, serve


def rollout_server_command(arguments: Sequence[str]) -> None:
    """Start the server, and wait until it ends."""
    # A Slurm job gives its servers the trainer's flags; a server ignores --rollout-only and --fork.
    _, command = recipe_command("rollout-server", ServeCommand, list(_server_flags(arguments)))
    command.run.check()
    serve(command, has_cuda())


def _server_flags(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments without the trainer's own flags."""
    rest = iter(arguments)
    for word in rest:
        if word == "--fork":
            next(rest, None)
        elif word not in ("--rollout-only", "--rollout_only") and not word.startswith("--fork="):
            yield word
