"""Node health check before a run: each check on a bad node, and which nodes are judged bad."""

from __future__ import annotations

import sys
import threading
import time
import types
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.executables import executable
from tests.unit.slurm.conftest import Shell, checkpoint, program


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    return program("probe")


@pytest.mark.parametrize(
    ("driver", "told"),
    [
        ("echo 'GPU 0: x'; echo '  MIG'; echo 'GPU 1: x'", None),
        ("echo 'GPU 0: x'", "GPUs: 1, 2 expected"),
        ("echo 'Unable to determine the device handle'; exit 15", "GPUs: nvidia-smi fails, 2 expected"),
    ],
)
def test_gpus(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, told: str | None
) -> None:
    executable(tmp_path / "nvidia-smi", driver)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = list(probe.local_problems(probe.Needs(gpus=2, memory_gb=0, disk_gb=0), tmp_path))
    assert found == ([told] if told else [])


@pytest.mark.parametrize(
    ("variables", "asked_for", "gpus"),
    [
        ({"BAPO_DEVICE": "cpu"}, "8", 0),
        ({"BAPO_DEVICE": ""}, "8", 8),
        # By --gres: then Slurm has no SLURM_GPUS_PER_NODE, of which the job's shell makes --gpus.
        ({"SLURM_GPUS_ON_NODE": "8"}, "0", 8),
    ],
)
def test_the_gpus_that_a_node_must_have(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], asked_for: str, gpus: int
) -> None:
    for name, value in {**variables, "SLURMD_NODENAME": "n1"}.items():
        monkeypatch.setenv(name, value)
    words = ["probe.py", "--folder=/x", "--nodes=n1", "--disk=/x", "--gpus", asked_for]
    monkeypatch.setattr(sys, "argv", words)
    node = Mock()
    monkeypatch.setattr(probe, "probe_node", node)
    probe.main()
    assert node.call_args.args[3].gpus == gpus


@pytest.mark.parametrize(("free_gb", "told"), [(0.5, "0.5 GB free, 1 needed"), (50.0, None)])
def test_a_nodes_tmp_need_not_hold_the_run(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, free_gb: float, told: str | None
) -> None:
    """`disk_gb = 1600`, as a 32B run needs it, is for the run directory: no node has that in /tmp."""
    free = {Path("/lustre/run"): 2000.0, Path("/tmp"): free_gb}
    monkeypatch.setattr(probe.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free[path] * 1e9))
    found = list(probe.local_problems(probe.Needs(memory_gb=0, disk_gb=1600), Path("/lustre/run")))
    assert found == ([f"disk of /tmp: {told}"] if told else [])
    monkeypatch.undo()
    gone = list(probe.local_problems(probe.Needs(memory_gb=0, disk_gb=0), Path("/no/folder")))
    assert [line.partition(": ")[0] for line in gone] == ["disk of /no/folder"]


