"""A run of an agent program whose conversations form a tree, killed while two of them are asked at a time."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.rollout.sampler.step_batches import read_step
from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.e2e.test_environment import records
from tests.support.forked_commands import ROOT
from tests.support.short_runs import LIMIT_S, audited, finish, start

pytestmark = pytest.mark.e2e

AGENT = str(ROOT / "tests/support/forking_agent.py")


@pytest.mark.slow
def test_branches_over_a_kill(tmp_path: Path) -> None:
    """Each sampled token is in one row's mask, and each turn of the journal is sampled once."""
    hold, run_dir = tmp_path / "hold", tmp_path / "run"
    settings = {"command": [sys.executable, AGENT, str(hold)]}
    flags = (
        "--steps=1",
        "--rollout.drop-uniform-groups=False",
        "--rollout.prompts-per-step=2",
        "--algorithm.updates-per-epoch=1",
        "--rollout.group-size=2",
        "--rollout.max-response-tokens=200",
        "--environment.function=bapo_megatron.environment.adapters.endpoint:EndpointEnvironment",
        f"--environment.settings={json.dumps(settings)}",
        "--environment.max-turns=6",
        "--environment.history=sampled",
    )
    hold.touch()
    with audited(run_dir):
        process = start(run_dir, *flags)
        deadline = time.monotonic() + LIMIT_S
        while len(given(run_dir)) < 8:  # both critics of all responses are asked
            assert process.poll() is None, process.communicate()[0].decode()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        hold.unlink()
        finish(start(run_dir, *flags))
    for step, row in enumerate(read_jsonl(run_dir / "metrics.jsonl"), 1):
        assert row["environment/branches_mean"] == 4
        assert row["environment/turns_mean"] == 5
        assert row["rollout/engine_gap_max"] < 1e-3, "each row's context is what its tokens were sampled from"
        batch = read_step(run_dir / "journal", step)
        rows = [one for group in batch.groups for one in group.rollouts]
        assert len(rows) == 2 * 2 * 4
        trained = sum(int(np.sum(one.loss_mask_R)) for one in rows if one.loss_mask_R is not None)
        trained += sum(len(one.token_ids_R) for one in rows if one.loss_mask_R is None)
        assert trained == batch.metrics["rollout/tokens"]


def given(run_dir: Path) -> set[tuple[int, int, int]]:
    """Group, sample and place of each answer in the journal."""
    parts = [part for one in records(run_dir) if one.kind == "given" for part in one.fields["parts"]]
    return {(part[0], part[3], part[4]) for part in parts}
