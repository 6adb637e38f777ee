"""GPU check of parity with the CPU, by layout references of ``bapo verify-parallel``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from bapo_megatron.runtime.child_process import ChildProcess, CommandResult, exit_text
from benchmarks.gpu.rows import Row, Size, commands_environment

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "bapo_megatron.cli", "verify-parallel", "recipes/demo_cpu.py"]
END_S = {"cuda": 150.0, "cpu": 900.0}
"""Longest wait for each of the four commands, which is then killed. A CPU may be busy."""


def rows(size: Size, folder: Path) -> Iterator[Row]:
    for dtype in ("float32", "bfloat16"):
        certificate = folder / f"{dtype}.npz"
        flags = [f"--model.dtype={dtype}", f"--tokens={size.canary_tokens}"]
        limit_s = END_S[size.device]
        on_cpu = verify([*flags, f"--save={certificate}"], {"BAPO_DEVICE": "cpu"}, folder, limit_s)
        if on_cpu.ended:
            yield Row(f"{dtype}: certificate of the CPU", said(on_cpu), "written", False)
            continue
        compared = verify([*flags, f"--certificate={certificate}"], {}, folder, limit_s)
        for line in compared.output.splitlines():
            columns = re.split(r"\s{2,}", line.strip())
            if len(columns) == 7 and columns[-1] in ("ok", "tie", "DIFFERS"):
                name, _, _, apart, _, tolerance, verdict = columns
                if name == "quantity":  # the table's head, whose last column is named ok
                    continue
                yield Row(f"{dtype}: {name}", apart, tolerance, verdict != "DIFFERS")
        yield Row(f"{dtype}: all", said(compared), "exit code 0", not compared.ended)


def verify(flags: list[str], environment: dict[str, str], folder: Path, limit_s: float) -> CommandResult:
    """Run ``bapo verify-parallel`` of the demo; it is killed with its children after ``limit_s`` seconds.

    After a failure, prints the end of its stderr.
    """
    logs = folder / "verify.out", folder / "verify.err"
    with logs[0].open("wb") as output, logs[1].open("wb") as errors:
        about = {**commands_environment(), **environment}
        child = ChildProcess([*COMMAND, *flags], about, guarded=True, cwd=ROOT, stdout=output, stderr=errors)
        try:
            code = child.wait_end(limit_s)
        finally:
            child.close()
    texts = [log.read_text(errors="replace") for log in logs]
    ended = f"killed after {limit_s:g} s" if code is None else exit_text(code) if code else ""
    if ended:
        print(f"verify-parallel: {ended}\n{texts[1][-2000:]}", file=sys.stderr, flush=True)
    return CommandResult(texts[0], texts[1], ended, code)


def said(done: CommandResult) -> str:
    """The command's last line; after a failure also its exit reason and last line of stderr."""
    lines = [line.strip() for line in done.output.splitlines() if line.strip()] or ["no output"]
    return f"{lines[-1][:160]} ({done.reason()})"[:400] if done.ended else lines[-1][:200]
