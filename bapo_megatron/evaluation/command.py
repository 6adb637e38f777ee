"""Entry points of ``bapo eval CHECKPOINT`` and ``bapo eval compare A B``: flags in, printed results out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from bapo_megatron.config.flags import parse_options
from bapo_megatron.evaluation.comparison import compare
from bapo_megatron.evaluation.examples import examples
from bapo_megatron.evaluation.options import CompareOptions, EvalOptions
from bapo_megatron.evaluation.run import evaluate
from bapo_megatron.evaluation.text import comparison_text, examples_text, results_text


def eval_command(arguments: Sequence[str]) -> None:
    """Evaluate, and print the results; with ``compare`` first, two evaluations instead."""
    if arguments[:1] == ["compare"]:
        _compare(arguments[1:])
        return
    options = parse_options(EvalOptions, "bapo eval", arguments)
    print(results_text(evaluate(options)), end="")


def _compare(arguments: Sequence[str]) -> None:
    options = parse_options(CompareOptions, "bapo eval compare", arguments)
    options.check()
    found = compare(options.a, options.b)
    shown = examples(options.a, options.b, options.examples) if options.examples else []
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        print(comparison_text(found, str(options.a), str(options.b)) + examples_text(shown), end="")
