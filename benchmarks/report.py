"""Cost of ``bapo report`` for a long run, beside reading the same logs as rows, as earlier versions did.

A made-up run of 10,000 steps and 40,000 updates, with the metrics of tests/fixtures/bapo. Each candidate is a
process of its own; seconds are those of its processor, so that other load counts little.

    python -m benchmarks.report [--quick]
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bapo_megatron.commands.report.data import read_run
from bapo_megatron.commands.report.page import write_report
from bapo_megatron.runtime.jsonl_log import Row, read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths

FIXTURE = Path(__file__).parents[1] / "tests/fixtures/bapo"
UPDATES = 4
"""Updates of a step: two passes of two."""


def main() -> None:
    """Measure each candidate, or as a child do one of them."""
    if len(sys.argv) > 2:
        print(json.dumps(measured(sys.argv[1], Path(sys.argv[2]))))
        return
    from benchmarks.common import in_a_process, is_quick, machine, write  # with torch, not in a child

    quick = is_quick(__doc__)
    steps = 500 if quick else 10_000
    with TemporaryDirectory() as folder:
        make_run(Path(folder), steps)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.jsonl")) / 1e6
        found = {name: in_a_process("benchmarks.report", name, folder) for name in ("import", *CANDIDATES)}
    lines = [
        f"| {CANDIDATES[name]} | {seconds:.1f} | {peak:.0f} |"
        for name, (seconds, peak) in found.items()
        if name in CANDIDATES
    ]
    rows, table = (found[name][1] - found["import"][1] for name in ("rows", "table"))
    text = PAGE.format(
        machine=machine(),
        steps=steps,
        updates=UPDATES * steps,
        size=size,
        base=found["import"][1],
        lines="\n".join(lines),
        memory=rows / table,
        speed=found["rows"][0] / found["table"][0],
    )
    print(text) if quick else write("report", text)


CANDIDATES = {
    "rows": "logs as rows of dicts (`read_jsonl`)",
    "table": "logs as columns (`read_run`)",
    "report": "`bapo report`: read, draw 18 plots and the overview, write",
}

PAGE = """# Report of a long run

Command: `python -m benchmarks.report`

{machine}. A made-up run of {steps:,} steps and {updates:,} updates: {size:.0f} MB of logs. Seconds
of the processor, start of the interpreter left out; peak of the process, of which {base:.0f} MB are imports.

| what | seconds | peak, MB |
|---|---:|---:|
{lines}

Above the imports rows take {memory:.0f} times the memory of columns; to read them takes {speed:.1f} times as
long.
"""


def make_run(folder: Path, steps: int) -> None:
    """Write the logs of a run: rows of the fixture, each number changed by a few percent."""
    noise = random.Random(0)

    def another(row: Row, **fixed: int) -> str:
        changed = {
            name: value * (1 + 0.05 * noise.gauss(0, 1)) if isinstance(value, float) else value
            for name, value in row.items()
        }
        return json.dumps(changed | fixed) + "\n"

    there, here = RunPaths(FIXTURE), RunPaths(folder)
    metrics, updates = read_jsonl(there.metrics), read_jsonl(there.updates)
    with here.metrics.open("w") as file:
        for step in range(1, steps + 1):
            file.write(another(metrics[step % len(metrics)], step=step))
    with here.updates.open("w") as file:
        for number in range(steps * UPDATES):
            place = {"step": 1 + number // UPDATES, "epoch": number % UPDATES // 2, "update": number % 2}
            file.write(another(updates[number % len(updates)], **place))


def measured(name: str, run: Path) -> tuple[float, float]:
    """Processor seconds of a candidate, and the peak of this process in MB."""
    start = time.process_time()
    paths = RunPaths(run)
    kept = {
        "import": lambda: None,
        "rows": lambda: (read_jsonl(paths.metrics), read_jsonl(paths.updates)),
        "table": lambda: read_run(run),
        "report": lambda: write_report([run]),
    }[name]()
    seconds = time.process_time() - start
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    del kept
    return seconds, int(peak.split()[1]) / 1000


if __name__ == "__main__":
    main()
