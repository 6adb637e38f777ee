"""The ``sglang`` backend: SGLang servers, started by the run or already running, and their clients.

``SglangBackend.serve`` starts a run's servers on rank 0, and ``open`` returns their clients in the process
that samples. Each started server has a supervisor thread on rank 0, which restarts it with backoff and
reports failures as run events. Imports that need torch are local, because ``bapo plan`` loads this file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bapo_megatron.config import RolloutConfig, RunConfig
from bapo_megatron.errors import ConfigError, RunStopped, printable
from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.backend import EngineBackend, EngineServers
from bapo_megatron.rollout.engines.pool_state import EngineTimeouts, load_seconds
from bapo_megatron.rollout.engines.requests import limits_of
from bapo_megatron.rollout.engines.sent_weights import MakeDigester, UnknownDigests
from bapo_megatron.rollout.engines.sglang.authorization import (
    Authorization,
    check_keys_asked,
    known_key,
    servers_key_file,
)
from bapo_megatron.rollout.engines.sglang.engine import SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, SglangServer
from bapo_megatron.rollout.engines.sglang.requirements import nccl_settings, placement_problem
from bapo_megatron.rollout.engines.sglang.server_process import (
    ServerProcess,
    config_overrides,
    gpus_of,
    more_flags,
    server_command,
    server_environment,
    server_flags,
    sglang_python,
)
from bapo_megatron.runtime.device import set_default
from bapo_megatron.runtime.event_kinds import OnEvent

_HOST = "127.0.0.1"
_POLL_S = 1.0
_MAX_BACKOFF_S = 60.0
"""Largest restart backoff of a server in a crash loop, in seconds."""


class SglangBackend(EngineBackend):
    """``EngineBackend`` of SGLang: HTTP servers, started by the run or named in its recipe, and clients."""

    returns_routes = True

    def check(self, rollout: RolloutConfig, gpus: int = 0, training: int = 0) -> None:
        """Raise ConfigError if SGLang's installation, API keys or GPU placement is wrong."""
        if not rollout.sglang.urls:  # servers that run already may have their environment elsewhere
            sglang_python(rollout.sglang.python)
        check_keys_asked(rollout.sglang)
        if gpus and (problem := placement_problem(rollout, gpus, training)):
            raise ConfigError(problem)

    def prepare_process(self, rollout: RolloutConfig, cuda: bool) -> None:
        """For sync=broadcast on GPUs, set the servers' NCCL variables: they share a group with rank 0."""
        if cuda and rollout.sglang.sync == "broadcast":
            for name, value in nccl_settings(rollout.sglang.flags).items():
                set_default(name, value)

    def check_weights(self, hf_path: Path) -> None:
        """Raise ConfigError for folders that SGLang would load wrongly: fused experts of a family that stores
        them apart (it skips unknown names), quantized weights (bfloat16 updates do not fit its fp8 layers),
        extra files without an index (it loads all), hybrids with full attention not in every n-th layer."""
        from bapo_megatron.hf.config import read_model_shape
        from bapo_megatron.hf.families import FAMILIES
        from bapo_megatron.hf.fp8 import is_quantized
        from bapo_megatron.hf.reader import HfReader
        from bapo_megatron.hf.weight_files import INDEX, SINGLE, files_left_out

        config_overrides(hf_path)
        if (others := files_left_out(hf_path)) and not (hf_path / INDEX).exists():
            raise ConfigError(
                f"model.hf_path={hf_path} holds {SINGLE} and {', '.join(others[:5])} without {INDEX}: SGLang "
                f"would load all of them, one over the other; move what is not {SINGLE} to another folder"
            )
        if is_quantized(hf_path):
            raise ConfigError(
                f"model.hf_path={hf_path} is quantized: servers would load it into fp8 layers, which the "
                "weights of the policy, in bfloat16, do not fit; make a folder in bfloat16 of it, with "
                "bapo-ckpt to-megatron and to-hf"
            )
        alone = FAMILIES[read_model_shape(hf_path).family].experts == "apart"
        if alone and (fused := HfReader(hf_path).fused_experts):
            raise ConfigError(
                f"model.hf_path={hf_path} holds fused experts ({fused[0]}), which SGLang would leave random: "
                "write a tensor for each expert, with bapo-ckpt to-megatron and to-hf"
            )

    @contextmanager
    def serve(self, config: RunConfig, cuda: bool, on_event: OnEvent) -> Iterator[RunServers]:
        sglang = config.rollout.sglang
        if sglang.urls:
            yield RunServers([url.rstrip("/") for url in sglang.urls], [], on_event, config.paths.engines)
            return
        supervisors = [ServerSupervisor(config, number, cuda, on_event) for number in range(sglang.servers)]
        servers = RunServers([supervisor.url for supervisor in supervisors], supervisors, on_event)
        try:
            if not sglang.colocated:
                servers.start()
            yield servers
        finally:
            for supervisor in supervisors:
                supervisor.stop()

    def has_prefix_cache(self, rollout: RolloutConfig) -> bool:
        return "--disable-radix-cache" not in more_flags(rollout.sglang)

    def weight_digester(self, rollout: RolloutConfig, hf_path: Path, device: str) -> MakeDigester | None:
        """Return the factory of hashers in the layout of servers with the trainer's device type."""
        sglang = rollout.sglang
        if not sglang.compare_digests:
            return partial(UnknownDigests, "rollout.sglang.compare_digests is false")
        from bapo_megatron.rollout.engines.sglang.fused_weights import fused_digests

        return partial(fused_digests, hf_path, sglang.tensor, device, sglang.flags)

    async def open(
        self, config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
    ) -> list[Engine]:
        sglang, limits = config.rollout.sglang, limits_of(config.model.hf_path)
        sessions = HttpSessions()
        opened.push_async_callback(sessions.close)
        timeouts = EngineTimeouts(request_s=60 * sglang.request_minutes, update_s=60 * sglang.update_minutes)

        def server_at(url: str) -> SglangServer:
            look = partial(known_key, sglang, config.directory)
            is_own = not sglang.urls
            return SglangServer(url, sessions, Authorization(url, look, sglang.require_api_key, is_own))

        return [
            SglangEngine(server_at(url), limits, sglang.on_update, timeouts, sglang.tensor, sglang.sync)
            for url in urls
        ]


