"""torch.distributed set-up: joining the ranks of torchrun or srun, or starting the ranks of one machine."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from bapo_megatron.errors import ConfigError, Preempted, RunStopped, StorageFailed
from bapo_megatron.runtime.exit_codes import (
    end_with,
    is_known_to_all,
    leave,
    leave_at_once,
    must_leave_at_once,
)
from bapo_megatron.runtime.out_of_memory import death
from bapo_megatron.runtime.processes import die_with_parent
from bapo_megatron.runtime.stop_signals import SIGNALS, handling

T = TypeVar("T")

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LISTENERS_PORTS = range(10_000, 25_000)
_RANDOM = random.SystemRandom()
"""Not the seeded one: forked processes, and runs of one seed, would all try the same ports."""
_GRACE_S = 10.0
"""For the other ranks to say why, once one of them has failed."""


def launched_world_size() -> int | None:
    """Number of processes that torchrun or srun has started for this run; None outside a launcher.

    Under srun the variables of torchrun are filled in from Slurm's, those that are not set. A step of one
    task (the shell of an interactive job) is no launcher, and neither is a batch script, which has a
    SLURM_PROCID but no step.
    """
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        for name, value in _from_slurm().items():
            os.environ.setdefault(name, value)
    if "RANK" not in os.environ:
        return None
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"RANK is set but {', '.join(missing)} is not: start the run with torchrun or srun")
    return int(os.environ["WORLD_SIZE"])


def _from_slurm() -> dict[str, str]:
    """torchrun's variables for this task of an srun step; the first node of the step is the meeting point."""
    try:
        nodes = _nodes_of_step()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"scontrol show hostnames failed ({error}): set RANK and MASTER_ADDR") from error
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE")
    local = _tasks_of_node(tasks, int(os.environ.get("SLURM_NODEID", "0"))) if tasks else None
    return {
        **({} if local is None else {"LOCAL_WORLD_SIZE": str(local)}),
        "RANK": os.environ["SLURM_PROCID"],
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": nodes[0],
        # Jobs that share a node must not meet at one port.
        "MASTER_PORT": str(20000 + int(os.environ["SLURM_JOB_ID"]) % 10000),
    }


def _tasks_of_node(tasks: str, node: int) -> int | None:
    """The tasks of a step on its ``node``-th node; ``tasks`` is Slurm's list, such as ``4(x2),3``."""
    counts: list[int] = []
    for entry in tasks.split(","):
        count, _, times = entry.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[node] if node < len(counts) else None


def _nodes_of_step() -> list[str]:
    """Names of the nodes of this Slurm step."""
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def run_processes(
    worker: Callable[..., None],
    args: tuple[Any, ...],
    world_size: int,
    apart: bool = False,
    heeding: bool = False,
) -> None:
    """Run ``worker(*args)`` in ``world_size`` processes that can find each other; raise if one fails.

    One process is this one, unless it must stay ``apart``: a process that has run a model keeps threads
    that a later fork would lose, and memory of its GPU. More are forked on a CPU (imports are shared) and
    spawned with CUDA, whose context does not survive a fork. The first failure ends the others.
    ``heeding``: a worker that has begun heeds signals to stop, so a rank that one of them ends was still
    starting.
    """
    environment = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if world_size == 1 and not apart:
        os.environ.update(environment, RANK="0", LOCAL_RANK="0")
        worker(*args)
        return
    method = "spawn" if torch.version.cuda and torch.cuda.is_available() else "fork"
    started = start_processes(
        _entry, (worker, args, environment), world_size, join=False, start_method=method
    )
    try:
        with handling(partial(_forward, started.processes)):
            while not started.join(grace_period=_GRACE_S):
                pass
    except (ProcessExitedException, ProcessRaisedException) as failure:
        # A rank that falls over the end of another may be seen first: the one that knows why counts.
        if known := {process.exitcode for process in started.processes} & {2, 3, 4}:
            sys.exit(min(known))
        if isinstance(failure, ProcessRaisedException):
            raise
        if failure.exit_code >= 0:
            sys.exit(failure.exit_code)  # it has said why
        if heeding and -failure.exit_code in SIGNALS:
            print("stopped: told to stop before the run began", file=sys.stderr, flush=True)
            sys.exit(85)
        print(
            f"error: rank {failure.error_index} was {death(failure.exit_code)}", file=sys.stderr, flush=True
        )
        sys.exit(128 - failure.exit_code)  # as a shell counts
    finally:
        _terminate(started.processes)


def _entry(
    rank: int, worker: Callable[..., None], args: tuple[Any, ...], environment: dict[str, str]
) -> None:
    die_with_parent()  # torch asks for SIGINT, which a command started by nohup ignores
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(environment["WORLD_SIZE"])))
    try:
        worker(*args)
    except (ConfigError, Preempted, RunStopped) as error:
        leave(end_with(error, say=rank == 0 or not is_known_to_all(error)))
    except (Exception, KeyboardInterrupt):
        if must_leave_at_once():
            traceback.print_exc()
            leave(1)
        raise


def _forward(processes: Sequence[BaseProcess], number: int, _frame: FrameType | None) -> None:
    """Forward a signal that asks a run to stop to its ranks."""
    for process in processes:
        if process.is_alive() and process.pid:
            os.kill(process.pid, number)


