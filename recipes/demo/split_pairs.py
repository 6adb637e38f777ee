r"""Held-out problems of which training sees no twin: 3 + 1 and 1 + 3 stand on the same side of the split.

    bapo data prepare reasoning-gym:chain_sum,products --size 200 --output data/one_digit/all ...
    python recipes/demo/split_pairs.py data/one_digit/all/data.jsonl data/one_digit

writes ``held_out.jsonl``, 30 % of the pairs of numbers, and ``train.jsonl``, all others. The same rows are
split in the same way.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.files import write_atomically

HELD_OUT = 0.3
"""Share of the pairs that are held out."""


def pair_of(row: dict[str, Any]) -> tuple[str, ...]:
    """The operation of a problem of two numbers, and the numbers in either order."""
    entry = json.loads(row["extra_info"]["entry"])
    left, sign, right = entry["metadata"]["expression"].split()
    return (sign, *sorted((left, right)))


def split(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Problems held out and problems to train on, in their order; all of a pair on one side."""
    pairs = [pair_of(json.loads(line)) for line in lines]
    distinct = sorted(set(pairs))
    held_out = set(random.Random(0).sample(distinct, round(HELD_OUT * len(distinct))))
    first = [line for line, pair in zip(lines, pairs, strict=True) if pair in held_out]
    return first, [line for line, pair in zip(lines, pairs, strict=True) if pair not in held_out]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ``train.jsonl`` is written last, so it says that both are there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", type=Path, help="data.jsonl that `bapo data prepare` wrote")
    parser.add_argument("output", type=Path, help="the folder of both files")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, part in zip(
        ("held_out", "train"), split(options.problems.read_text().splitlines()), strict=True
    ):
        write_atomically(options.output / f"{name}.jsonl", "".join(f"{line}\n" for line in part))
        print(f"{options.output / name}.jsonl: {len(part)} problems")


if __name__ == "__main__":
    main()
