"""Who started this process: nobody, torchrun, or srun."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bapo_megatron.errors import RunStopped
from bapo_megatron.runtime import distributed
from bapo_megatron.runtime.distributed import expand_nodes, free_port, gloo_interface, launched_world_size
from tests.support.forked_commands import run_python, start_bapo

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OTHERS = ("LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "PYTORCH_VERSION")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN, *OTHERS, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.setenv(name, "")  # so that it is restored, whatever the test does to it
        monkeypatch.delenv(name)


def set_all(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "PATH": "/nowhere",
}
"""Task 5 of 8 in a step on two nodes, in a container, which has no scontrol."""
TASK = ["5", "1", "8", "gpu07", "23456"]
"""What torchrun would have set there."""
GIVEN = ["3", "3", "4", "127.0.0.1", "29500"]
PYXIS = {**STEP, "PYTORCH_VERSION": "2.13", "RANK": "5", "LOCAL_RANK": "1"}
"""For images with a PYTORCH_VERSION, such as NVIDIA's, pyxis sets the rank alone."""


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("n1", "n1"),
        ("gpu[07-08]", "gpu07 gpu08"),
        ("gpu[8-10,12],login1", "gpu8 gpu9 gpu10 gpu12 login1"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("r[1-2]n[1-2],a,b3", "r1n1 r1n2 r2n1 r2n2 a b3"),
        ("x-y.z_1", "x-y.z_1"),
    ],
)
def test_lists_of_nodes(nodes: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's own command prints the same, where it is installed."""
    assert expand_nodes(nodes) == names.split()
    if shutil.which("scontrol"):
        (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=h\n")
        monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
        command = ["scontrol", "show", "hostnames", nodes]
        assert subprocess.run(command, capture_output=True, text=True).stdout.split() == names.split()


def test_a_free_port_is_none_that_an_outgoing_connection_can_be_given() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port() for _ in range(200)}
    assert all(1024 < port < first for port in ports)
    assert len(ports) > 180, "two programs that ask at the same time would be told the same"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (dict.fromkeys(TORCHRUN, ""), None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": ""}, None),  # a batch script
        ({**PYXIS, "SLURM_STEP_NUM_TASKS": "1"}, None),
        (dict(zip(TORCHRUN, GIVEN, strict=True)), GIVEN),
        (STEP, TASK),
        # Empty, as a script leaves it that exports what it does not know: it is not set.
        *(({**STEP, name: ""}, TASK) for name in (*TORCHRUN, "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")),
        ({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4444"}, [*TASK[:3], "10.0.0.1", "4444"]),
        (PYXIS, TASK),
    ],
)
def test_ranks_of_torchrun_and_srun(
    variables: dict[str, str], found: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, **variables)
    world = launched_world_size()
    assert (None if world is None else str(world)) == (
        found[2] if found else variables.get("WORLD_SIZE") or None
    )
    assert found is None or [os.environ[name] for name in TORCHRUN] == found


@pytest.mark.parametrize(
    ("tasks", "node", "local"),
    [("4(x2)", "1", "4"), ("4(x2),3", "2", "3"), ("1,7", "1", "7"), ("8", "0", "8")],
)
def test_srun_tells_the_ranks_of_this_node(
    monkeypatch: pytest.MonkeyPatch, tasks: str, node: str, local: str
) -> None:
    set_all(monkeypatch, **STEP, SLURM_STEP_TASKS_PER_NODE=tasks, SLURM_NODEID=node)
    launched_world_size()
    assert os.environ["LOCAL_WORLD_SIZE"] == local


RANKS = """
import os, signal, sys, time
from bapo_megatron.runtime.distributed import run_processes
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
def worker():
    os.write(1, f"{os.getpid()}\\n".encode())  # whole, also when both write at once
    time.sleep(1000)
run_processes(worker, (), 2)
"""


def test_ranks_end_with_the_command_also_where_ctrl_c_is_ignored() -> None:
    reading, writing = os.pipe()
    process = start_bapo("-c", RANKS, log=writing)
    os.close(writing)
    with open(reading) as output:
        ranks = [psutil.Process(int(output.readline())) for _ in range(2)]
        process.kill()
    try:
        psutil.wait_procs(ranks, timeout=60)
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


WHY = """
import os, time
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.distributed import run_processes
def worker():
    if os.environ["RANK"] == "1":
        raise RuntimeError("Connection closed by peer")
    time.sleep(2)
    raise ConfigError("a field is wrong")
run_processes(worker, (), 2)
"""


def test_the_exit_code_with_a_reason_wins_though_another_rank_fails_first() -> None:
    code, output = run_python(WHY)
    assert code == 2
    assert output.splitlines()[-1] == "error: a field is wrong"


ROUTES = {"gpu07": "10.1.0.7", "gpu08": "10.1.0.8", "self": "127.0.1.1"}
"""This node's address on the way to each host."""


ON_TWO_NODES = {
    **STEP,
    "SLURM_STEP_NUM_NODES": "2",
    "SLURMD_NODENAME": "gpu07",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "gpu07",
}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "ib0"),  # the network that leads to the first node
        ({"MASTER_ADDR": "self"}, "ib1"),  # on that node: the way to gpu08, the other one of the step
        ({"MASTER_ADDR": "self", "SLURM_STEP_NODELIST": "unlike"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, None),  # the user's choice
        ({"SLURM_STEP_NUM_NODES": "1"}, None),
        ({"SLURM_STEP_NUM_NODES": "1", "LOCAL_WORLD_SIZE": "4"}, "ib0"),  # torchrun on two nodes
    ],
)
def test_gloo_takes_the_network_that_leads_to_the_other_nodes(
    changes: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, **{**ON_TWO_NODES, **changes})
    addresses = {"eth0": "192.168.0.7", "ib0": "10.1.0.7", "ib1": "10.1.0.8", "lo": "127.0.0.1"}
    other = SimpleNamespace(family=socket.AF_INET6, address="::1")
    cards = {n: [other, SimpleNamespace(family=socket.AF_INET, address=a)] for n, a in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(distributed, "_address_towards", ROUTES.get)
    assert gloo_interface() == found


def test_the_kernel_says_which_address_leads_to_a_host() -> None:
    assert distributed._address_towards("127.0.0.1") == "127.0.0.1"
    assert distributed._interface_of("127.0.0.1") == "lo"
    assert distributed._address_towards("no.such.host.invalid") is None
    assert distributed._interface_of("203.0.113.9") is None


def test_an_error_of_all_ranks_takes_groups_of_nccl_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order: a peer that raises it as well waits for no other. One of this rank alone is tested below."""
    done: list[str] = []
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_args, **_named: None)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(distributed, "skip_teardown", lambda: done.append("at once"))
    with pytest.raises(RunStopped, match="all ranks"), distributed.process_group("cpu:gloo,cuda:nccl", 1):
        raise RunStopped("all ranks raise it")
    assert done == ["destroyed"]


MANY_GROUPS = """
import gc
import resource
import torch.distributed as dist
from bapo_megatron.runtime.distributed import process_group, run_processes
from bapo_megatron.runtime.garbage import collect_rarely

def worker():
    usual = gc.get_threshold()
    collect_rarely()  # as a command
    with process_group("gloo", 1):
        assert gc.get_threshold() == usual, "a rank collects as often as ever"
        assert gc.get_freeze_count(), "but not its imports"
        for _ in range(30):
            dist.new_group([0, 1])
        dist.barrier()

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (120, hard))
run_processes(worker, (), 2)
"""


@pytest.mark.integration
def test_ranks_may_open_more_files_than_a_login_shell() -> None:
    """Thirty groups of two take gloo 150 descriptors; the groups of a rank among 128 take 600."""
    code, output = run_python(MANY_GROUPS)
    assert code == 0, output


FAILING_RANK = """
import atexit
import torch.distributed as dist
from bapo_megatron import cli
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.runtime.distributed import process_group

dist.init_process_group = lambda *_args, **_named: None
dist.get_world_size = lambda: 2
dist.destroy_process_group = lambda: print("waits for its peers")
atexit.register(print, "waits for its peers")  # as the end of a group of NCCL

def run(_arguments):
    with process_group("cpu:gloo,cuda:nccl", 1):
        raise {error}

cli.run = run
cli.main()
"""


@pytest.mark.integration
@pytest.mark.parametrize("error", ["RuntimeError('no memory left')", "ConfigError('no memory left')"])
def test_a_failing_rank_reports_its_error_and_exits(error: str) -> None:
    code, output = run_python(FAILING_RANK.replace("{error}", error))
    assert code == 1
    assert "no memory left" in output
    assert "waits" not in output
