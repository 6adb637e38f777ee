"""End event of a run (done, preempted, stopped, failed), and the life of the process that sends events.

Two context managers around a run, on rank 0: ``sending_events`` outside, ``recorded_end`` inside, so that the
end is sent, too. The sender itself: ``runtime/events/sender.py``. Used by ``trainer/build.py`` and
``trainer/rollout_only.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.errors import Preempted, RunStopped
from bapo_megatron.runtime.events.kinds import last_turn
from bapo_megatron.runtime.events.sender import SenderSettings
from bapo_megatron.runtime.jsonl_log import tail_rows
from bapo_megatron.runtime.run_files import open_plain
from bapo_megatron.runtime.run_paths import RunPaths

_LAST_S, _LAST_OF_PREEMPTED_S = 30.0, 10.0
"""Seconds that the end of a run waits for the sender; a preempted job may be killed soon."""
_ENDING_S = 5.0


@contextmanager
def recorded_end(
    config: RunConfig, has_work: bool, event: Callable[[dict[str, Any]], None]
) -> Iterator[None]:
    """Context manager around a run: records its end event, `done`, `preempted`, `stopped` or `failed`.

    ``has_work``: whether steps were left; a finished run that is started again records no second `done`.
    """
    try:
        yield
    except BaseException as error:
        with suppress(RunStopped, OSError):  # a full disk must not hide the error that ended the run
            event(_end_event(error))
        raise
    if has_work or last_turn(tail_rows(RunPaths(config.directory).events)) != "done":
        event({"kind": "done", "step": config.steps})


def _end_event(error: BaseException) -> dict[str, Any]:
    if isinstance(error, KeyboardInterrupt):
        return {"kind": "stopped", "reason": "Ctrl-C"}
    if isinstance(error, Preempted | RunStopped):
        kind = "preempted" if isinstance(error, Preempted) else "stopped"
        return {"kind": kind, "reason": str(error)}
    return {"kind": "failed", "reason": f"{type(error).__name__}: {error}"}


@contextmanager
def sending_events(config: RunConfig) -> Iterator[None]:
    """Context manager: the event sender process of a run, on rank 0, if ``logging.on_event`` has a target.

    The run waits for it only at its end, 30 s or after a preemption 10 s (and 5 s more if it hangs). A
    failure of the sender never fails the run.
    """
    if not config.logging.on_event:
        yield
        return
    process, limit_s = _start(config), _LAST_S
    try:
        yield
    except Preempted:
        limit_s = _LAST_OF_PREEMPTED_S
        raise
    finally:
        if process:
            _close(process, limit_s, config)


def _start(config: RunConfig) -> subprocess.Popen[bytes] | None:
    paths, logging = RunPaths(config.directory), config.logging
    order = SenderSettings(
        run_dir=str(paths.root.absolute()),
        name=config.name,
        targets=logging.on_event,
        offset=paths.events.stat().st_size if paths.events.exists() else 0,
        steps=config.steps,
        evaluate_every=config.evaluation.every,
        stalled_minutes=logging.stalled_minutes,
    )
    paths.logs.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "bapo_megatron.runtime.events.sender", str(os.getpid())]
    try:
        with open(open_plain(paths.on_event_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
            # Its own session: signals that kill the run must not kill the sender, which reports them.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        assert process.stdin is not None
        process.stdin.write(order.line())
        process.stdin.flush()
    except OSError as error:
        _warn(f"events cannot be sent: {error}")
        return None
    return process


def _close(process: subprocess.Popen[bytes], limit_s: float, config: RunConfig) -> None:
    """End the sender: tell it how many seconds its last events may take, then kill it if it hangs."""
    with suppress(OSError, subprocess.TimeoutExpired):  # it has ended, or hangs
        process.communicate(f"{limit_s}\n".encode(), timeout=limit_s + _ENDING_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.returncode:
        log = RunPaths(config.directory).on_event_log
        _warn(f"the process that sends events has ended with {process.returncode}: {log}")


def _warn(message: str) -> None:
    with suppress(OSError):
        print(f"warning: logging.on_event: {message}", file=sys.stderr, flush=True)
