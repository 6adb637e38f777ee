"""Program of `make gpu-study`: runs the arms in turn, each as `bapo train`, and writes a page.

    make gpu-study MODEL=/models/Qwen2.5-0.5B-Instruct
    python -m studies.gpu_study --model FOLDER --small --arms paper --steps 1    # on a CPU

After an interruption the same command continues the first unfinished arm at its newest checkpoint. The page,
gpu_study.md in the study's folder, is written after every arm. Exit code: that of the first arm that does not
finish, otherwise 0.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from bapo_megatron.config.flags import parse_options
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically
from studies.gpu_study.arms import GpuStudyOptions, make_arms, prepare_commands
from studies.gpu_study.page import page

Run = Callable[[Sequence[str]], int]
"""Runs a ``bapo`` command and returns its exit code."""


def gpu_study(options: GpuStudyOptions, bapo: Run) -> int:
    """Run the unfinished arms in turn. Returns the exit code of the first that fails, otherwise 0."""
    options.check()
    for command in prepare_commands(options):
        if code := bapo(command):
            return code
    arms = make_arms(options)
    where = options.home / "gpu_study.md"
    for number, arm in enumerate(arms, 1):
        if arm.is_done():
            print(f"{number}/{len(arms)} {arm.name} is done", flush=True)
            continue
        print(f"{number}/{len(arms)} {arm.name}", flush=True)
        code = bapo(arm.command)
        if code or not arm.is_done():
            print(f"{arm.name} ended with exit code {code}; the same command continues with it", flush=True)
            return code or 1
        write_atomically(where, page(options, arms))
    write_atomically(where, page(options, arms))
    print(f"the page: {where}", flush=True)
    return 0


def _bapo(command: Sequence[str]) -> int:
    """Run a `bapo` command in its own process, whose end frees the GPU's memory. Returns its exit code.

    Stop signals go to the command, which saves; this program then ends with its exit code.
    """
    process = subprocess.Popen([sys.executable, "-m", "bapo_megatron.cli", *command])

    def pass_on(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    # After the start: a child inherits ignored signals. Ctrl-C reaches the child directly.
    before = {signal.SIGTERM: pass_on, signal.SIGUSR1: pass_on, signal.SIGINT: signal.SIG_IGN}
    former = {number: signal.signal(number, handler) for number, handler in before.items()}
    try:
        return process.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def main() -> None:
    """Entry point: exit code 2 for wrong flags."""
    try:
        options = parse_options(GpuStudyOptions, "python -m studies.gpu_study", sys.argv[1:])
        sys.exit(gpu_study(options, _bapo))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
