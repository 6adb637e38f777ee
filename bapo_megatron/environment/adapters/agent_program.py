"""Runner of agent programs, as child processes of an environment worker: input, end, output and reward.

``await run_agent(...)`` runs a command to its end, with the JSON of ``given_task`` on standard input and the
variables of ``given_variables`` (model endpoint and key), and returns an ``AgentEnd``. The input is a pipe,
empty once read: the task holds the ground truth, and the program may run code that the policy wrote.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from bapo_megatron.environment import Task
from bapo_megatron.runtime.child_process import ChildProcess, with_users_path
from bapo_megatron.runtime.http import without_proxy

REWARD_FILE = "BAPO_REWARD_FILE"
"""Environment variable with the path of a file into which a program may write its reward, a number."""

PROBLEM = "problem"
"""Field of a row's `extra_info` with the problem's messages, if the prompt is the program's own."""

TAIL_BYTES = 1 << 16
"""Maximum number of bytes kept from the end of a program's output, and of its errors."""

MOST_LOGS = 500
"""Number of newest program logs that a run keeps."""

_LIMITED = (
    "import os, resource, sys; size = int(sys.argv[1]) << 20; "
    "resource.setrlimit(resource.RLIMIT_DATA, (size, size)); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Program that limits the memory of each process of the command after it. Not the address space, of which
Node.js and Java reserve more than they use."""


@dataclass(frozen=True)
class AgentEnd:
    """Result of an agent program: exit code, tails of its output and errors, content of its reward file."""

    code: int | None
    """Exit code, negative for a signal; None if the run ended the program."""
    output: str
    errors: str
    """``output`` and ``errors``: the last ``TAIL_BYTES`` each; errors are empty if they were not captured."""
    reward_file: str
    """Content of the file ``REWARD_FILE``; empty if the program wrote none."""

    def log(self, command: Sequence[str]) -> str:
        how = "was ended by the run" if self.code is None else f"ended with {self.code}"
        return (
            f"{command} {how}\nreward file: {self.reward_file[:80]!r}\n\n"
            f"--- standard error ---\n{self.errors}\n--- standard output ---\n{self.output}\n"
        )


def given_task(task: Task) -> bytes:
    """Return the program's standard input: the task as JSON, with the problem's own messages."""
    messages = task.extra_info.get(PROBLEM, task.messages)
    return json.dumps({**asdict(task), "messages": messages}).encode()


def given_variables(base_url: str, key: str) -> dict[str, str]:
    """Return the endpoint's address and key under the names that programs read."""
    anthropic = {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
    # langchain and older litellm read OPENAI_API_BASE, which may point to a real service.
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": key, **anthropic}


async def run_agent(
    command: Sequence[str],
    task: bytes,
    variables: Mapping[str, str],
    memory_mb: int | None = None,
    keeps_errors: bool = False,
    log: Callable[[AgentEnd], None] | None = None,
) -> AgentEnd:
    """Run a program with ``task`` on its standard input to its end, and return its result.

    ``variables`` extend this process's environment, with the user's PYTHONPATH. The program reaches this
    machine without a proxy, which would see the policy's turns and the episode's key. Its descendants end
    with the call. ``keeps_errors``: capture standard error. ``log`` gets the result in a thread, even if the
    call is cancelled. Raises OSError if the program cannot start.
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
        environment.pop("ANTHROPIC_AUTH_TOKEN", None)  # Anthropic's client would send a real service's token
        stderr = errors if keeps_errors else None
        try:
            child = ChildProcess(command, environment, True, stdin=reading, stdout=output, stderr=stderr)
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        # In a separate thread: a program that reads late must not block others if its task fills the pipe.
        threading.Thread(target=_write, args=(writing, task), daemon=True).start()
        pause_s = 0.02
        code: int | None = None
        try:
            while (code := child.wait_end(0)) is None:
                await asyncio.sleep(pause_s := min(1.1 * pause_s, 0.25))  # there may be hundreds
        finally:
            await asyncio.shield(asyncio.to_thread(child.close))
            end = AgentEnd(code, _tail(output), _tail(errors), _written(reward))
            if log is not None:
                await asyncio.shield(asyncio.to_thread(log, end))
        return end


def keep_log(folder: Path, episode: str, text: str) -> None:
    """Write the log of an episode's program to ``folder``, and keep only the newest ``MOST_LOGS`` logs."""
    folder.mkdir(parents=True, exist_ok=True)
    log_path(folder, episode).write_text(text)
    logs = []
    for log in folder.glob("*.log"):
        with suppress(FileNotFoundError):  # another worker removed it
            logs.append((log.lstat().st_mtime_ns, log))
    for _, path in sorted(logs)[:-MOST_LOGS]:
        with suppress(FileNotFoundError):
            path.unlink()


def log_path(folder: Path, episode: str) -> Path:
    """Return the path of an episode's log."""
    return folder / f"{episode.replace(os.sep, '_')}.log"


def _written(reward: Path) -> str:
    if not reward.is_file():
        return ""
    with reward.open("rb") as file:
        return _tail(file).strip()


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read().decode(errors="replace")


def _write(descriptor: int, data: bytes) -> None:
    with suppress(BrokenPipeError), open(descriptor, "wb") as pipe:  # programs may ignore their task
        pipe.write(data)
