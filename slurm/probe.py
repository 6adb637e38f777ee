"""Health check of one node before a run starts on it; every node of a group runs it at the same time.

Each node checks itself (GPUs, memory, disk), calls every other over TCP (whether it is reachable, and its
time), and takes part in one small all-reduce. It writes its findings to FOLDER/NODE.json; the first node
decides which nodes are bad and writes FOLDER/verdict: a line "NODE reason" for each bad node, or "* reason"
if the bad node is unknown; empty if all are good. The job's script (lib/health.sh) reads it.

Processes of one probe start minutes apart where a container is unpacked first. So all limits count from the
time in FOLDER/start, which the job's shell wrote, not from the start of each process.

Only the all-reduce and torch's GPUs need packages; a missing one is a finding, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

_ELEMENTS = 1 << 18
"""Elements of the all-reduce: one megabyte of float32."""
_TEMPORARY_GB = 1.0
"""Free space that a run needs in /tmp, whatever its directory needs, GB."""
_CONNECT_S = 5.0
_LOOK_S = 0.3
"""Interval at which the shared folder is polled for the other nodes' files, seconds."""
_MEETING_PART, _ALL_REDUCE_PART = 0.6, 0.85
"""Parts of the probe's time at which nodes stop to wait for each other, and the all-reduce ends."""


Clock = Any
"""A clock: the module ``time``; tests pass a simulated one."""


@dataclass
class Findings:
    """Findings of one node about itself and the others, FOLDER/NODE.json; the first node reads them all."""

    node: str
    problems: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    clock_ahead_s: dict[str, float] = field(default_factory=dict)
    """Seconds by which this node's clock is ahead of each other node's."""
    all_reduce: str = "not asked"
    """`ok`, or why it failed."""
    all_reduce_s: float | None = None


@dataclass(frozen=True)
class Needs:
    """Requirements of a node, from the command line: GPUs, free memory and disk, clock difference."""

    gpus: int = 0
    memory_gb: float = 1.0
    disk_gb: float = 1.0
    clock_s: float = 5.0


def local_problems(needs: Needs, disk: Path) -> Iterator[str]:
    """The requirements that this node does not meet."""
    if needs.gpus and (seen := visible_gpus()) != needs.gpus:
        yield f"GPUs: {seen if seen is not None else 'nvidia-smi fails'}, {needs.gpus} expected"
    if (available := available_memory_gb()) < needs.memory_gb:
        yield f"memory: {available:.1f} GB available, {needs.memory_gb:g} needed"
    # A run writes into its directory: the node's own /tmp, often in memory, gets sockets and caches alone.
    for path, needed in ((disk, needs.disk_gb), (Path("/tmp"), min(needs.disk_gb, _TEMPORARY_GB))):
        try:
            free = shutil.disk_usage(path).free / 1e9
        except OSError as error:
            yield f"disk of {path}: {error}"
            continue
        if free < needed and (path != disk or free + held_gb(disk) < needed):
            yield f"disk of {path}: {free:.1f} GB free, {needed:g} needed"


def held_gb(folder: Path) -> float:
    """The size of the files in a folder, in GB: a resumed run has already written part of what it needs."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # other nodes write their findings there, and rename them
                size += os.lstat(os.path.join(place, name)).st_size
    return size / 1e9


def visible_gpus() -> int | None:
    """The number of GPUs that the driver shows; None if it does not answer."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if found.returncode else sum(line.startswith("GPU ") for line in found.stdout.splitlines())


