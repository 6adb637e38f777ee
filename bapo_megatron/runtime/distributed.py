"""torch.distributed: ranks from torchrun, srun or this process; process groups; object collectives.

A command calls ``launched_world_size``; if it returns None, there is no launcher and the command starts the
ranks by ``run_processes``. Each rank then enters ``process_group``. The object collectives
(``broadcast_from_main``, ``all_gather``, ``on_all_ranks``, ...) pickle their values and block; all ranks must
call them in the same order.
"""

from __future__ import annotations

import os
import random
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import product
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from bapo_megatron.errors import ConfigError, Preempted, RunStopped, StorageFailed
from bapo_megatron.runtime.device import environment_variable, set_default, silence_libraries
from bapo_megatron.runtime.exit_codes import (
    SIGNALS,
    exit_process,
    handling,
    is_raised_on_all_ranks,
    report_error,
    skip_teardown,
    skips_teardown,
)
from bapo_megatron.runtime.garbage import keep_imports
from bapo_megatron.runtime.guards import death
from bapo_megatron.runtime.http import LOOPBACK
from bapo_megatron.runtime.processes import allow_open_files, die_with_parent
from bapo_megatron.runtime.storage import comes_of_failing_disk

T = TypeVar("T")

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LISTENERS_PORTS = range(10_000, 25_000)
_RANDOM = random.SystemRandom()
"""Unseeded: forked processes and runs with equal seeds would try the same ports."""
_GRACE_S = 10.0
"""Seconds for other ranks to report their reasons after one has failed."""


def launched_world_size() -> int | None:
    """Return the world size under a launcher, torchrun or srun; None without one.

    Under srun, sets missing torchrun variables from Slurm's. A step of one task (an interactive shell) is no
    launcher, and neither is a batch script, which has a SLURM_PROCID but no step. Raises ConfigError if RANK
    and WORLD_SIZE are set and torchrun's other variables are not.
    """
    # pyxis sets RANK alone, for images with PYTORCH_VERSION.
    has_rank = None not in (environment_variable("RANK"), environment_variable("WORLD_SIZE"))
    if not has_rank and int(environment_variable("SLURM_STEP_NUM_TASKS") or 1) > 1:
        for name, value in _from_slurm().items():
            os.environ[name] = environment_variable(name) or value
        has_rank = True
    if not has_rank:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if environment_variable(name) is None]
    if missing:
        raise ConfigError(f"RANK is set but {', '.join(missing)} is not: start the run with torchrun or srun")
    return int(os.environ["WORLD_SIZE"])


def _from_slurm() -> dict[str, str]:
    """Return torchrun's variables for this task of an srun step; MASTER_ADDR is the step's first node."""
    tasks = environment_variable("SLURM_STEP_TASKS_PER_NODE")
    local = _tasks_of_node(tasks, int(environment_variable("SLURM_NODEID") or 0)) if tasks else None
    return {
        **({} if local is None else {"LOCAL_WORLD_SIZE": str(local)}),
        "RANK": os.environ["SLURM_PROCID"],
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": _nodes_of_step()[0],
        # by job: jobs on one node need different ports
        "MASTER_PORT": str(20000 + int(os.environ["SLURM_JOB_ID"]) % 10000),
    }


def _tasks_of_node(tasks: str, node: int) -> int | None:
    """Return the number of tasks on a step's ``node``-th node; ``tasks`` is a Slurm list, ``4(x2),3``."""
    counts: list[int] = []
    for entry in tasks.split(","):
        count, _, times = entry.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[node] if node < len(counts) else None


def _nodes_of_step() -> list[str]:
    """Return this Slurm step's nodes. Raises KeyError outside Slurm."""
    return expand_nodes(os.environ["SLURM_STEP_NODELIST"])


def expand_nodes(nodes: str) -> list[str]:
    """Return the names in a Slurm node list, e.g. ``gpu[07-08,11],login1``, in order, as `scontrol show
    hostnames` does, which containers lack."""
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        # text and brackets alternate: "gpu", "07-08,11", ""
        choices = [
            _numbers(part) if place % 2 else [part] for place, part in enumerate(re.split(r"[\[\]]", word))
        ]
        names += ["".join(parts) for parts in product(*choices)]
    return names


def _numbers(ranges: str) -> list[str]:
    """Expand ``07-09,12`` to 07, 08, 09, 12."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def run_processes(
    worker: Callable[..., None],
    args: tuple[Any, ...],
    world_size: int,
    apart: bool = False,
    heeding: bool = False,
) -> None:
    """Run ``world_size`` ranks of ``worker(*args)`` on this machine; if one fails, end all and raise.

    A single rank runs in this process unless ``apart``: a process that has run a model keeps GPU memory, and
    threads that a later fork would lose. Several ranks are forked on a CPU (sharing imports) and spawned with
    CUDA, whose context does not survive a fork. Returns when all have ended; raises SystemExit with the exit
    code of a rank that ended with a reason. ``heeding``: the worker handles stop signals from its beginning,
    so one that kills a rank came before that.
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
        # A rank that failed because of another may be seen first: an exit code with a reason wins.
        if known := {process.exitcode for process in started.processes} & {2, 3, 4, 85}:
            sys.exit(min(known))
        if isinstance(failure, ProcessRaisedException):
            raise
        if failure.exit_code >= 0:
            sys.exit(failure.exit_code)  # the rank has printed the reason
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
    die_with_parent()  # torch uses SIGINT, which nohup's children ignore
    silence_libraries()  # a spawned rank does not inherit it
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(environment["WORLD_SIZE"])))
    try:
        worker(*args)
    except (ConfigError, Preempted, RunStopped) as error:
        exit_process(report_error(error, prints=rank == 0 or not is_raised_on_all_ranks(error)))
    except (Exception, KeyboardInterrupt):
        if skips_teardown():
            traceback.print_exc()
            exit_process(1)
        raise


