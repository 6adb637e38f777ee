"""The command ``bapo data prepare``: parses ``PrepareOptions``, calls ``prepare``, and prints the summary."""

from __future__ import annotations

from collections.abc import Sequence

from bapo_megatron.config.flags import parse_options
from bapo_megatron.data.prepare.card import summary
from bapo_megatron.data.prepare.options import PrepareOptions
from bapo_megatron.data.prepare.pipeline import prepare
from bapo_megatron.errors import ConfigError


def data_command(arguments: Sequence[str]) -> None:
    """Prepare the dataset that the arguments describe, and print what was left out."""
    if arguments[:1] != ["prepare"]:
        raise ConfigError("usage: bapo data prepare SOURCE ... --output DIR [flags]; --help lists the flags")
    options = parse_options(PrepareOptions, "bapo data prepare", arguments[1:])
    print(summary(prepare(options)), end="")