def available_memory_gb(meminfo: Path = Path("/proc/meminfo")) -> float:
    """The memory that the kernel would give to a new program, in GB."""
    line = next(row for row in meminfo.read_text().splitlines() if row.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024 / 1e9


def cuda_problems(gpus: int) -> Iterator[str]:
    """Why torch cannot use the GPUs that this node should have, in the words of `bapo train`."""
    if not gpus:
        return
    try:
        from bapo_megatron.runtime.device import gpu_problem

        problem = gpu_problem()
    except Exception as error:  # whatever a broken environment raises is a finding
        problem = f"{type(error).__name__}: {error}"
    if problem:
        yield f"GPUs: {' '.join(problem.split())}"


def begin_of_probe(folder: Path, seconds: float, clock: Clock) -> float:
    """Start of the probe by the job's shell, on this process's monotonic clock; now, if FOLDER/start is
    missing or this node's clock is off, which the probe reports."""
    elapsed = -1.0
    with suppress(OSError, ValueError):
        elapsed = clock.time() - float((folder / "start").read_text())
    return clock.monotonic() - (elapsed if 0 <= elapsed <= seconds else 0.0)


class Meeting:
    """Network and clock check of a node: ``call_all`` calls all others; a thread answers their calls with the
    time. The constructor starts it, and writes its port to FOLDER/NODE.port."""

    def __init__(self, folder: Path, node: str, clock: Clock = time) -> None:
        self._folder, self._node, self._clock = folder, node, clock
        self._listener = socket.create_server(("", 0), backlog=256)
        threading.Thread(target=self._answer, daemon=True).start()
        write_whole(folder / f"{node}.port", str(self._listener.getsockname()[1]))

    def call_all(self, nodes: Sequence[str], deadline: float, findings: Findings) -> None:
        """Call every other node, in turn, until each has answered or ``deadline`` (monotonic) has passed; add
        clock differences and unreachable nodes to ``findings``."""
        missing = [other for other in nodes if other != self._node]
        while True:
            late = self._clock.monotonic() >= deadline
            for other in tuple(missing):
                ahead = self._ahead_of(other)
                if ahead is not None:
                    findings.clock_ahead_s[other] = ahead
                    missing.remove(other)
            if late or not missing:
                break
            self._clock.sleep(_LOOK_S)
        findings.unreachable.extend(missing)

    def _ahead_of(self, other: str) -> float | None:
        """Seconds by which this node's clock is ahead of another's; None if that does not answer."""
        with suppress(OSError, ValueError, struct.error):
            port = int((self._folder / f"{other}.port").read_text())
            with socket.create_connection((other, port), timeout=_CONNECT_S) as call:
                sent = self._clock.time()
                call.sendall(b"?")
                (there,) = struct.unpack("!d", call.recv(8, socket.MSG_WAITALL))
                return float((sent + self._clock.time()) / 2 - there)
        return None

    def _answer(self) -> None:
        while True:
            call, _ = self._listener.accept()
            with call, suppress(OSError):
                call.settimeout(_CONNECT_S)
                if call.recv(1):
                    call.sendall(struct.pack("!d", self._clock.time()))


def all_reduce(folder: Path, nodes: Sequence[str], rank: int, seconds: float) -> tuple[str, float | None]:
    """Small all-reduce over all nodes: `ok` or the error, and its seconds. NCCL on GPUs, else gloo."""
    try:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        if rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                write_whole(folder / "store", str(probe.getsockname()[1]))
        port = int(_wait_for(folder / "store", seconds))
        cuda = torch.cuda.is_available() and os.environ.get("BAPO_DEVICE") != "cpu"
        limit = timedelta(seconds=seconds)
        store = dist.TCPStore(nodes[0], port, len(nodes), is_master=rank == 0, timeout=limit)
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=len(nodes), timeout=limit)
        values = torch.full((_ELEMENTS,), float(rank + 1), device="cuda" if cuda else "cpu")
        start = time.perf_counter()
        dist.all_reduce(values)
        total = values.sum().item() / _ELEMENTS
        elapsed = time.perf_counter() - start
        expected = len(nodes) * (len(nodes) + 1) / 2
        return ("ok" if total == expected else f"the sum is {total}, not {expected}"), elapsed
    except Exception as error:  # whatever a broken node may raise is a finding
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", None


def judge(found: Sequence[Findings], nodes: Sequence[str], needs: Needs) -> dict[str, list[str]]:
    """The bad nodes, each with its reasons; "*" if the bad node is unknown.

    A node is bad if it found a problem itself or wrote no findings, if most others cannot reach it, or if
    its clock is off from the median of all. If none is, the nodes where the all-reduce failed are bad, or "*"
    if it failed everywhere.
    """
    bad: dict[str, list[str]] = {}
    by_node = {one.node: one for one in found}
    for node in nodes:
        reasons = list(by_node[node].problems) if node in by_node else ["no answer"]
        others = [one for one in found if one.node != node]
        blind = sum(node in one.unreachable for one in others)
        if node in by_node and others and 2 * blind > len(others):
            reasons.append(f"network: {blind} of {len(others)} other nodes cannot reach it")
        if node in by_node and len(found) > 1:
            off = _clock_off(by_node[node])
            # Of two nodes either clock may be wrong; the first node's is taken for right.
            if abs(off) > needs.clock_s and not (len(found) == 2 and node == nodes[0]):
                reasons.append(f"clock: {off:+.1f} s, {needs.clock_s:g} allowed")
        if reasons:
            bad[node] = reasons
    failed = [one for one in found if one.all_reduce not in ("ok", "not asked")]
    if failed and not bad:
        nowhere = len(failed) == len(found)
        for one in failed[:1] if nowhere else failed:
            bad["*" if nowhere else one.node] = [f"all-reduce: {one.all_reduce}"]
    return bad


