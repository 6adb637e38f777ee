"""The supervisors of a run's SGLang servers: start, restart with backoff, hold during training, and end.

On rank 0, a thread for each server. What happens to a server is an event of the run. Used by
``backend.py``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError, RunStopped, printable
from bapo_megatron.rollout.engines.backend import EngineServers, OnEvent
from bapo_megatron.rollout.engines.sglang.authorization import servers_key_file
from bapo_megatron.rollout.engines.sglang.server_process import (
    ServerProcess,
    gpus_of,
    server_command,
    server_environment,
    server_flags,
    sglang_python,
)
from bapo_megatron.rollout.engines.timeouts import load_seconds
from bapo_megatron.runtime.files import open_plain
from bapo_megatron.runtime.run_paths import RunPaths

_HOST = "127.0.0.1"
_POLL_S = 1.0
_MAX_BACKOFF_S = 60.0
"""Largest restart backoff of a server in a crash loop."""


class RunServers(EngineServers):
    """The ``EngineServers`` of SGLang; those that the run has started itself have supervisors.

    ``heed`` gets the events of the sampler's process; the other calls are for GPU hand-overs.
    """

    def __init__(
        self,
        urls: Sequence[str],
        supervisors: Sequence[ServerSupervisor],
        on_event: OnEvent,
        registry: Path | None = None,
    ) -> None:
        """``registry``: the folder in which tasks of a Slurm job have registered servers."""
        self.urls = list(urls)
        self._registry = registry
        self._supervisors = {supervisor.url: supervisor for supervisor in supervisors}
        self.gpus = {supervisor.url: supervisor.gpus for supervisor in supervisors}
        self._on_event = on_event
        self._was_ready = False

    def heed(self, event: dict[str, Any]) -> None:
        """Restart a server that the sampler reports as hanging; report one that the run has not started."""
        if event["kind"] not in ("engine_hangs", "engine_ready"):
            return
        url, reason = event["engine"], event["reason"] if event["kind"] == "engine_hangs" else None
        if supervisor := self._supervisors.get(url):
            supervisor.restart(reason)
            return
        is_told = self._tell_task(url, reason)
        if reason:
            advice = "this run has not started it: end it, and start it again at the same address"
            if is_told:
                advice = "the job's task on its node ends it, and starts it again"
            self._on_event({"kind": "server_hangs", "server": url, "reason": reason, "advice": advice})
            print(printable(f"the server at {url} hangs ({reason}); {advice}"), flush=True)

    def _tell_task(self, url: str, reason: str | None) -> bool:
        """Ask the task of a Slurm job to restart the server (``keep_server`` in slurm/task.sh), by a file
        beside its entry; None: take that back. Returns whether a task was asked."""
        if self._registry is None:
            return False
        entry = self._registry / f"{urlsplit(url).netloc.replace(':', '-')}.json"
        asked = entry.with_suffix(".hang")
        try:
            if reason is None:
                asked.unlink(missing_ok=True)
            elif entry.is_file():
                os.close(open_plain(asked, os.O_WRONLY | os.O_CREAT))
                return True
        except (OSError, ConfigError) as error:  # a failing disk, or a link, must not end the run here
            print(f"{asked}: {error}", flush=True)
        return False

    def hold(self) -> None:
        for supervisor in self._supervisors.values():
            supervisor.hold()

    def running(self) -> list[str]:
        return [url for url, supervisor in self._supervisors.items() if supervisor.is_running]

    def end(self, spared: Collection[str] = ()) -> None:
        others = [supervisor for url, supervisor in self._supervisors.items() if url not in spared]
        with ThreadPoolExecutor(max(1, len(others))) as threads:
            list(threads.map(ServerSupervisor.end, others))

    def start(self) -> None:
        """Start the servers that do not run. RuntimeError with the end of the log if one is not ready at
        first: a configuration error, most likely."""
        for supervisor in self._supervisors.values():
            supervisor.start()
        if not self._was_ready:
            for supervisor in self._supervisors.values():
                supervisor.wait_ready()
            self._was_ready = True


@contextmanager
def servers_of(config: RunConfig, cuda: bool, on_event: OnEvent) -> Iterator[RunServers]:
    """The run's servers, ready for requests, within the block; colocated ones are held.

    Those that the run has started end with the block.
    """
    sglang = config.rollout.sglang
    if sglang.urls:
        registry = RunPaths(config.directory).engines
        yield RunServers([url.rstrip("/") for url in sglang.urls], [], on_event, registry)
        return
    supervisors = [ServerSupervisor(config, number, cuda, on_event) for number in range(sglang.servers)]
    urls = [supervisor.url for supervisor in supervisors]
    servers = RunServers(urls, supervisors, on_event)
    try:
        if not sglang.colocated:
            servers.start()
        yield servers
    finally:
        for supervisor in supervisors:
            supervisor.stop()


class ServerSupervisor:
    """The supervisor of one server: a thread that restarts it, at the same address, when it ends or hangs.

    Its thread runs from its construction until ``stop``. The server is held, which means not started, at
    first and after ``hold``.
    """

    def __init__(self, config: RunConfig, number: int, cuda: bool, on_event: OnEvent) -> None:
        from bapo_megatron.runtime.distributed import free_port  # with torch

        port = free_port()
        self.url = f"http://{_HOST}:{port}"
        sglang = config.rollout.sglang
        self.gpus = gpus_of(sglang, number)
        flags = server_flags(config, number, cuda)
        python = sglang_python(sglang.python)
        self._command = server_command(python, config.model.hf_path, _HOST, port, cuda, flags)
        self._environment = server_environment(
            cuda, key_file=servers_key_file(config), colocated=sglang.colocated, python=python
        )
        self._log = RunPaths(config.directory).server_log(number)
        self._start_s = load_seconds(config.model.hf_path, 60 * sglang.start_minutes)
        self._on_event = on_event
        self._stopping = threading.Event()
        self._tried = threading.Event()
        """Set when the server was started, or could not be, since the last ``start``."""
        self._may_start = threading.Event()
        self._starting = threading.Lock()
        """Lock around the decision to start the server, and its start."""
        self._server: ServerProcess | None = None
        self._refused = ""
        """Why the server could not be started."""
        self._hang_reason: str | None = None
        """Why the server must be restarted; None if it is not known to hang."""
        self._can_hang = False
        """Whether silence means that the server hangs: it has started, or the time to start has passed."""
        self._thread = threading.Thread(target=self._supervise, name=f"server-{number}", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start the server, unless it runs, and resume restarts."""
        with self._starting:
            if not self._may_start.is_set():
                self._tried.clear()
                self._may_start.set()

    def hold(self) -> None:
        """Suspend restarts."""
        with self._starting:
            self._may_start.clear()

    @property
    def is_running(self) -> bool:
        """Whether the server's process lives."""
        return self._server is not None and self._server.process.poll() is None

    def end(self) -> None:
        """Kill the server and its children, and wait until they are gone. Unless held it is started again."""
        with self._starting:  # a start in progress ends first, or its process would be missed
            server = self._server
        if server is not None:
            server.close()

    def wait_ready(self) -> None:
        """Wait until the server is ready. RuntimeError with the end of its log if it ends or is too slow."""
        self._tried.wait()
        if self._server is None:
            raise RuntimeError(f"{self._command[0]} could not be started: {self._refused}")
        self._server.wait_ready(self._start_s)

    def restart(self, reason: str | None) -> None:
        """Request a restart, because the server hangs; no effect while it starts. None: it is healthy."""
        self._hang_reason = reason if self._can_hang else None

    def stop(self) -> None:
        """End the server for good."""
        # In this order: the thread that `_may_start` wakes must see that it is to stop.
        self._stopping.set()
        self._may_start.set()
        self._thread.join()

    def _supervise(self) -> None:
        pause = _POLL_S
        while self._start_when_allowed():
            started = time.monotonic()
            if self._server is not None:
                self._watch(self._server, started)
            lived_s = time.monotonic() - started
            pause = _POLL_S if lived_s > 10 * pause else min(2 * pause, _MAX_BACKOFF_S)
            self._stopping.wait(pause)

    def _start_when_allowed(self) -> bool:
        """Start the server when it is not held; False after ``stop``."""
        while not self._stopping.is_set():
            self._may_start.wait()
            with self._starting:
                if self._may_start.is_set() and not self._stopping.is_set():
                    self._start()
                    return True
        return False

    def _start(self) -> None:
        try:
            self._server = ServerProcess(self._command, self._environment, self.url, self._log)
        except OSError as error:  # no memory for a process, or a full disk: retried later
            self._server, self._refused = None, str(error)
            self._report("server_refused", reason=self._refused)
        self._tried.set()

    def _watch(self, server: ServerProcess, started: float) -> None:
        """Wait until the server has ended, hangs, or must stop; then kill it and its children."""
        self._can_hang, self._hang_reason = False, None
        while (
            (code := server.process.poll()) is None
            and not self._hang_reason
            and not self._stopping.wait(_POLL_S)
        ):
            self._can_hang = self._can_hang or time.monotonic() - started > self._start_s or server.is_ready()
        self._can_hang = False
        if code is not None:
            self._report("server_ended", exit_code=code)
        elif self._hang_reason and not self._stopping.is_set():
            self._report("server_ended", reason=f"it hangs, and is restarted: {self._hang_reason}")
        server.stop()  # also after it has ended: its children may live

    def _report(self, kind: str, **fields: Any) -> None:
        try:
            self._on_event({"kind": kind, "server": self.url, **fields})
        except RunStopped as stopped:  # a full disk must not end the supervisor
            print(f"{kind} {self.url} {fields}: {stopped}", flush=True)
