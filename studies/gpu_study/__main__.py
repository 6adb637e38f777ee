"""Program of `make gpu-study`: the arms one after the other, each a `bapo train` run, then a page.

    make gpu-study MODEL=/models/Qwen2.5-0.5B-Instruct
    python -m studies.gpu_study --model FOLDER --small --arms paper --steps 1    # on a CPU

Stopped at any moment, the same command continues where it was: with the first arm that is not done, at its
newest checkpoint. The page, gpu_study.md in the study's folder, is written after every arm. Exit code: that
of an arm that ended otherwise than by its last step, else 0.
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
"""Runs a ``bapo`` command, and returns its exit code."""


def gpu_study(options: GpuStudyOptions, bapo: Run) -> int:
    """Run the arms that are not done, one after the other; the exit code of the first that fails, else 0."""
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
    """A `bapo` command in a process of its own: a GPU's memory is free again when it has ended.

    Stop signals are for it: it saves, and this program ends with its exit code.
    """
    process = subprocess.Popen([sys.executable, "-m", "bapo_megatron.cli", *command])

    def pass_on(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    # After the start: a process inherits what its parent ignores. Ctrl-C reaches it without our help.
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
