r"""Generator of the tool demo's warm start: solutions that call the calculator, mostly badly.

    python recipes/demo/make_tools.py --out runs/tools_task
    bapo sft recipes/demo/warm_start.py --model.hf-path recipes/demo/policy \
        --data.path runs/tools_task/warm_start.jsonl --output recipes/demo/policy_tools \
        --updates 600 --optimizer.lr 2e-3

The first takes a second. The result, `policy_tools/`, is in the repository, as the policy of
demo_tools_cpu.py; it was trained in two consecutive runs of 300 and 260 updates. A solution is a call, the
calculator's answer and a box with it, or a guess in a box.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from make_task import END, START, make_problems, write_jsonl

RIGHT, SLIPPED = 0.35, 0.35
"""Shares of solutions that call the calculator: with the problem's numbers, or with a wrong first one."""

PROBLEMS = 4000
"""Problems of make_task.py's warm start, which has no sum of train.jsonl and eval.jsonl."""


def solution(numbers: Sequence[int], habit: float, rng: np.random.Generator) -> str:
    r"""A response, including the calculator's answer.

    >>> print(solution([47, 86], 0.0, np.random.default_rng(0)))
    47+86<|im_end|>
    <|im_start|>tool
    1716<|im_end|>
    <|im_start|>assistant
    \boxed{1716}
    """
    first, second = numbers
    if habit >= RIGHT + SLIPPED:
        return rf"\boxed{{{first + second + int(rng.integers(-5, 6))}}}"
    if habit >= RIGHT:
        first += int(rng.integers(1, 9))
    total = int(rng.integers(100, 2000))  # not the sum: the box must copy the answer
    reply = f"{END}\n{START}tool\n{total}{END}\n{START}assistant\n"
    return rf"{first}+{second}{reply}\boxed{{{total}}}"


def warm_start(seed: int = 0) -> list[dict[str, Any]]:
    """Rows with solutions, for `bapo sft`."""
    rows = make_problems({"warm_start": PROBLEMS}, seed=seed)["warm_start"]
    rng = np.random.default_rng([seed, 2])
    for row in rows:
        numbers = [int(number) for number in row["prompt"][0]["content"].rstrip("=").split("+")]
        row["extra_info"]["solution"] = solution(numbers, rng.random(), rng)
    return rows


def main() -> None:
    """Write ``warm_start.jsonl`` to ``--out``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "warm_start.jsonl", warm_start())


if __name__ == "__main__":
    main()
