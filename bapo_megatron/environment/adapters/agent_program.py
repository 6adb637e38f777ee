"""Agent programs in a worker: their processes, what they print, their reward.

A program's task goes through a pipe, which is empty once it is read: it holds the ground truth, and what the
program runs for the policy, in a sandbox too, inherits its standard input, where a file could be read again.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from bapo_megatron.environment import Task
from bapo_megatron.runtime.child_process import ChildProcess, with_users_path
from bapo_megatron.runtime.http import without_proxy

REWARD_FILE = "BAPO_REWARD_FILE"
"""Variable of a program: the path of a file into which it may write its reward, a number."""

PROBLEM = "problem"
"""Field of a row's `extra_info`: the messages of its problem, where the prompt is the program's own."""

TAIL_BYTES = 1 << 16
"""The end of its output, and of its errors, that is read and kept: some print all that they do."""

MOST_LOGS = 500
"""Logs of programs that a run keeps, the newest."""

_LIMITED = (
    "import os, resource, sys; size = int(sys.argv[1]) << 20; "
    "resource.setrlimit(resource.RLIMIT_DATA, (size, size)); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Program that limits the memory of each process of the command behind it. Not the address space, of which
Node.js and Java reserve more than they use."""


@dataclass(frozen=True)
class AgentEnd:
    """How a program ended."""

    code: int
    """Its exit code, negative for a signal."""
    output: str
    errors: str
    """The ends of what it has printed; errors are empty if they went to this process's."""
    reward_file: str
    """What it has written into the file of ``REWARD_FILE``; empty if it has not."""

    def log(self, command: Sequence[str]) -> str:
        """The text of its log."""
        return (
            f"{command} ended with {self.code}\nreward file: {self.reward_file[:80]!r}\n\n"
            f"--- standard error ---\n{self.errors}\n--- standard output ---\n{self.output}\n"
        )


def given_task(task: Task) -> bytes:
    """What a program reads on its standard input."""
    messages = task.extra_info.get(PROBLEM, task.messages)
    return json.dumps({**asdict(task), "messages": messages}).encode()


def given_variables(base_url: str, key: str) -> dict[str, str]:
    """The endpoint's address and key by the names that programs read."""
    anthropic = {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
    # langchain and older litellm read OPENAI_API_BASE, which may be that of a real service.
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": key, **anthropic}


async def run_agent(
    command: Sequence[str],
    task: bytes,
    variables: Mapping[str, str],
    memory_mb: int | None = None,
    keeps_errors: bool = False,
) -> AgentEnd:
    """Run a program with ``task`` on its standard input, to its end.

    ``variables``: for it, besides those of this process, of which PYTHONPATH is the user's. It reaches this
    machine without a proxy, which would see the policy's turns and the episode's key. It and its descendants
    end with the call. ``keeps_errors``: whether its standard error is read, and not this process's. OSError
    if it cannot be started.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if memory_mb is not None:
        command = [sys.executable, "-I", "-S", "-c", _LIMITED, str(memory_mb), *command]
    reading, writing = os.pipe()
    with (
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryDirectory() as folder,
    ):
        reward = Path(folder) / "reward"
        inherited = {**with_users_path(os.environ), **without_proxy()}
        environment = {**inherited, REWARD_FILE: str(reward), **variables}
        environment.pop("ANTHROPIC_AUTH_TOKEN", None)  # of a real service: Anthropic's client would send it
        stderr = errors if keeps_errors else None
        try:
            child = ChildProcess(command, environment, True, stdin=reading, stdout=output, stderr=stderr)
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
        written = ""
        if reward.is_file():
            with reward.open("rb") as file:
                written = _tail(file).strip()
        return AgentEnd(code, _tail(output), _tail(errors), written)


def keep_log(folder: Path, episode: str, text: str) -> None:
    """Keep the log of an episode's program in ``folder``, and of all logs the newest ``MOST_LOGS``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{episode.replace(os.sep, '_')}.log").write_text(text)
    logs = []
    for log in folder.glob("*.log"):
        with suppress(FileNotFoundError):  # another worker has removed it
            logs.append((log.lstat().st_mtime_ns, log))
    for _, path in sorted(logs)[:-MOST_LOGS]:
        with suppress(FileNotFoundError):
            path.unlink()


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read().decode(errors="replace")


def _write(descriptor: int, data: bytes) -> None:
    with suppress(BrokenPipeError), open(descriptor, "wb") as pipe:  # it need not read its task
        pipe.write(data)
