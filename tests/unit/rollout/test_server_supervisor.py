"""Server supervisors: restart of servers that end, hang or fail to start; hold; flags and environment."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.request import proxy_bypass

import pytest

from bapo_megatron.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, SglangConfig
from bapo_megatron.errors import RunStopped
from bapo_megatron.rollout.engines import pool_state
from bapo_megatron.rollout.engines.sglang import backend as servers
from bapo_megatron.rollout.engines.sglang import server_process as process
from bapo_megatron.rollout.engines.sglang.backend import RunServers, ServerSupervisor, SglangBackend
from bapo_megatron.runtime.run_paths import RunPaths

READY = """
import http.server, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(servers, "_POLL_S", 0.1)

    def command(python: Path, hf_path: Path, host: str, port: int, *_: Any) -> list[str]:
        return [sys.executable, "-c", READY, str(port)]

    monkeypatch.setattr(servers, "server_command", command)
    return with_sglang(RunConfig("x", ModelConfig(Path("m")), DataConfig(Path("d")), run_dir=tmp_path))


def with_sglang(config: RunConfig, **sglang: Any) -> RunConfig:
    servers = SglangConfig(python=Path(sys.executable), **sglang)
    return dataclasses.replace(config, rollout=RolloutConfig(engine="sglang", sglang=servers))


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def supervisor(config: RunConfig, events: list[dict[str, Any]]) -> Iterator[ServerSupervisor]:
    made = ServerSupervisor(config, 0, False, events.append)
    made.start()
    made.wait_ready()
    yield made
    made.stop()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pid_of(supervisor: ServerSupervisor) -> int:
    assert supervisor._server is not None
    return supervisor._server.process.pid


def test_a_hanging_server_is_killed_and_restarted(
    supervisor: ServerSupervisor, events: list[dict[str, Any]]
) -> None:
    """The server is stopped (SIGSTOP), so that SIGTERM does not end it."""
    run_servers = RunServers([supervisor.url], [supervisor], events.append)
    first = pid_of(supervisor)
    until(lambda: supervisor._can_hang)
    os.killpg(first, signal.SIGSTOP)
    run_servers.heed({"kind": "engine_hangs", "engine": supervisor.url, "reason": "not done in 600 s"})
    until(lambda: pid_of(supervisor) != first)
    supervisor.wait_ready()
    with pytest.raises(ProcessLookupError):
        os.killpg(first, 0)
    (event,) = events
    assert event["server"] == supervisor.url
    assert "not done in 600 s" in event["reason"]


def test_a_server_that_has_recovered_is_not_restarted(
    supervisor: ServerSupervisor, events: list[dict[str, Any]]
) -> None:
    run_servers = RunServers([supervisor.url], [supervisor], events.append)
    until(lambda: supervisor._can_hang)
    for kind in ("engine_hangs", "engine_ready"):
        run_servers.heed({"kind": kind, "engine": supervisor.url, "reason": "slow"})
    first = pid_of(supervisor)
    time.sleep(0.5)
    assert pid_of(supervisor) == first
    assert events == []


