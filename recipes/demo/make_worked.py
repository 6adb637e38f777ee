"""Rows of the demo with a real model and a tool: prepared problems, each after one worked example of a call.

    python recipes/demo/make_worked.py data/calculator

Reads DIR/train/data.jsonl and DIR/held_out/data.jsonl from `bapo data prepare`, and writes train.jsonl and
held_out.jsonl to DIR or `--output`. A prompt is a system message, the example (question, call, calculator's
answer, model's answer), and the problem. The example's own problem is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.files import write_atomically

SPLITS = ("train", "held_out")

SYSTEM = "Use the calculator: write the expression alone. It answers with the value."

EXAMPLE = (
    ("user", "Solve the following multiplication: 23 * 17. Give only the result as your final answer."),
    ("assistant", "23 * 17"),
    ("tool", "391"),
    ("assistant", "391"),
)
"""Worked example: role and content of its messages."""


def worked(lines: Sequence[str], role: str = "tool") -> Iterator[dict[str, Any]]:
    """Rows of a prepared file, with the example before each problem except its own. ``role``: of the tool."""
    said = [(role if who == "tool" else who, content) for who, content in (("system", SYSTEM), *EXAMPLE)]
    messages = [{"role": who, "content": content} for who, content in said]
    for row in map(json.loads, lines):
        if row["prompt"][-1]["content"] != EXAMPLE[0][1]:
            yield {**row, "prompt": [*messages, *row["prompt"]]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of both splits")
    parser.add_argument("--role", default="tool", help="the role of the calculator's answer")
    parser.add_argument("--output", type=Path, help="the folder of what is written; left out: the same")
    settings = parser.parse_args(arguments)
    folder, output = settings.folder, settings.output or settings.folder
    for split in SPLITS:
        rows = list(worked((folder / split / "data.jsonl").read_text().splitlines(), settings.role))
        write_atomically(output / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        print(f"{output / split}.jsonl: {len(rows)} problems, each behind the example")


if __name__ == "__main__":
    main()