@pytest.mark.parametrize(("held", "told"), [(0, "1.0 GB free, 1.001 needed"), (1_000_000, None)])
def test_a_run_that_continues_has_written_a_part_of_what_it_needs(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, told: str | None
) -> None:
    """Its requeued job would leave out every node, once the run has filled its disk as planned."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/part").write_bytes(bytes(held))
    monkeypatch.setattr(probe.shutil, "disk_usage", lambda _path: types.SimpleNamespace(free=1e9))
    found = list(probe.local_problems(probe.Needs(memory_gb=0, disk_gb=1.001), tmp_path))
    assert found == ([f"disk of {tmp_path}: {told}"] if told else [])


class Turns:
    """Virtual time of all threads: it moves when each of them sleeps, so waiting costs nothing."""

    def __init__(self, threads: int) -> None:
        self.now_s = 0.0
        self._awake = threads
        self._alarms: list[float] = []
        self._changed = threading.Condition()

    def clock(self, ahead_s: float) -> Any:
        """Return a thread's clock, whose wall time is ahead of the others'."""
        wall = 1_000_000 + ahead_s
        return types.SimpleNamespace(
            monotonic=lambda: self.now_s, time=lambda: wall + self.now_s, sleep=self.sleep
        )

    def sleep(self, seconds: float) -> None:
        with self._changed:
            alarm = self.now_s + seconds
            self._alarms.append(alarm)
            self._end_turn()
            while alarm > self.now_s:
                assert self._changed.wait(60), "the threads wait for each other"
            self._alarms.remove(alarm)
            self._awake += 1

    def end(self) -> None:
        with self._changed:
            self._end_turn()

    def _end_turn(self) -> None:
        self._awake -= 1
        if self._awake == 0 and self._alarms and min(self._alarms) > self.now_s:
            self.now_s = min(self._alarms)
            self._changed.notify_all()


def verdict(
    probe: ModuleType,
    folder: Path,
    starts_s: dict[str, float],
    ahead_s: dict[str, float] | None = None,
    reduce: Any = None,
) -> str:
    """The verdict on nodes whose processes begin so many seconds after the job's shell began the probe."""
    (folder / "start").write_text("1000000\n")
    turns = Turns(len(starts_s))

    def life(node: str, start_s: float) -> None:
        try:
            clock = turns.clock((ahead_s or {}).get(node, 0.0))
            clock.sleep(start_s)
            if start_s < 540:
                probe.probe_node(node, [*starts_s], folder, probe.Needs(), iter(()), 540.0, reduce, clock)
        finally:
            turns.end()

    threads = [threading.Thread(target=life, args=one) for one in starts_s.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (folder / "verdict").read_text()


def test_nodes_that_begin_two_minutes_apart_are_all_good(probe: ModuleType, tmp_path: Path) -> None:
    """As images unpack: the first node after no time, the last after two minutes. All join the all-reduce."""
    joined: list[tuple[int, float]] = []

    def reduce(_folder: Path, _nodes: list[str], rank: int, left_s: float) -> tuple[str, float]:
        joined.append((rank, left_s))
        return "ok", 0.1

    starts = {f"127.0.0.{number + 1}": 40.0 * number for number in range(4)}
    assert verdict(probe, tmp_path, starts, reduce=reduce) == ""
    assert sorted(rank for rank, _ in joined) == [0, 1, 2, 3]
    # 85 % of 540 s, and the last came after 120 s: all have the same time left, whenever they began.
    assert [left for _, left in joined] == pytest.approx([339] * 4, abs=1)


def test_only_a_missing_node_and_clocks_that_are_off_are_bad(probe: ModuleType, tmp_path: Path) -> None:
    """The time that all wait for the one must not be missing for the others. By a clock an hour off the probe
    is over when it begins, or has not begun when it ends."""
    starts = {f"127.0.0.{number}": seconds for number, seconds in enumerate((0, 1e9, 0, 60, 120, 30), 2)}
    lines = verdict(probe, tmp_path, starts, {"127.0.0.4": 3600.0, "127.0.0.5": -3600.0}).splitlines()
    off = ["127.0.0.4 clock: +3600.0 s, 5 allowed", "127.0.0.5 clock: -3600.0 s, 5 allowed"]
    assert lines == ["127.0.0.3 no answer", *off]


def test_a_gpu_that_torch_cannot_use_makes_its_node_bad(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapo_megatron.runtime.device.gpu_problem", lambda: "the driver\n is too old")
    assert list(probe.cuda_problems(8)) == ["GPUs: the driver is too old"]
    assert list(probe.cuda_problems(0)) == []
    monkeypatch.setattr("bapo_megatron.runtime.device.gpu_problem", lambda: 1 / 0)
    assert list(probe.cuda_problems(8)) == ["GPUs: ZeroDivisionError: division by zero"]


def test_a_failed_all_reduce_is_reported_within_its_deadline(probe: ModuleType, tmp_path: Path) -> None:
    began = time.monotonic()
    told, seconds = probe.all_reduce(tmp_path, ["127.0.0.1", "n2"], 1, 0.5)  # the first never comes
    assert told.startswith("TimeoutError: store did not appear")
    assert seconds is None
    assert time.monotonic() - began < 30  # torch is imported first


NODES = ["n1", "n2", "n3"]
WELL = {node: {"all_reduce": "ok"} for node in NODES}
OFF = {"n2": ["clock: +9.0 s, 5 allowed"]}
CLOCKS = {
    "n1": {"clock_ahead_s": {"n2": -9.0, "n3": 0.1}},
    "n2": {"clock_ahead_s": {"n1": 9.0, "n3": 9.1}},
    "n3": {"clock_ahead_s": {"n1": -0.1, "n2": -9.1}},
}
TWO_CLOCKS = {"n1": {"clock_ahead_s": {"n2": -9.0}}, "n2": {"clock_ahead_s": {"n1": 9.0}}}
CUT_OFF = {"unreachable": ["n2"]}


@pytest.mark.parametrize(
    ("found", "nodes", "clock_s", "bad"),
    [
        (WELL, NODES, 5, {}),
        ({"n1": {"problems": ["GPUs: 7"]}, "n3": {}}, NODES, 5, {"n1": ["GPUs: 7"], "n2": ["no answer"]}),
        # One that cannot be reached is bad, and not the nodes that report it; one of two is not a majority.
        (
            {"n1": CUT_OFF, "n2": {}, "n3": CUT_OFF},
            NODES,
            5,
            {"n2": ["network: 2 of 2 other nodes cannot reach it"]},
        ),
        ({"n1": CUT_OFF, "n2": {}, "n3": {}}, NODES, 5, {}),
        (CLOCKS, NODES, 5, OFF),
        (CLOCKS, NODES, 10, {}),
        (TWO_CLOCKS, NODES[:2], 5, OFF),  # the first one's is the reference
        (WELL | {"n2": {"all_reduce": "5, not 6"}}, NODES, 5, {"n2": ["all-reduce: 5, not 6"]}),
        ({node: {"all_reduce": "timeout"} for node in NODES}, NODES, 5, {"*": ["all-reduce: timeout"]}),
    ],
)
def test_which_nodes_are_judged_bad(
    probe: ModuleType,
    found: dict[str, dict[str, Any]],
    nodes: list[str],
    clock_s: float,
    bad: dict[str, list[str]],
) -> None:
    findings = [probe.Findings(node, **own) for node, own in found.items()]
    assert probe.judge(findings, nodes, probe.Needs(clock_s=clock_s)) == bad


PROBE = """
    bapo_nodes() { printf '%s\\n' $NODES; }
    srun() {
        printf '%s\\n' "$@" >>"$BAPO_RUN/calls"
        [[ $ANSWER = no ]] || echo {} >"$BAPO_RUN/health/0/n1.json"
    }
    timeout() { shift 3; "$@"; }
    bapo_event() { echo "$1"; }
    bapo_headline() { echo "$1"; }
    bapo_requeue() { echo "without $1"; exit; }
    bapo_read_state
    bapo_health
"""


@pytest.mark.parametrize(
    ("nodes", "answer", "told"),
    [
        ("n1 n2 n3", "yes", "without n2,n3"),
        ("n1 n2 n3", "no", "STOPPED: health: no bad node could be identified\ncause: * no node answered"),
        ("n1", "no", "without n1"),
    ],
)
def test_a_probe_that_could_not_run_does_not_exclude_every_node(
    shell: Shell, tmp_path: Path, nodes: str, answer: str, told: str
) -> None:
    """A wrong interpreter or image: without all nodes of a partition the job would wait for ever."""
    found = shell(PROBE, NODES=nodes, ANSWER=answer)
    assert told in found.stdout, found.stderr


def test_nodes_that_are_all_bad_are_not_excluded(shell: Shell, tmp_path: Path) -> None:
    """A broken environment, or memory_gb too high: a job without all of a partition would wait for ever."""
    verdict = PROBE.replace(
        "bapo_health\n", 'printf "n1 x\\nn2 x\\n" >"$BAPO_RUN/health/0/verdict"; bapo_health'
    )
    (tmp_path / "health/0").mkdir(parents=True)
    both = shell(verdict, NODES="n1 n2", ANSWER="yes")
    assert "STOPPED: health: every node is bad: the setup" in both.stdout, both.stderr
    assert both.returncode == 1
    some = {"NODES": "n1 n2 n3", "ANSWER": "yes"}
    assert "without n1,n2\n" in shell(verdict, **some).stdout
    again = verdict.replace("n1 x\\nn2 x", "n3 x")
    said = [shell(again, BAPO_MAX_IDLE="2", **some).stdout for _ in range(3)]
    assert ["without n3\n" in one for one in said] == [True, True, False]
    assert "STOPPED: health: nodes n1,n2,n3,n3 were left out before; others are bad now" in said[2]
    checkpoint(tmp_path, 10)  # weeks later another node fails
    assert "without n3\n" in shell(again, BAPO_MAX_IDLE="2", **some).stdout
    assert "excluded=n1,n2,n3,n3,n3\n" in (tmp_path / "slurm.state").read_text()


GROUPS = {"SLURM_GPUS_PER_NODE_HET_GROUP_0": "8", "SLURM_GPUS_PER_NODE_HET_GROUP_1": "h100:4"}


@pytest.mark.parametrize(
    ("variables", "counts"),
    [
        ({"SLURM_GPUS_PER_NODE": "h100:4"}, ["4", "4"]),
        ({}, ["0", "0"]),
        # Slurm names the variable after the group there, and no other: no GPU of a large job was counted.
        ({**GROUPS, "SLURM_HET_SIZE": "2"}, ["8", "4"]),
    ],
)
def test_the_probe_gets_the_number_of_gpus(
    shell: Shell, tmp_path: Path, variables: dict[str, str], counts: list[str]
) -> None:
    script = PROBE.replace("bapo_health\n", "bapo_probe 0; bapo_probe 1\n")
    found = shell(script, NODES="n1", ANSWER="no", **variables)
    words = (tmp_path / "calls").read_text().split()
    assert [word for word in words if word.startswith("--gpus=")] == [f"--gpus={n}" for n in counts], (
        found.stderr
    )
