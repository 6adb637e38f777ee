"""The probe of one node before a run starts on it; every node of a group runs this at the same time.

Each node checks itself (GPUs, memory, disk, the shared folder), calls every other over TCP (is it reachable,
what is its time?), and takes part in one small all-reduce. It writes its findings to FOLDER/NODE.json; the
first node decides which nodes are bad and writes FOLDER/verdict: one line "NODE reason" for each bad node,
or "* reason" if the bad node is unknown; empty if all are good.

Only the all-reduce needs a package (torch); where it is missing, that is a finding too.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

_ELEMENTS = 1 << 18
"""Elements of the all-reduce: one megabyte of float32."""
_CONNECT_S = 5.0


@dataclass
class Findings:
    """The findings of one node about itself and the others."""

    node: str
    problems: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    clock_ahead_s: dict[str, float] = field(default_factory=dict)
    """How far this node's clock is ahead of each other's."""
    all_reduce: str = "not asked"
    """`ok`, or why it failed."""
    all_reduce_s: float | None = None


@dataclass(frozen=True)
class Needs:
    """The requirements of a node."""

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
    for path in (disk, Path("/tmp")):
        try:
            free = shutil.disk_usage(path).free / 1e9
        except OSError as error:
            yield f"disk of {path}: {error}"
            continue
        if free < needs.disk_gb:
            yield f"disk of {path}: {free:.1f} GB free, {needs.disk_gb:g} needed"


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


def canary_problems(folder: Path, node: str) -> Iterator[str]:
    """Whether this node reads in the shared folder what the job's first node wrote, and can write there."""
    try:
        canary = (folder / "canary").read_text()
        write_whole(folder / f"{node}.canary", canary)
        if (folder / f"{node}.canary").read_text() != canary:
            yield f"shared folder {folder}: what was written is not what is read"
    except OSError as error:
        yield f"shared folder {folder}: {error}"


class Meeting:
    """A listener on this node that answers with its time, and calls to the listeners of all others."""

    def __init__(self, folder: Path, node: str, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._node, self._clock = folder, node, clock
        self._listener = socket.create_server(("", 0), backlog=256)
        threading.Thread(target=self._answer, daemon=True).start()
        write_whole(folder / f"{node}.port", str(self._listener.getsockname()[1]))

    def call_all(self, nodes: Sequence[str], deadline: float, findings: Findings) -> None:
        """Reach every other node, and compare clocks, before ``deadline`` (monotonic)."""
        for other in nodes:
            if other == self._node:
                continue
            ahead = self._ahead_of(other, deadline)
            if ahead is None:
                findings.unreachable.append(other)
            else:
                findings.clock_ahead_s[other] = ahead

    def _ahead_of(self, other: str, deadline: float) -> float | None:
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError, struct.error):
                port = int((self._folder / f"{other}.port").read_text())
                with socket.create_connection((other, port), timeout=_CONNECT_S) as call:
                    sent = self._clock()
                    call.sendall(b"?")
                    (there,) = struct.unpack("!d", call.recv(8, socket.MSG_WAITALL))
                    return (sent + self._clock()) / 2 - there
            time.sleep(0.1)
        return None

    def _answer(self) -> None:
        while True:
            call, _ = self._listener.accept()
            with call, suppress(OSError):
                call.settimeout(_CONNECT_S)
                if call.recv(1):
                    call.sendall(struct.pack("!d", self._clock()))


def all_reduce(folder: Path, nodes: Sequence[str], rank: int, seconds: float) -> tuple[str, float | None]:
    """`ok` and how long one megabyte took, or why it failed. NCCL where there is a GPU, else gloo."""
    try:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        if rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                write_whole(folder / "store", str(probe.getsockname()[1]))
        port = int(_wait_for(folder / "store", seconds))
        cuda = torch.cuda.is_available()
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
    """The bad nodes, each with its reasons.

    A node is bad if most nodes that answered cannot reach it, or if its clock is off from the median of all.
    A failed all-reduce makes those nodes bad where it failed, if it worked elsewhere.
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


def _judge_all(folder: Path, nodes: Sequence[str], needs: Needs, deadline: float) -> None:
    """On the first node: wait for the others' findings, then write the verdict."""
    found: dict[str, Findings] = {}
    while len(found) < len(nodes) and time.monotonic() < deadline:
        for node in set(nodes) - found.keys():
            with suppress(OSError, ValueError):
                found[node] = Findings(**json.loads((folder / f"{node}.json").read_text()))
        time.sleep(0.1)
    bad = judge(list(found.values()), nodes, needs)
    lines = [f"{node} {'; '.join(reasons)}\n" for node, reasons in sorted(bad.items())]
    write_whole(folder / "verdict", "".join(lines))


def main() -> None:
    """Probe this node."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="on the shared file system")
    parser.add_argument("--nodes", required=True, help="all of the group, with commas")
    parser.add_argument("--disk", type=Path, required=True, help="where the run writes")
    parser.add_argument("--deadline-s", type=float, default=60)
    parser.add_argument("--no-all-reduce", action="store_true")
    for name, value in asdict(Needs()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = parser.parse_args()
    needs = Needs(**{name: getattr(given, name) for name in asdict(Needs())})
    nodes, node = given.nodes.split(","), os.environ["SLURMD_NODENAME"]
    end = time.monotonic() + given.deadline_s
    findings = Findings(node, [*local_problems(needs, given.disk), *canary_problems(given.folder, node)])
    meeting = Meeting(given.folder, node)
    meeting.call_all(nodes, time.monotonic() + given.deadline_s / 3, findings)
    if len(nodes) > 1 and not given.no_all_reduce and not findings.unreachable:
        left = max(1.0, end - time.monotonic())
        findings.all_reduce, findings.all_reduce_s = all_reduce(
            given.folder, nodes, nodes.index(node), 0.7 * left
        )
    write_whole(given.folder / f"{node}.json", json.dumps(asdict(findings), indent=2))
    if node == nodes[0]:
        _judge_all(given.folder, nodes, needs, end + given.deadline_s / 3)
    else:  # stay, so that others can still call
        with suppress(TimeoutError):
            _wait_for(given.folder / "verdict", given.deadline_s)


if __name__ == "__main__":
    main()