def _forward(processes: Sequence[BaseProcess], number: int, _frame: FrameType | None) -> None:
    for process in processes:
        if process.is_alive() and process.pid:
            os.kill(process.pid, number)


def _terminate(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(timeout=10)
        process.kill()


@contextmanager
def process_group(backend: str, timeout_minutes: float) -> Iterator[None]:
    """Context manager: torch.distributed's default process group, from torchrun's variables. Collective.

    After an error of this rank alone NCCL groups are not destroyed: the process reports the error and exits
    immediately, and the launcher ends the other ranks.
    """
    keep_imports()  # a rank has imported all; each save collects garbage
    # gloo connects all pairs of members in each later group, megatron's included: 600 descriptors on a rank
    # among 128, before NCCL's own.
    allow_open_files()
    if interface := gloo_interface():
        set_default(_GLOO_INTERFACE, interface)
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
        # NCCL destroys a group only after its pending work, in which peers without an error never take part.
        if "nccl" in backend and dist.get_world_size() > 1 and not is_raised_on_all_ranks(error):
            skip_teardown()
        else:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def bound_store(address: str, port: int, world_size: int | None, timeout: timedelta) -> TCPStore:
    """Return a TCPStore server that listens only on ``address``; torch's own listens on every interface.

    A host name with a loopback address, as a machine's own name has on many clusters, is left to torch: other
    machines could not reach it. ``port`` 0: a free one. Raises RuntimeError if it cannot listen.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        is_loopback = str(place[0]).startswith("127.") or place[0] == "::1"
        if is_loopback and address not in LOOPBACK:
            return TCPStore(address, port, world_size, True, timeout, wait_for_workers=False)
        listener = socket.create_server(place[:2], family=family, backlog=4096)
    except OSError as error:
        raise RuntimeError(f"cannot listen at {address}:{port}: {error}") from error
    bound, descriptor = int(listener.getsockname()[1]), listener.detach()  # torch closes the descriptor
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
    """Whether the rendezvous is on this machine and no launcher has created its store."""
    return (
        environment_variable("MASTER_ADDR") in LOOPBACK
        and environment_variable("TORCHELASTIC_USE_AGENT_STORE") is None
    )


def gloo_interface() -> str | None:
    """Return the network interface for gloo that reaches the run's other nodes; None to keep gloo's choice.

    gloo uses the interface of this machine's name, on many clusters 127.0.1.1 or a slow network. This asks
    the kernel for the source address on the route to MASTER_ADDR or, on that node, to another node of the
    Slurm step. None on one node, or if only loopback is found.
    """
    if environment_variable(_GLOO_INTERFACE) or not _has_several_nodes():
        return None
    for host in ((environment_variable("MASTER_ADDR") or ""), *_other_nodes()):
        if (address := _address_towards(host)) and not address.startswith("127."):
            return _interface_of(address)
    return None


def _has_several_nodes() -> bool:
    world = int(environment_variable("WORLD_SIZE") or 1)
    if local := environment_variable("LOCAL_WORLD_SIZE"):  # torchrun
        return world > int(local)
    return world > 1 and int(environment_variable("SLURM_STEP_NUM_NODES") or 1) > 1


def _other_nodes() -> list[str]:
    with suppress(KeyError):
        return [node for node in _nodes_of_step() if node != environment_variable("SLURMD_NODENAME")]
    return []


def _address_towards(host: str) -> str | None:
    """Return this machine's IPv4 source address on the route to ``host``; a UDP connect sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def _interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.family == socket.AF_INET and own.address == address for own in addresses):
            return str(name)
    return None


def is_main() -> bool:
    """Whether this process is rank 0."""
    return dist.get_rank() == 0


def broadcast_from_main(value: T | None) -> T:
    """Return rank 0's ``value`` on every rank. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]  # type: ignore[return-value]


def all_gather(value: T) -> list[T]:
    """Return every rank's ``value`` in rank order, on every rank. Collective."""
    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, value)
    return boxes


def barrier() -> None:
    """Wait until every rank has called this. Collective."""
    all_gather(None)


def on_all_ranks(call: Callable[[], T]) -> list[T]:
    """Run ``call`` on all ranks; return its results in rank order, or raise on all if one fails. Collective.
    The failing rank raises its own error, the others a similar one that names the rank."""
    result, failure, own = None, None, None
    try:
        result = call()
    except Exception as error:  # the other ranks wait for the outcome
        kind: type[Exception] = ConfigError if isinstance(error, ConfigError) else RunStopped
        if isinstance(error, StorageFailed) or comes_of_failing_disk(error):
            kind = StorageFailed  # exit code 4 on every rank: the job tries again
        own, failure = error, (kind, str(error) or repr(error))
    outcomes = all_gather((result, failure))
    if own is not None:
        raise own
    for rank, (_, told) in enumerate(outcomes):
        if told is not None:
            raise told[0](f"rank {rank}: {told[1]}")
    return [outcome for outcome, _ in outcomes]  # type: ignore[misc]


def free_port() -> int:
    """Return a free TCP port below the ephemeral range, so no outgoing connection takes it before its user.
    The kernel takes outgoing ports from 32768 on (ip_local_port_range). Raises OSError if none is found."""
    for port in _RANDOM.sample(_LISTENERS_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free TCP port between {_LISTENERS_PORTS.start} and {_LISTENERS_PORTS.stop}")
