"""Programs judged a second by the code reward: this version and another, in turns.

    python -m benchmarks.code_sandbox COMMIT        # a few minutes, one program at a time

Each version judges in a process of its own, from a copy of its commit; short turns alternate, so that other
work on the machine meets both alike. Writes benchmarks/results/code_sandbox.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.common import machine, write

ROUNDS, PROGRAMS = 20, 8
"""Turns of each version, and programs of a turn."""

KINDS = {
    "a script with 1 test": (
        {"inputs": ["1 2\n"], "outputs": ["3\n"]},
        "print(sum(map(int, input().split())))",
    ),
    "a script with 20 tests": (
        {"inputs": ["1 2\n"] * 20, "outputs": ["3\n"] * 20},
        "print(sum(map(int, input().split())))",
    ),
    "a function with 10 literal asserts": (
        {"assert_case": [f"assert double({n}) == {2 * n}" for n in range(10)]},
        "def double(n): return 2 * n",
    ),
    "a function with 10 other asserts": (
        {"assert_case": [f"assert abs(double({n}) - {2 * n}) < 1e-6" for n in range(10)]},
        "def double(n): return 2 * n",
    ),
}

JUDGE = """
import json, sys, time
from bapo_megatron.reward.code import program_is_right
for line in sys.stdin:
    tests, source, count = json.loads(line)
    response = "```python\\n" + source + "\\n```"
    begin = time.perf_counter()
    for _ in range(count):
        assert program_is_right(tests, response, 512, 10.0, 60.0)
    print(count / (time.perf_counter() - begin), flush=True)
"""


class Judge:
    """A process that judges with the package in ``folder``: ``program`` answers a line with a rate."""

    def __init__(self, folder: Path, program: str) -> None:
        pipe = subprocess.PIPE
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=pipe, stdout=pipe, cwd=folder, env=environment, text=True
        )

    def rate(self, question: Sequence[object]) -> float:
        """How many of a kind it judges a second."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


@contextmanager
def judges_of(before: str, program: str) -> Iterator[list[Judge]]:
    """Judges of the version of commit ``before`` and of this one."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bapo_judges_")))
        (folder / "before").mkdir()
        archive = subprocess.run(["git", "archive", before, "bapo_megatron"], check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", str(folder / "before")], input=archive.stdout, check=True)
        shutil.copytree(
            Path(__file__).resolve().parents[1] / "bapo_megatron", folder / "now" / "bapo_megatron"
        )
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)
        judges = [Judge(folder / "before", program), Judge(folder / "now", program)]
        for judge in judges:
            opened.callback(judge.close)
        yield judges


def row_of_rates(kind: str, judges: Sequence[Judge], question: Sequence[object], rounds: int) -> str:
    """A row of a page's table: the medians of both versions' rates, and of the turns' ratios."""
    for judge in judges:
        judge.rate(question)  # imports, and files that are read for the first time
    rates = [[judge.rate(question) for judge in judges] for _ in range(rounds)]
    old, new = (statistics.median(column) for column in zip(*rates, strict=True))
    ratio = statistics.median(after / before for before, after in rates)
    digits = 0 if old >= 100 else 1
    return f"| {kind} | {old:.{digits}f} | {new:.{digits}f} | {ratio:.2f} |"


def asked_commit(about: str | None) -> str:
    """The commit of the other version, which the command line names; ``about``: the text of --help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="commit of the other version")
    before: str = parser.parse_args().before
    return before


def main() -> None:
    """Measure both versions in turns and write the results."""
    before = asked_commit(__doc__)
    with judges_of(before, JUDGE) as judges:
        rows = [
            row_of_rates(kind, judges, (json.dumps(tests), source, PROGRAMS), ROUNDS)
            for kind, (tests, source) in KINDS.items()
        ]
    write("code_sandbox", _page(before, rows))


def _page(before: str, rows: list[str]) -> str:
    table = "\n".join(rows)
    return f"""\
# Programs judged a second

Command: `python -m benchmarks.code_sandbox {before}`

{machine()}. One program at a time, each in a sandbox of its own; medians of {ROUNDS} turns of {PROGRAMS}
programs, in which the version of commit {before} and this one alternate; the last column is the median of the
turns' ratios. Both have their bytecode, as an installed package has. Other work ran on the machine: only the
ratio counts.

| program | before | now | now / before |
|---|---:|---:|---:|
{table}
"""


if __name__ == "__main__":
    main()
