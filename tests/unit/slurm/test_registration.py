"""`task.sh rollout`: a server is registered as ready once it takes the run's key, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from bapo_megatron.rollout.engines.sglang_launch.api_key import make_key_file, read_key_file
from tests.support.executables import executable
from tests.unit.slurm.conftest import SLURM, program

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
THIEF = """
import http.server, sys
class Thief(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Thief).serve_forever()
"""


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``task(interpreter)`` starts the servers of a node with that interpreter; its output is in the file."""
    started: list[subprocess.Popen[bytes]] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def start(interpreter: str) -> Path:
        run, log = tmp_path / "run", tmp_path / "log"
        (run / "logs").mkdir(parents=True)
        job = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURMD_NODENAME": "localhost", "BAPO_RESTART": "0"}
        bapo = {"BAPO_RUN": run, "BAPO_LOGS": run / "logs", "BAPO_ROOT": ROOT, "BAPO_SLURM": SLURM}
        environment = {
            **os.environ,
            **job,
            **{name: str(value) for name, value in bapo.items()},
            "BAPO_LIB": str(SLURM / "lib"),
            "BAPO_PYTHON": interpreter,
            "BAPO_FIRST_PORT": str(port),
            "REAL_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        }
        with log.open("wb") as output:
            command = ["bash", str(SLURM / "task.sh"), "rollout", "recipe.py"]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        started.append(process)
        return log

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def interpreter(folder: Path, instead: str, python: str = "$REAL_PYTHON") -> str:
    """A Python that does something else, or first, where a server is to be started."""
    text = f'[ "$2" != bapo_megatron.cli ] || {instead}\nexec "{python}" "$@"'
    return str(executable(folder / "python", text))


def until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def state_of(tmp_path: Path) -> str:
    return "".join(path.read_text() for path in tmp_path.glob("run/engines/*.json"))


def events_of(tmp_path: Path) -> str:
    return "".join(path.read_text() for path in tmp_path.glob("run/events.jsonl"))


def test_a_server_that_hangs_is_ended_and_started_again(task: Callable[[str], Path], tmp_path: Path) -> None:
    """By a file of the trainer: the node's task alone sees the process, and not that it does nothing."""
    log = task(str(ROOT / "tests/slurm/bin/python-stand-in"))
    until(lambda: '"state": "ready"' in state_of(tmp_path), log)
    assert '"url": "http://localhost:' in state_of(tmp_path)
    assert read_key_file(tmp_path / "run/api_key").value not in state_of(tmp_path) + log.read_text()
    (entry,) = tmp_path.glob("run/engines/*.json")
    entry.with_suffix(".hang").touch()
    until(lambda: "server_ended" in events_of(tmp_path), log)
    until(lambda: '"state": "ready"' in state_of(tmp_path), log)
    assert not entry.with_suffix(".hang").exists()


def test_a_server_that_hangs_before_it_is_ready_is_ended(task: Callable[[str], Path], tmp_path: Path) -> None:
    """With what it has started: a scheduler that still imports would keep its GPU."""
    started = tmp_path / "started"
    hangs = f"exec env BAPO_SERVER_START_S=1 sh -c 'sleep 1000 & echo $! >>{started}; wait'"
    log = task(interpreter(tmp_path, hangs))
    until(lambda: events_of(tmp_path).count("server_ended") == 2, log)
    assert "was not ready in 1 s" in log.read_text()
    until(lambda: not psutil.pid_exists(int(started.read_text().split()[0])), log)
    assert '"state": "ready"' not in state_of(tmp_path)


def test_a_server_with_a_key_of_its_own_is_registered(task: Callable[[str], Path], tmp_path: Path) -> None:
    """The recipe names its file; the job does not read the recipe."""
    key = f"export BAPO_SGLANG_API_KEY_FILE={tmp_path}/key"
    log = task(interpreter(tmp_path, key, f"{ROOT}/tests/slurm/bin/python-stand-in"))
    until(lambda: '"state": "ready"' in state_of(tmp_path), log)
    assert not (tmp_path / "run/api_key").exists()


def test_another_program_on_the_port_is_not_registered(task: Callable[[str], Path], tmp_path: Path) -> None:
    """The other program answers every request, with and without a key, while the job's own server runs."""
    (tmp_path / "thief.py").write_text(THIEF)
    (tmp_path / "run").mkdir()
    make_key_file(tmp_path / "run/api_key")
    log = task(interpreter(tmp_path, f'exec "$REAL_PYTHON" {tmp_path}/thief.py "$@"'))
    until(lambda: "http://127.0.0.1" in log.read_text() and ": asks for no key" in log.read_text(), log)
    assert '"state": "starting"' in state_of(tmp_path)


@pytest.fixture
def addresses() -> ModuleType:
    return program("node_address")


ROUTES = {
    "first": ("10.1.0.7", "10.1.0.1"),
    "login": ("192.168.0.7", "192.168.0.1"),
    "self": 2 * ("127.0.1.1",),
}
ROUTES["here"] = ("10.1.0.7", "10.1.0.7")
"""This node's address on the way to each machine, and that of the other end."""


@pytest.mark.parametrize(
    ("own", "others", "address"),
    [
        ("192.168.0.7", ["first", "login"], "192.168.0.7"),
        ("127.0.1.1", ["first", "login"], "10.1.0.7"),
        ("127.0.1.1", ["self", "login"], "192.168.0.7"),  # the only node of its job
        ("127.0.1.1", ["self", "unknown"], "127.0.1.1"),
        ("127.0.1.1", ["self", "here"], "127.0.1.1"),  # one machine is all nodes, and the login node
    ],
)
def test_the_address_of_a_node(
    addresses: ModuleType, own: str, others: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of the host name; an external address if the name resolves to loopback."""

    class Probe(socket.socket):
        ends = ("", "")

        def connect(self, place: tuple[str, int]) -> None:  # type: ignore[override]
            if place[0] not in ROUTES:
                raise OSError("no route")
            self.ends = ROUTES[place[0]]

        def getsockname(self) -> tuple[str, int]:
            return self.ends[0], 1

        def getpeername(self) -> tuple[str, int]:
            return self.ends[1], 9

    monkeypatch.setattr(addresses.socket, "socket", Probe)
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (own, 0))])
    assert addresses.node_address("n1", others) == address


def test_the_only_node_of_a_job_asks_the_way_to_the_login_node(
    addresses: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(addresses, "node_address", lambda name, others: " ".join([name, *others]))
    monkeypatch.setattr(sys, "argv", ["node_address.py", "n1"])
    monkeypatch.setenv("SLURM_SUBMIT_HOST", "login")
    monkeypatch.setenv("MASTER_ADDR", "n1")
    addresses.main()
    assert capsys.readouterr().out == "n1 n1 login\n"