# --- the servers of a run ------------------------------------------------------------------------


class RunServers(EngineServers):
    """``EngineServers`` of SGLang: addresses, and a supervisor for each server that the run started. ``heed``
    reacts to reports of a hanging server; the other calls are for GPU hand-overs."""

    def __init__(
        self,
        urls: Sequence[str],
        supervisors: Sequence[ServerSupervisor],
        on_event: OnEvent,
        registry: Path | None = None,
    ) -> None:
        """``registry``: folder in which tasks of a Slurm job register servers."""
        self.urls = list(urls)
        self._registry = registry
        self._supervisors = {supervisor.url: supervisor for supervisor in supervisors}
        self.gpus = {supervisor.url: supervisor.gpus for supervisor in supervisors}
        self._on_event = on_event
        self._was_ready = False

    def heed(self, event: dict[str, Any]) -> None:
        """On ``engine_hangs`` restart the server or, if the run did not start it, report it and ask its Slurm
        task, if any, to do so. On ``engine_ready`` withdraw the request."""
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
        """Ask a Slurm task to restart the server (``keep_server`` in slurm/task.sh) by a file beside its
        registry entry; reason None withdraws the request. Returns whether a task was asked."""
        if self._registry is None:
            return False
        entry = self._registry / f"{urlsplit(url).netloc.replace(':', '-')}.json"
        asked = entry.with_suffix(".hang")
        try:
            if reason is None:
                asked.unlink(missing_ok=True)
            elif entry.is_file():
                asked.touch()
                return True
        except OSError as error:  # a failing disk must not end the run here
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
        """Start the servers that do not run; the first call waits until they are ready. Raises RuntimeError
        with the end of the log if one is not: a configuration error, most likely."""
        for supervisor in self._supervisors.values():
            supervisor.start()
        if not self._was_ready:
            for supervisor in self._supervisors.values():
                supervisor.wait_ready()
            self._was_ready = True


