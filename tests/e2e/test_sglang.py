"""The demo's run with real SGLang servers, shortened."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang.server_process import sglang_python
from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.forked_commands import ROOT, ForkedCommand, start_bapo
from tests.support.processes import servers_of
from tests.support.short_runs import SUMS, finish, wait_for_steps

pytestmark = pytest.mark.e2e

SHORT = ["--steps=3", "--rollout.prompts-per-step=6", "--rollout.group-size=4", "--checkpoint.every=1"]
SHORT += ["--reward.workers=1", "--evaluation.every=0", SUMS]


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    try:
        sglang_python()
    except ConfigError as error:
        pytest.skip(str(error))


def start(run_dir: Path, *flags: str) -> ForkedCommand:
    return start_bapo("train", "recipes/demo_sglang_cpu.py", *SHORT, f"--run-dir={run_dir}", *flags)


@pytest.mark.slow
def test_a_server_samples_what_the_policy_trains_on(tmp_path: Path) -> None:
    """Killed after its second step, continued; the server ends with the run however it ends. (Two servers:
    test_chaos.py.)"""
    run_dir = tmp_path / "run"
    flags = ("--rollout.sglang.servers=1", "--rollout.sglang.sync=broadcast")
    process = start(run_dir, *flags)
    wait_for_steps(process, run_dir, 2)
    assert servers_of(run_dir)
    os.killpg(process.pid, signal.SIGKILL)  # the server has a group of its own
    process.communicate()
    deadline = time.monotonic() + 300
    while servers_of(run_dir):
        assert time.monotonic() < deadline, "servers outlived their run"
        time.sleep(0.2)
    output = finish(start(run_dir, *flags))
    assert "step 3/3" in output
    updates = read_jsonl(run_dir / "updates.jsonl")
    assert [row["version"] for row in updates] == list(range(1, len(updates) + 1))
    # Each step samples with the weights that the step before has made, and with nothing older.
    first_updates = [next(row for row in updates if row["step"] == step) for step in (1, 2, 3)]
    for row in first_updates:
        assert row["staleness/mean"] == 0
        assert row["policy/ratio_gap"] < 1e-4  # mean |log ratio|: engine and trainer agree
    assert updates[-1]["policy/ratio_gap"] > 1e-4  # and differ after updates
    assert servers_of(run_dir) == []
    key = (run_dir / "api_key").read_bytes().strip()
    holders = [path.name for path in run_dir.rglob("*") if path.is_file() and key in path.read_bytes()]
    assert holders == ["api_key"]
    assert key.decode() not in output
    assert not (run_dir / "weights").exists()
    kinds = {row["kind"] for row in read_jsonl(run_dir / "events.jsonl")}
    assert "digests_compared" in kinds, "servers were not held to what was sent"
    assert not {"broadcast_failed", "digests_not_compared"} & kinds


@pytest.mark.slow
def test_a_server_samples_without_a_trainer_and_a_trainer_trains_without_a_server(tmp_path: Path) -> None:
    """The server loads the model's weights once. They are those that the trainer begins with."""
    sampled, trained = tmp_path / "sampled", tmp_path / "trained"
    asked = ("--rollout.sglang.sync=broadcast", "--rollout.max-staleness=1", "--parallel.tensor=64")
    output = finish(start(sampled, "--rollout-only", *asked))
    assert "step 3/3" in output
    assert output.count("engine ready") == 1
    assert servers_of(sampled) == []
    log = (sampled / "logs/server-0.log").read_text()
    assert log.count("POST /update_weights_from_disk") == 1
    rows = read_jsonl(sampled / "metrics.jsonl")
    assert [row["rollout/groups"] for row in rows] == [6, 6, 6]
    assert all(row["rollout/groups_stale"] == 0 for row in rows)
    finish(start(trained, "--train-only", str(sampled)))
    updates = read_jsonl(trained / "updates.jsonl")
    assert updates[0]["rollout/engine_gap_mean"] < 1e-4
    assert not (trained / "logs").exists()


def test_a_server_that_cannot_start_is_shown(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "--rollout.sglang.flags", "nonsense")
    output = process.communicate(timeout=900)[0].decode()
    assert process.returncode != 0
    assert "unrecognized arguments: nonsense" in output


@pytest.mark.slow
def test_colocated_servers_train_evaluate_and_end(tmp_path: Path) -> None:
    """They read the weights from the ranks' memory: the folder of the first ones is gone. The last step is
    evaluated, so engines have the GPUs when the run comes to its export. (By disk: test_chaos.py.)"""
    run_dir, suite = tmp_path / "run", tmp_path / "sums.jsonl"
    suite.write_text("".join((ROOT / "recipes/demo/eval.jsonl").read_text().splitlines(keepends=True)[:10]))
    evaluated = ("--evaluation.every=3", f"--evaluation.suites={suite}")
    flags = ("--rollout.sglang.servers=2", "--rollout.sglang.colocated", "--parallel.offload")
    by_ipc = ("--rollout.sglang.sync=ipc", "--rollout.sglang.bucket-mb=0.1")
    output = finish(start(run_dir, *flags, *by_ipc, *evaluated, "--parallel.data=2"))
    assert "step 3/3" in output
    assert output.count("engine ready") == 2
    assert (run_dir / "export/model.safetensors").exists()
    kinds = [row["kind"] for row in read_jsonl(run_dir / "events.jsonl")]
    assert kinds.count("evaluation") == 2  # before the first step, and after the last
    assert kinds.count("digests_compared") == 1
    troubles = {"server_ended", "memory_kept", "engine_lost", "handover_failed", "engine_refused"}
    assert not (troubles | {"digests_not_compared"}) & set(kinds)
    assert not list((run_dir / "weights").iterdir())
    for row in read_jsonl(run_dir / "metrics.jsonl"):
        assert row["rollout/engine_gap_mean"] < 1e-4
        assert row["time/wake_s"] > 0
    assert servers_of(run_dir) == []