def _terminate(processes: Sequence[BaseProcess]) -> None:
    """Terminate the ranks that still run; kill those that have not ended after ten seconds."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(timeout=10)
        process.kill()


@contextmanager
def process_group(backend: str, timeout_minutes: float) -> Iterator[None]:
    """The default process group of torch.distributed within the block, from environment variables.

    An error of this rank alone leaves groups of NCCL as they are: the process says it and ends at once, and
    the launcher ends the others.
    """
    if interface := gloo_interface():
        os.environ.setdefault(_GLOO_INTERFACE, interface)
    timeout = timedelta(minutes=timeout_minutes)
    if _meets_on_loopback():
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = bound_store(address, port, world, timeout) if rank == 0 else None
        store = store or TCPStore(address, port, world, False, timeout, wait_for_workers=False)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    try:
        yield
    except BaseException as error:
        # NCCL takes a group down when its work is done, and peers that know of no error do their part never.
        if "nccl" in backend and dist.get_world_size() > 1 and not is_known_to_all(error):
            leave_at_once()
        else:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def bound_store(address: str, port: int, world_size: int | None, timeout: timedelta) -> TCPStore:
    """A TCPStore server that listens on ``address`` alone; by itself torch listens on every interface.

    A name that leads to this machine's loopback address, as its own name does on many a cluster, is left to
    torch: other machines would not reach it. ``port`` 0: a free one. RuntimeError if it cannot listen.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        is_loopback = str(place[0]).startswith("127.") or place[0] == "::1"
        if is_loopback and address not in _LOOPBACK:
            return TCPStore(address, port, world_size, True, timeout, wait_for_workers=False)
        listener = socket.create_server(place[:2], family=family, backlog=4096)
    except OSError as error:
        raise RuntimeError(f"cannot listen at {address}:{port}: {error}") from error
    bound, descriptor = int(listener.getsockname()[1]), listener.detach()  # torch closes it
    return TCPStore(
        address,
        bound,
        world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def _meets_on_loopback() -> bool:
    """Whether all ranks are on this machine, and no launcher has made the store already."""
    return os.environ.get("MASTER_ADDR") in _LOOPBACK and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ


def gloo_interface() -> str | None:
    """The network interface by which this node reaches the run's other nodes; None if nothing is to be set.

    gloo takes the one that this machine's own name leads to, on many a cluster 127.0.1.1 or a slow network.
    The kernel is asked which address it would use on the way to MASTER_ADDR, and from there, whose own name
    may lead to itself, to another node of the Slurm step. None on one node, or where only loopback is found.
    """
    if os.environ.get(_GLOO_INTERFACE) or not _has_several_nodes():
        return None
    for host in (os.environ.get("MASTER_ADDR", ""), *_other_nodes()):
        if (address := _address_towards(host)) and not address.startswith("127."):
            return _interface_of(address)
    return None


def _has_several_nodes() -> bool:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun
        return world > int(os.environ["LOCAL_WORLD_SIZE"])
    return world > 1 and int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) > 1


def _other_nodes() -> list[str]:
    """Names of the other nodes of this Slurm step; none outside Slurm, or in a container without scontrol."""
    with suppress(OSError, subprocess.CalledProcessError, KeyError):
        return [node for node in _nodes_of_step() if node != os.environ.get("SLURMD_NODENAME")]
    return []


def _address_towards(host: str) -> str | None:
    """This machine's IPv4 address on the way to ``host``. Connecting a UDP socket sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def _interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return str(name)
    return None


def is_main() -> bool:
    """Whether this is rank 0."""
    return dist.get_rank() == 0


def broadcast_from_main(value: T | None) -> T:
    """Rank 0's ``value`` on every rank. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]  # type: ignore[return-value]


def all_gather(value: T) -> list[T]:
    """Every rank's ``value`` in rank order, on every rank. Collective."""
    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, value)
    return boxes


def barrier() -> None:
    """Wait until every rank has come here. Collective."""
    all_gather(None)


def on_all_ranks(call: Callable[[], T]) -> list[T]:
    """The results of ``call`` on all ranks, on every rank. Collective.

    If it fails on one of them all raise: that one its own error, the others one that names the rank.
    """
    result, failure, own = None, None, None
    try:
        result = call()
    except Exception as error:  # the other ranks wait for this one
        kind = next((kind for kind in (ConfigError, StorageFailed) if isinstance(error, kind)), RunStopped)
        own, failure = error, (kind, str(error) or repr(error))
    outcomes = all_gather((result, failure))
    if own is not None:
        raise own
    for rank, (_, told) in enumerate(outcomes):
        if told is not None:
            raise told[0](f"rank {rank}: {told[1]}")
    return [one for one, _ in outcomes]  # type: ignore[misc]


def gather(value: T) -> list[T]:
    """Every rank's ``value`` in rank order, on rank 0; nothing elsewhere. Collective."""
    boxes: list[Any] | None = [None] * dist.get_world_size() if is_main() else None
    dist.gather_object(value, boxes)
    return boxes or []


def free_port() -> int:
    """A TCP port that nobody uses now, and that no outgoing connection is given before its taker listens.

    The kernel takes the ports of outgoing connections from 32768 on (ip_local_port_range). OSError if none is
    found.
    """
    for port in _RANDOM.sample(_LISTENERS_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free TCP port between {_LISTENERS_PORTS.start} and {_LISTENERS_PORTS.stop}")