class ServerSupervisor:
    """Thread that keeps one server running: restarts it, at the same address, when it ends or ``restart``
    reports a hang. Runs until ``stop``. Initially and after ``hold`` it starts no server until ``start``."""

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
        self._log = config.paths.server_log(number)
        self._start_s = load_seconds(config.model.hf_path, 60 * sglang.start_minutes)
        self._on_event = on_event
        self._stopping = threading.Event()
        self._tried = threading.Event()
        """Set after a start attempt since the last ``start``."""
        self._may_start = threading.Event()
        self._starting = threading.Lock()
        self._server: ServerProcess | None = None
        self._refused = ""
        self._hang_reason: str | None = None
        self._can_hang = False
        """Whether silence means a hang: the server was ready once, or its start-up time has passed."""
        self._thread = threading.Thread(target=self._supervise, name=f"server-{number}", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start the server unless it runs, and resume restarts."""
        with self._starting:
            if not self._may_start.is_set():
                self._tried.clear()
                self._may_start.set()

    def hold(self) -> None:
        with self._starting:
            self._may_start.clear()

    @property
    def is_running(self) -> bool:
        return self._server is not None and self._server.process.poll() is None

    def end(self) -> None:
        """Kill the server and its children, and wait until they are gone. Unless held, it restarts."""
        with self._starting:  # waits for a start in progress, whose process would be missed
            server = self._server
        if server is not None:
            server.close()

    def wait_ready(self) -> None:
        """Wait until the server is ready. Raises RuntimeError with its log's end if it ends or is slow."""
        self._tried.wait()
        if self._server is None:
            raise RuntimeError(f"{self._command[0]} could not be started: {self._refused}")
        self._server.wait_ready(self._start_s)

    def restart(self, reason: str | None) -> None:
        """Request a restart of a hanging server; ignored while it starts. None withdraws the request."""
        self._hang_reason = reason if self._can_hang else None

    def stop(self) -> None:
        """End the server and the thread."""
        # In this order: the thread that `_may_start` wakes must see `_stopping`.
        self._stopping.set()
        self._may_start.set()
        self._thread.join()

    def _supervise(self) -> None:
        pause = _POLL_S
        while self._start_when_allowed():
            started = time.monotonic()
            if self._server is not None:
                self._watch(self._server)
            lived_s = time.monotonic() - started
            pause = _POLL_S if lived_s > 10 * pause else min(2 * pause, _MAX_BACKOFF_S)
            self._stopping.wait(pause)

    def _start_when_allowed(self) -> bool:
        """Wait until the server is not held and start it; returns False after ``stop``."""
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
        except OSError as error:  # out of memory or disk space: retried later
            self._server, self._refused = None, str(error)
            self._report("server_refused", reason=self._refused)
        self._tried.set()

    def _watch(self, server: ServerProcess) -> None:
        """Wait until the server ends, hangs or must stop; then kill it and its children."""
        self._can_hang, self._hang_reason = False, None
        while (
            (code := server.process.poll()) is None
            and not self._hang_reason
            and not self._stopping.wait(_POLL_S)
        ):
            has_had_its_time = time.monotonic() - server.began > self._start_s
            self._can_hang = self._can_hang or has_had_its_time or server.is_ready()
        self._can_hang = False
        if code is not None:
            self._report("server_ended", exit_code=code)
        elif self._hang_reason and not self._stopping.is_set():
            self._report("server_ended", reason=f"it hangs, and is restarted: {self._hang_reason}")
        server.stop()  # even after its end: its children may live

    def _report(self, kind: str, **fields: Any) -> None:
        try:
            self._on_event({"kind": kind, "server": self.url, **fields})
        except RunStopped as stopped:  # a full disk must not end the supervisor
            print(f"{kind} {self.url} {fields}: {stopped}", flush=True)
