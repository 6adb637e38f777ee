"""GPU check of parity with the CPU, by layout references of ``bapo verify-parallel``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.rows import Row, Size, commands_environment

ROOT = Path(__file__).parents[2]


def rows(size: Size, folder: Path) -> Iterator[Row]:
    for dtype in ("float32", "bfloat16"):
        certificate = folder / f"{dtype}.npz"
        flags = [f"--model.dtype={dtype}", f"--tokens={size.canary_tokens}"]
        on_cpu = _verify([*flags, f"--save={certificate}"], {"BAPO_DEVICE": "cpu"})
        if on_cpu.returncode:
            yield Row(f"{dtype}: certificate of the CPU", _last_line(on_cpu), "written", False)
            continue
        compared = _verify([*flags, f"--certificate={certificate}"], {})
        for line in compared.stdout.splitlines():
            columns = re.split(r"\s{2,}", line.strip())
            if len(columns) == 7 and columns[-1] in ("ok", "tie", "DIFFERS"):
                name, _, _, apart, _, tolerance, verdict = columns
                yield Row(f"{dtype}: {name}", apart, tolerance, verdict != "DIFFERS")
        yield Row(f"{dtype}: all", _last_line(compared), "exit code 0", compared.returncode == 0)


def _verify(flags: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bapo_megatron.cli", "verify-parallel", "recipes/demo_cpu.py"]
    return subprocess.run(
        [*command, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**commands_environment(), **environment},
    )


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()
    return lines[-1][:200]
