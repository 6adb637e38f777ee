"""`bapo eval CHECKPOINT` and `bapo eval compare A B`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bapo_megatron.config.flags import parse_options
from bapo_megatron.errors import refuse_arguments
from bapo_megatron.evaluation.comparison import compare
from bapo_megatron.evaluation.options import EvalOptions
from bapo_megatron.evaluation.run import evaluate
from bapo_megatron.evaluation.text import comparison_text, results_text


def eval_command(arguments: Sequence[str]) -> None:
    """Evaluate, and print the results; with ``compare`` first, two evaluations instead."""
    if arguments[:1] == ["compare"]:
        _compare(arguments[1:])
        return
    options = parse_options(EvalOptions, "bapo eval", arguments)
    print(results_text(evaluate(options)), end="")


def _compare(arguments: Sequence[str]) -> None:
    paths = [text for text in arguments if text != "--json"]
    if len(paths) != 2 or any(text.startswith("-") for text in paths):
        refuse_arguments(arguments, "usage: bapo eval compare A B [--json], with two outputs of bapo eval")
    found = compare(Path(paths[0]), Path(paths[1]))
    if "--json" in arguments:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        print(comparison_text(found, *paths), end="")
