"""Agent programs in a worker: their processes.

A program's task goes through a pipe, which is empty once it is read: it holds the ground truth, and
what the program runs for the policy, in a sandbox too, inherits its standard input, where a file could be
read again.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from bapo_megatron.runtime.child_process import ChildProcess
from bapo_megatron.runtime.http import without_proxy

_TAIL_BYTES = 1 << 16
"""The end of its output in which its last word is looked for: some print all that they do."""


async def run_agent(command: Sequence[str], task: bytes, variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a program with ``task`` on its standard input: its exit code, and the last word of its output.

    ``variables``: for it, besides those of this process. It reaches this machine without a proxy, which would
    see the policy's turns and the episode's key. It and its descendants end with the call. OSError if it
    cannot be started.
    """
    environment = {**os.environ, **without_proxy(), **variables}
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as printed:
        try:
            child = ChildProcess(command, environment, guarded=True, stdin=reading, stdout=printed)
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        # In a thread of its own: a program that reads late must hold up nobody whose task fills its pipe.
        threading.Thread(target=_write, args=(writing, task), daemon=True).start()
        pause_s = 0.02
        try:
            while (code := child.wait_end(0)) is None:
                await asyncio.sleep(pause_s := min(1.1 * pause_s, 0.25))  # there may be hundreds
        finally:
            await asyncio.shield(asyncio.to_thread(child.close))
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _TAIL_BYTES))
        words = printed.read().decode(errors="replace").split()
    return code, words[-1] if words else ""


def _write(descriptor: int, data: bytes) -> None:
    with suppress(BrokenPipeError), open(descriptor, "wb") as pipe:  # it need not read its task
        pipe.write(data)