def _clock_off(one: Findings) -> float:
    ahead = list(one.clock_ahead_s.values())
    if len(ahead) < 2:
        return ahead[0] if ahead else 0.0
    return statistics.median([0.0, *ahead])


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole under its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _wait_for(path: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            return path.read_text()
        time.sleep(0.1)
    raise TimeoutError(f"{path.name} did not appear within {seconds:g} s")


def judge_all(folder: Path, nodes: Sequence[str], needs: Needs, deadline: float, clock: Clock) -> None:
    """On the first node: wait for the others' findings, then write the verdict."""
    found: dict[str, Findings] = {}
    while True:
        late = clock.monotonic() >= deadline
        for node in set(nodes) - found.keys():
            with suppress(OSError, ValueError):
                found[node] = Findings(**json.loads((folder / f"{node}.json").read_text()))
        if late or len(found) == len(nodes):
            break
        clock.sleep(_LOOK_S)
    bad = judge(list(found.values()), nodes, needs)
    lines = [f"{node} {'; '.join(reasons)}\n" for node, reasons in sorted(bad.items())]
    write_whole(folder / "verdict", "".join(lines))


def probe_node(
    node: str,
    nodes: Sequence[str],
    folder: Path,
    needs: Needs,
    problems: Iterator[str],
    seconds: float,
    reduce: Callable[[Path, Sequence[str], int, float], tuple[str, float | None]] | None,
    clock: Clock = time,
) -> None:
    """Probe this node (``problems``, network, all-reduce) and write FOLDER/NODE.json; the first node, after
    all others, also FOLDER/verdict.

    ``seconds``: for the whole probe, from the time in FOLDER/start. ``reduce``: the all-reduce, if any.
    """
    began = begin_of_probe(folder, seconds, clock)
    findings = Findings(node, list(problems))
    meeting = Meeting(folder, node, clock)
    meeting.call_all(nodes, began + _MEETING_PART * seconds, findings)
    if len(nodes) > 1 and reduce is not None and not findings.unreachable:
        left = max(1.0, began + _ALL_REDUCE_PART * seconds - clock.monotonic())
        findings.all_reduce, findings.all_reduce_s = reduce(folder, nodes, nodes.index(node), left)
    write_whole(folder / f"{node}.json", json.dumps(asdict(findings), indent=2))
    end = began + seconds
    if node == nodes[0]:
        judge_all(folder, nodes, needs, end, clock)
    while not (folder / "verdict").exists() and clock.monotonic() < end:  # so that others can still call
        clock.sleep(_LOOK_S)


def main() -> None:
    """Probe this node."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="on the shared file system")
    parser.add_argument("--nodes", required=True, help="all of the group, with commas")
    parser.add_argument("--disk", type=Path, required=True, help="where the run writes")
    parser.add_argument("--deadline-s", type=float, default=600, help="for the whole probe")
    parser.add_argument("--no-all-reduce", action="store_true")
    for name, value in asdict(Needs()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = parser.parse_args()
    needs = Needs(**{name: getattr(given, name) for name in asdict(Needs())})
    gpus = needs.gpus or int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)  # a job that asked with --gres
    needs = replace(needs, gpus=0 if os.environ.get("BAPO_DEVICE") == "cpu" else gpus)
    problems = chain(local_problems(needs, given.disk), cuda_problems(needs.gpus))
    reduce = None if given.no_all_reduce else all_reduce
    node = os.environ["SLURMD_NODENAME"]
    probe_node(node, given.nodes.split(","), given.folder, needs, problems, given.deadline_s, reduce)


if __name__ == "__main__":
    main()
