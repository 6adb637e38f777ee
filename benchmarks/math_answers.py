"""Answers of mathematics judged a second: this version and another, in turns.

    python -m benchmarks.math_answers COMMIT        # two minutes

Each version judges in a process of its own, from a copy of its commit; short turns alternate, so that other
work on the machine meets both alike. Writes benchmarks/results/math_answers.md.
"""

from __future__ import annotations

from benchmarks.code_sandbox import asked_commit, judges_of, row_of_rates
from benchmarks.common import machine, write

ROUNDS, ANSWERS = 10, 20
"""Turns of each version, and answers of a turn."""

KINDS = {
    "a fraction, right": (r"\frac{7}{12}", r"\dfrac{14}{24}"),
    "a fraction, wrong": (r"\frac{7}{12}", r"\dfrac{5}{12}"),
    "a root, right": (r"10\sqrt{2}", r"\sqrt{200}"),
    "a formula, right": (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    "three numbers, right": (r"\{1, 2, 3\}", r"\{3, 2, 1\}"),
    "a restated question": ("120", r"\binom{10}{3}"),
}

JUDGE = """
import json, sys, time
from bapo_megatron.reward import math_verify_compare
from bapo_megatron.reward.math import answers_equal
math_verify_compare.import_math_verify()
for line in sys.stdin:
    truth, answer, count = json.loads(line)
    begin = time.perf_counter()
    for _ in range(count):
        answers_equal.__wrapped__(truth, answer, math_verify_compare.equal)  # not what it remembers
    print(count / (time.perf_counter() - begin), flush=True)
"""


def main() -> None:
    """Measure both versions in turns and write the results."""
    before = asked_commit(__doc__)
    with judges_of(before, JUDGE) as judges:
        rows = [
            row_of_rates(kind, judges, (truth, answer, ANSWERS), ROUNDS)
            for kind, (truth, answer) in KINDS.items()
        ]
    write("math_answers", _page(before, rows))


def _page(before: str, rows: list[str]) -> str:
    table = "\n".join(rows)
    return f"""\
# Answers of mathematics judged a second

Command: `python -m benchmarks.math_answers {before}`

{machine()}. One answer at a time, without the memory for equal ones; medians of {ROUNDS} turns of {ANSWERS}
answers, in which the version of commit {before} and this one alternate; the last column is the median of the
turns' ratios. Other work ran on the machine: only the ratio counts. Whole numbers, as most answers are, need
no math-verify in either version.

| answer | before | now | now / before |
|---|---:|---:|---:|
{table}
"""


if __name__ == "__main__":
    main()
