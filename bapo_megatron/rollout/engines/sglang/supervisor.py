"""The servers of a run: those that the recipe names, or some that live as long as the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.errors import RunStopped
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
from bapo_megatron.runtime.distributed import free_port
from bapo_megatron.runtime.run_paths import RunPaths

_HOST = "127.0.0.1"
_POLL_S = 1.0
_MAX_BACKOFF_S = 60.0
"""A server that ends again and again is started at ever longer intervals, up to this."""


class RunServers(EngineServers):
    """The SGLang servers of a run, and the supervisors of those that it has started itself."""

    def __init__(
        self,
        urls: Sequence[str],
        supervisors: Sequence[ServerSupervisor],
        on_event: OnEvent,
        start_s: float = 0.0,
    ) -> None:
        """``start_s``: longest wait for servers that are started."""
        self.urls = list(urls)
        self._supervisors = {supervisor.url: supervisor for supervisor in supervisors}
        self.gpus = {supervisor.url: supervisor.gpus for supervisor in supervisors}
        self._on_event, self._start_s = on_event, start_s
        self._was_ready = False

    def heed(self, event: dict[str, Any]) -> None:
        """Start a server of the run again that the sampler says hangs; others are for a person to end."""
        if event["kind"] not in ("engine_hangs", "engine_ready"):
            return
        url, reason = event["engine"], event["reason"] if event["kind"] == "engine_hangs" else None
        if supervisor := self._supervisors.get(url):
            supervisor.restart(reason)
        elif reason:
            advice = "this run has not started it: end it, and start it again at the same address"
            self._on_event({"kind": "server_hangs", "server": url, "reason": reason, "advice": advice})
            print(f"the server at {url} hangs ({reason}); {advice}", flush=True)

    def hold(self) -> None:
        """Start none again that ends, until ``start``."""
        for supervisor in self._supervisors.values():
            supervisor.hold()

    def running(self) -> list[str]:
        """Addresses of those whose process lives."""
        return [url for url, supervisor in self._supervisors.items() if supervisor.is_running]

    def end(self, spared: Collection[str] = ()) -> None:
        """Kill all but those at the addresses ``spared``, at the same time, and wait until they are gone."""
        others = [supervisor for url, supervisor in self._supervisors.items() if url not in spared]
        with ThreadPoolExecutor(max(1, len(others))) as threads:
            list(threads.map(ServerSupervisor.end, others))

    def start(self) -> None:
        """Start those that do not run, and keep them running. Waits for them only the first time.

        RuntimeError with the log's end if one is not ready then: what is wrong will not mend itself.
        """
        for supervisor in self._supervisors.values():
            supervisor.start()
        if not self._was_ready:
            for supervisor in self._supervisors.values():
                supervisor.wait_ready(self._start_s)
            self._was_ready = True


@contextmanager
def servers_of(config: RunConfig, cuda: bool, on_event: OnEvent) -> Iterator[RunServers]:
    """Servers that take requests; colocated ones are held. Those that the run starts itself end with it."""
    sglang = config.rollout.sglang
    if sglang.urls:
        yield RunServers([url.rstrip("/") for url in sglang.urls], [], on_event)
        return
    supervisors = [ServerSupervisor(config, number, cuda, on_event) for number in range(sglang.servers)]
    urls = [supervisor.url for supervisor in supervisors]
    servers = RunServers(urls, supervisors, on_event, 60 * sglang.start_minutes)
    try:
        if not sglang.colocated:
            servers.start()
        yield servers
    finally:
        for supervisor in supervisors:
            supervisor.stop()


class ServerSupervisor:
    """One server of the run, started again at the same address whenever it ends, or is said to hang.

    It is held at first, and after ``hold``: then it is not started.
    """

    def __init__(self, config: RunConfig, number: int, cuda: bool, on_event: OnEvent) -> None:
        """On this machine. Its log is in the run directory."""
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
        self._start_s = 60 * sglang.start_minutes
        self._on_event = on_event
        self._stopping = threading.Event()
        self._tried = threading.Event()
        """A start was tried since it was last asked for."""
        self._may_start = threading.Event()
        self._starting = threading.Lock()
        """Held while it is decided whether to start it, and while it is started."""
        self._server: ServerProcess | None = None
        self._refused = ""
        """Why it could not be started."""
        self._hang_reason: str | None = None
        """Why it is to be ended and started again."""
        self._can_hang = False
        """Whether silence means that the server hangs: it has started, or the time to start has passed."""
        self._thread = threading.Thread(target=self._supervise, name=f"server-{number}", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start it, unless it runs, and keep it running."""
        with self._starting:
            if not self._may_start.is_set():
                self._tried.clear()
                self._may_start.set()

    def hold(self) -> None:
        """Do not start it again when it ends."""
        with self._starting:
            self._may_start.clear()

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self._server is not None and self._server.process.poll() is None

    def end(self) -> None:
        """Kill it, with all that it has started, and wait until it is gone. Unless held it starts again."""
        with self._starting:
            server = self._server
        if server is not None:
            server.close()

    def wait_ready(self, limit_s: float) -> None:
        """Wait until the server takes requests. RuntimeError with its log's end if it ends or is too slow."""
        self._tried.wait()
        if self._server is None:
            raise RuntimeError(f"{self._command[0]} could not be started: {self._refused}")
        self._server.wait_ready(limit_s)

    def restart(self, reason: str | None) -> None:
        """End it soon, because it hangs, and start it again; not while it still starts. None: it is well."""
        self._hang_reason = reason if self._can_hang else None

    def stop(self) -> None:
        """End it, and do not start it again."""
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
        """Start the server when it is not held. False if it is not to be started any more."""
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
        except OSError as error:  # no memory for a process, a full disk: it may be over later
            self._server, self._refused = None, str(error)
            self._report("server_refused", reason=self._refused)
        self._tried.set()

    def _watch(self, server: ServerProcess, started: float) -> None:
        """Wait until the server has ended or hangs; then kill what is left of it."""
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
            self._report("server_ended", reason=f"it hangs, and is started again: {self._hang_reason}")
        server.stop()  # and what is left of its children

    def _report(self, kind: str, **fields: Any) -> None:
        try:
            self._on_event({"kind": kind, "server": self.url, **fields})
        except RunStopped as stopped:  # the disk is full; the server is kept all the same
            print(f"{kind} {self.url} {fields}: {stopped}", flush=True)