def test_a_starting_server_does_not_count_as_hanging(
    config: RunConfig, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a model takes minutes without an answer, which the sampler may report as a hang."""
    monkeypatch.setattr(
        servers, "server_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    monkeypatch.setattr(servers, "load_seconds", lambda _folder, base_s: base_s + 7)  # to read the weights
    supervisor = ServerSupervisor(config, 0, False, events.append)
    supervisor.start()
    until(lambda: supervisor.is_running)
    first = pid_of(supervisor)
    time.sleep(0.5)
    supervisor.restart("no answer for 120 s")
    time.sleep(0.5)
    assert pid_of(supervisor) == first
    assert supervisor._start_s == 60 * config.rollout.sglang.start_minutes + 7
    supervisor._start_s = 0.0  # now it has had its time
    until(lambda: supervisor._can_hang)
    supervisor.restart("no answer for 900 s")
    until(lambda: pid_of(supervisor) != first)
    supervisor.stop()


def test_the_time_of_a_start_runs_while_another_server_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose time is over is asked again for a while: it may have been too busy for one answer."""
    command, url = [sys.executable, "-c", "import time; time.sleep(600)"], "http://127.0.0.1:9"
    server = process.ServerProcess(command, os.environ, url, tmp_path / "log")
    answers = [True, False, False]
    monkeypatch.setattr(server, "is_ready", answers.pop)
    server.began -= 100
    server.wait_ready(50.0)
    assert answers == []
    asked: list[str] = []
    monkeypatch.setattr(server, "is_ready", lambda: asked.append("ready?"))
    monkeypatch.setattr(process, "_LEAST_WAIT_S", 0.0)
    with pytest.raises(RuntimeError, match=r"was not ready in \d{3} s"):
        server.wait_ready(50.0)
    assert len(asked) == 1


def test_a_failed_start_is_retried(
    supervisor: ServerSupervisor, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for a process, twice; the log of events is full as well, once."""
    first, refusals = pid_of(supervisor), 2

    class Refused(process.ServerProcess):
        def __init__(self, *arguments: Any) -> None:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise OSError(12, "Cannot allocate memory")
            super().__init__(*arguments)

    def take_note(event: dict[str, Any]) -> None:
        if not events:
            events.append({})
            raise RunStopped("a line could not be written")
        events.append(event)

    monkeypatch.setattr(servers, "ServerProcess", Refused)
    monkeypatch.setattr(supervisor, "_on_event", take_note)
    os.killpg(first, signal.SIGKILL)
    until(lambda: refusals == 0 and supervisor._server is not None and pid_of(supervisor) != first)
    supervisor.wait_ready()
    assert [event.get("kind") for event in events] == [None, "server_refused", "server_refused"]
    assert "Cannot allocate memory" in events[1]["reason"]


def test_a_held_server_that_ends_is_not_restarted_until_start(
    supervisor: ServerSupervisor, events: list[dict[str, Any]]
) -> None:
    """The policy has its GPU meanwhile. The other servers sleep."""
    run_servers = RunServers([supervisor.url], [supervisor], events.append)
    first = pid_of(supervisor)
    run_servers.hold()
    run_servers.end(spared=[supervisor.url])
    assert run_servers.running() == [supervisor.url]
    assert pid_of(supervisor) == first
    run_servers.end()
    assert run_servers.running() == []
    until(lambda: any(event["kind"] == "server_ended" for event in events))
    time.sleep(1.0)  # ten times the pause before it would be started again
    assert run_servers.running() == []
    run_servers.start()
    until(lambda: run_servers.running() == [supervisor.url])
    assert pid_of(supervisor) != first
    run_servers.hold()
    supervisor.stop()  # a run can stop meanwhile
    assert not supervisor.is_running


def test_colocated_servers_start_only_on_demand(config: RunConfig, events: list[dict[str, Any]]) -> None:
    with SglangBackend().serve(with_sglang(config, colocated=True), False, events.append) as found:
        assert found.running() == []
        found.start()
        assert found.running() == found.urls
    assert found.running() == []


def test_a_hanging_server_that_the_run_has_not_started_is_reported(
    config: RunConfig, events: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """And its job's task is told, if it has one."""
    registry, url = RunPaths(config.directory).engines, "http://node7:30000"
    hangs = {"kind": "engine_hangs", "engine": url, "reason": "not done in 600 s"}
    ready = {"kind": "engine_ready", "engine": url}
    config = with_sglang(config, urls=(f"{url}/",))
    with SglangBackend().serve(config, False, events.append) as found:
        assert found.urls == [url]
        found.heed(hangs)
        found.heed(ready)
        (event,) = events
        assert event["kind"] == "server_hangs"
        assert "end it, and start it again" in event["advice"]
        assert f"{url} hangs (not done in 600 s)" in capsys.readouterr().out
    registry.mkdir(parents=True)
    (registry / "node7-30000.json").touch()
    with SglangBackend().serve(config, False, events.append) as found:
        found.heed(hangs)
        assert "starts it again" in events[-1]["advice"]
        assert (registry / "node7-30000.hang").is_file()
        found.heed(ready)
        assert [path.name for path in registry.iterdir()] == ["node7-30000.json"]


def test_a_server_inherits_no_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's variables would make it join the trainer's store; its own settings stay."""
    names = "RANK WORLD_SIZE MASTER_ADDR PET_NPROC_PER_NODE TORCHELASTIC_USE_AGENT_STORE PYTHONPATH"
    launcher = dict.fromkeys([*names.split(), "SGLANG_RETURN_ORIGINAL_LOGPROB"], "1")
    launcher["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    own = {"NCCL_IB_HCA": "mlx5", "CUDA_VISIBLE_DEVICES": "0,1", "SGLANG_PORT": "1"}
    for name, value in {**launcher, **own}.items():
        monkeypatch.setenv(name, value)
    environment = process.server_environment(cuda=True)
    assert not launcher.keys() & environment.keys()
    assert own.items() <= environment.items()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:256")
    assert process.server_environment(cuda=True)["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:256"


@pytest.mark.parametrize("excluded", ["", ".corp", "*"])
@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_a_server_reaches_itself_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch, name: str, excluded: str
) -> None:
    """Its first requests go to its own address by ``requests``; it ends if they do not arrive. `*` is all
    addresses where it stands alone; in a list it is the name of a host."""
    for one in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(one, raising=False)
        monkeypatch.delenv(one.upper(), raising=False)
    assert not {"no_proxy", "NO_PROXY"} & process.server_environment(cuda=True).keys()
    monkeypatch.setenv("NO_PROXY", excluded)
    monkeypatch.setenv(name, "http://proxy.corp:3128")
    found = process.server_environment(cuda=True, host="node1.corp2")
    assert found[name] == "http://proxy.corp:3128", "downloads need it"
    monkeypatch.setattr(os, "environ", found)
    for host in ("127.0.0.1", "localhost", "::1", "node1.corp2"):
        assert proxy_bypass(host), host
        assert excluded == "*" or host in found["no_proxy"].split(","), "requests compares with whole items"
    assert bool(proxy_bypass("hub.corp")) == bool(excluded)
    assert bool(proxy_bypass("huggingface.co")) == (excluded == "*")


def test_colocated_servers_release_cuda_graph_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable SGLang accepts the tag, but keeps the memory."""
    graphs = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    monkeypatch.delenv(graphs, raising=False)
    assert process.server_environment(cuda=True, colocated=True)[graphs] == "1"
    assert graphs not in process.server_environment(cuda=True)
    monkeypatch.setenv(graphs, "0")  # asked for by the user
    assert process.server_environment(cuda=True, colocated=True)[graphs] == "0"


def test_prefill_cuda_graphs_are_off_unless_the_recipe_sets_them(config: RunConfig) -> None:
    name = "--cuda-graph-backend-prefill"
    recipes = {(): [name, "disabled"], (name, "full"): [name, "full"], (f"{name}=full",): []}
    for own, expected in recipes.items():
        found = process.server_flags(with_sglang(config, flags=own))
        assert [flag for flag in found if flag in (name, "full", "disabled")] == expected
    assert name not in process.server_flags(with_sglang(config), cuda=False)


def test_a_server_that_waits_in_place_outlives_the_longest_load(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that waits in place counts as one that hangs: SGLang ends the server after 300 s."""
    monkeypatch.setattr(pool_state, "LEAST_BYTES_PER_S", 1.0)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    name = "--watchdog-timeout"

    def limit(on_update: Literal["retract", "in_place"], *own: str) -> list[str]:
        asked = with_sglang(config, on_update=on_update, update_minutes=5.0, flags=own)
        found = process.server_flags(dataclasses.replace(asked, model=ModelConfig(tmp_path)))
        return [value for flag, value in zip(found, [*found[1:], ""], strict=True) if flag == name]

    assert limit("retract") == []
    (longest,) = limit("in_place")
    assert float(longest) > pool_state.load_seconds(tmp_path, 5 * 60.0) > 1000
    assert limit("in_place", name, "900") == ["900"]
