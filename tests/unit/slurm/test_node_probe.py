"""The probe of nodes before a run: what each check finds on a node that is bad, and who is blamed."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[3] / "slurm/probe.py"


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    """slurm/probe.py, which is a program and no part of the package."""
    spec = importlib.util.spec_from_file_location("node_probe", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fake_driver(folder: Path, text: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


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
    fake_driver(tmp_path, driver)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = list(probe.local_problems(probe.Needs(gpus=2, memory_gb=0, disk_gb=0), tmp_path))
    assert found == ([told] if told else [])


def test_memory_and_disk(probe: ModuleType, tmp_path: Path) -> None:
    found = list(probe.local_problems(probe.Needs(memory_gb=1e6, disk_gb=1e6), tmp_path))
    assert [line.split(":")[0] for line in found] == ["memory", f"disk of {tmp_path}", "disk of /tmp"]
    gone = list(probe.local_problems(probe.Needs(memory_gb=0, disk_gb=0), tmp_path / "no"))
    assert len(gone) == 1
    assert "No such file" in gone[0]


def test_the_shared_folder(probe: ModuleType, tmp_path: Path) -> None:
    assert "No such file" in next(probe.canary_problems(tmp_path, "n1"))
    (tmp_path / "canary").write_text("7-0\n")
    assert list(probe.canary_problems(tmp_path, "n1")) == []
    assert (tmp_path / "n1.canary").read_text() == "7-0\n"


def test_clocks_and_reach(probe: ModuleType, tmp_path: Path) -> None:
    """Two meet at once, one with a clock that is ahead; a third never comes."""
    probe.write_whole(tmp_path / "127.0.0.2.port", "1")  # nobody listens there
    findings = probe.Findings("127.0.0.1"), probe.Findings("localhost")
    meetings = (
        probe.Meeting(tmp_path, "127.0.0.1"),
        probe.Meeting(tmp_path, "localhost", clock=lambda: time.time() + 30),
    )
    nodes = ["127.0.0.1", "localhost", "127.0.0.2"]
    threads = [
        threading.Thread(target=meeting.call_all, args=(nodes, time.monotonic() + 1, one))
        for meeting, one in zip(meetings, findings, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert findings[0].clock_ahead_s["localhost"] == pytest.approx(-30, abs=1)
    assert findings[1].clock_ahead_s["127.0.0.1"] == pytest.approx(30, abs=1)
    assert [one.unreachable for one in findings] == [["127.0.0.2"]] * 2


def test_a_failed_all_reduce_is_told_within_its_deadline(probe: ModuleType, tmp_path: Path) -> None:
    began = time.monotonic()
    told, seconds = probe.all_reduce(tmp_path, ["127.0.0.1", "n2"], 1, 0.5)  # the first never comes
    assert told.startswith("TimeoutError: store did not appear")
    assert seconds is None
    assert time.monotonic() - began < 30  # torch is imported first


NODES = ["n1", "n2", "n3"]


def test_a_whole_group_has_no_bad_nodes(probe: ModuleType) -> None:
    found = [probe.Findings(node, all_reduce="ok") for node in NODES]
    assert probe.judge(found, NODES, probe.Needs()) == {}


def test_who_is_silent_or_says_so_is_bad(probe: ModuleType) -> None:
    found = [probe.Findings("n1", problems=["GPUs: 7, 8 expected"]), probe.Findings("n3")]
    bad = probe.judge(found, NODES, probe.Needs())
    assert bad == {"n1": ["GPUs: 7, 8 expected"], "n2": ["no answer"]}


def test_who_cannot_be_reached_is_bad_and_not_who_says_so(probe: ModuleType) -> None:
    found = [
        probe.Findings("n1", unreachable=["n2"]),
        probe.Findings("n2"),
        probe.Findings("n3", unreachable=["n2"]),
    ]
    assert probe.judge(found, NODES, probe.Needs()) == {"n2": ["network: 2 of 2 other nodes cannot reach it"]}
    found[2].unreachable.clear()
    assert probe.judge(found, NODES, probe.Needs()) == {}  # one of two is no majority


def test_the_clock_that_is_off_is_bad(probe: ModuleType) -> None:
    found = [
        probe.Findings("n1", clock_ahead_s={"n2": -9.0, "n3": 0.1}),
        probe.Findings("n2", clock_ahead_s={"n1": 9.0, "n3": 9.1}),
        probe.Findings("n3", clock_ahead_s={"n1": -0.1, "n2": -9.1}),
    ]
    assert probe.judge(found, NODES, probe.Needs()) == {"n2": ["clock: +9.0 s, 5 allowed"]}
    assert probe.judge(found, NODES, probe.Needs(clock_s=10)) == {}


def test_of_two_clocks_the_first_is_taken_for_right(probe: ModuleType) -> None:
    found = [
        probe.Findings("n1", clock_ahead_s={"n2": -9.0}),
        probe.Findings("n2", clock_ahead_s={"n1": 9.0}),
    ]
    assert probe.judge(found, NODES[:2], probe.Needs()) == {"n2": ["clock: +9.0 s, 5 allowed"]}


def test_an_all_reduce_that_fails_somewhere_or_everywhere(probe: ModuleType) -> None:
    found = [probe.Findings(node, all_reduce="ok") for node in NODES]
    found[1].all_reduce = "the sum is 5, not 6"
    assert probe.judge(found, NODES, probe.Needs()) == {"n2": ["all-reduce: the sum is 5, not 6"]}
    for one in found:
        one.all_reduce = "DistBackendError: timeout"
    assert probe.judge(found, NODES, probe.Needs()) == {"*": ["all-reduce: DistBackendError: timeout"]}
