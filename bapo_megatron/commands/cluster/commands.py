"""The commands ``bapo status``, ``logs`` and ``cancel`` of a run: arguments in, printed text out.

ConfigError for wrong arguments. ``status`` reads in a child process with a deadline, as file systems may
hang.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bapo_megatron.errors import refuse_arguments

_WATCH_S = 5.0

_STATUS_DEADLINE_S = 30.0
"""Deadline, in seconds, for reading a run's status from its file system; longer than Slurm's own deadline."""


def status_command(arguments: Sequence[str]) -> None:
    """``bapo status RUN [--watch]``: print the status of a run."""
    from bapo_megatron.commands.cluster.status import read_status, status_text
    from bapo_megatron.runtime.child_process import NoAnswer, within

    run, switches = _run_and_switches("status", arguments, "--watch")
    while True:
        try:
            text = within(_STATUS_DEADLINE_S, lambda: status_text(read_status(run)))
        except NoAnswer:
            text = f"{run} has not answered for {_STATUS_DEADLINE_S:g} s: its file system hangs\n"
            if "--watch" not in switches:
                sys.exit(text.rstrip())
        if "--watch" not in switches:
            print(text, end="")
            return
        from rich.console import Console

        Console(force_terminal=sys.stdout.isatty()).clear()  # a terminal's screen; nothing in a pipe
        print(text, flush=True)
        time.sleep(_WATCH_S)


def logs_command(arguments: Sequence[str]) -> None:
    """``bapo logs RUN [--follow] [--all]``: print the last lines of a run's newest logs."""
    from bapo_megatron.commands.cluster.status import follow_logs, show_logs

    run, switches = _run_and_switches("logs", arguments, "--follow", "--all")
    (follow_logs if "--follow" in switches else show_logs)(run, sys.stdout, "--all" in switches)


def cancel_command(arguments: Sequence[str]) -> None:
    """``bapo cancel RUN [--now]``: stop a run after it has saved, or at once."""
    from bapo_megatron.commands.cluster.run_job import cancel

    run, switches = _run_and_switches("cancel", arguments, "--now")
    print(cancel(run, "--now" in switches))


def _run_and_switches(command: str, arguments: Sequence[str], *known: str) -> tuple[Path, set[str]]:
    """The run directory and the switches of ``arguments``. An unknown switch prints the usage and exits."""
    switches = {word for word in arguments if word.startswith("-")}
    names = [word for word in arguments if not word.startswith("-")]
    if len(names) != 1 or switches - set(known):
        usage = " ".join(["usage: bapo", command, "RUN", *(f"[{name}]" for name in known)])
        refuse_arguments(arguments, f"{usage}, with the directory of a run")
    return Path(names[0]), switches
