"""Runs of a mixture of experts at EP 2: killed and continued bit for bit; sampled by a real SGLang server."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang.server_process import sglang_python
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.checks import EXPERT_NAMES
from tests.support.forked_commands import ROOT, ForkedCommand, start_bapo
from tests.support.metrics import results
from tests.support.models import EXPERT_HYBRID, save_tiny_model
from tests.support.short_runs import LIMIT_S, SUMS, exported, finish, wait_for_steps

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHORT = (
    SUMS,
    "--steps=4",
    "--checkpoint.every=2",
    *("--evaluation.every=0", "--reward.workers=1"),
    "--rollout.prompts-per-step=4",
    "--rollout.group-size=4",
    "--rollout.max-response-tokens=48",
)
REPLAY = "--rollout.route-replay=replay"


def start(run_dir: Path, *flags: str) -> ForkedCommand:
    return start_bapo("train", "recipes/demo_moe_cpu.py", *SHORT, f"--run-dir={run_dir}", *flags)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with routes that was left alone."""
    finish(start(folder := tmp_path_factory.mktemp("replayed"), REPLAY))
    return folder


def test_a_killed_run_of_experts_continues_bit_for_bit(replayed: Path, tmp_path: Path) -> None:
    """With routes; without them the state that comes back is the same: test_checkpoints_of_kinds.py."""
    killed = tmp_path / "killed"
    process = start(killed, REPLAY)
    wait_for_steps(process, killed, 3)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert "resume" in finish(start(killed, REPLAY))
    for log in ("metrics.jsonl", "updates.jsonl"):
        assert results(killed, log) == results(replayed, log)
    same = exported(killed)
    assert all(torch.equal(same[name], tensor) for name, tensor in exported(replayed).items())


def test_a_server_samples_from_the_experts_that_were_sent_and_returns_their_routes(tmp_path: Path) -> None:
    """Asynchronously, so that weights change while responses are sampled. Float32: the routers agree.

    Digests of all tensors are compared. (By disk: tests/contract/test_sent_digests.py.)
    """
    try:
        sglang_python()
    except ConfigError:
        pytest.skip("SGLang is not installed: make sglang")
    server = ("--rollout.engine=sglang", "--rollout.sglang.servers=1", "--rollout.sglang.sync=broadcast")
    more = ("--rollout.max-staleness=1", "--rollout.segment-tokens=16", "--steps=3")
    finish(start(tmp_path, *server, REPLAY, *more))
    kinds = [event["kind"] for event in read_jsonl(RunPaths(tmp_path).events)]
    assert "digests_compared" in kinds
    assert not {"digests_not_compared", "engine_lost", "broadcast_failed", "routes_differ"} & set(kinds)
    assert read_jsonl(RunPaths(tmp_path).metrics)[0]["rollout/engine_gap_mean"] < 1e-4
    rows = [row for row in read_jsonl(RunPaths(tmp_path).updates) if row["policy/tokens"]]
    assert rows[0]["routes/engine_mismatch"] < 0.01
    for row in rows:
        assert row["routes/known"] == 1.0
        assert row["routes/mismatch"] < 0.2
        assert row["routes/unknown_tokens"] > 0


def test_stored_routes_are_replayed_at_another_layout_and_needed(replayed: Path, tmp_path: Path) -> None:
    finish(start(own := tmp_path / "own", "--steps=1"))  # by the routers' own choices, as by default
    [alone, *_] = read_jsonl(RunPaths(own).updates)
    assert alone["policy/grad_norm"] > 0
    assert alone.keys() >= {*EXPERT_NAMES}
    assert "routes/known" not in alone
    again = (f"--rollout.replay={replayed}", "--steps=2")
    finish(start(tmp_path / "again", *again, REPLAY, "--parallel.data=1", "--parallel.expert=1"))
    found, theirs = (list(read_jsonl(RunPaths(run).updates)) for run in (tmp_path / "again", replayed))
    assert found[-1]["step"] == 2
    for ours, other in zip(found, (row for row in theirs if row["step"] <= 2), strict=True):
        assert ours["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=1e-3)
        assert ours["routes/known"] == other["routes/known"] == 1.0
        for name in EXPERT_NAMES:
            assert ours[name] == pytest.approx(other[name], rel=1e-2), name
        assert 1.0 <= ours["experts/imbalance_mean"] <= ours["experts/imbalance_max"]
    refused = start(tmp_path / "refused", f"--rollout.replay={own}", "--steps=1", REPLAY)
    said = refused.communicate(timeout=LIMIT_S)[0].decode()
    assert refused.returncode == 2
    assert f"rollout.replay={own} has no routes of step 1" in said


def test_a_hybrid_with_experts_trains_on_its_own_routes(tmp_path: Path) -> None:
    """Gated DeltaNet, and a shared expert: the embedded engine samples from each version of the weights."""
    folder = save_tiny_model(EXPERT_HYBRID, tmp_path / "model", vocab_size=264, eos_token_id=258)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(ROOT / "recipes/demo/policy_moe" / name, folder)
    own = f"--model.hf-path={folder}", "--reward.function=tests.support.reward_functions:is_even"
    few = "--steps=2", "--rollout.max-response-tokens=24"
    finish(start(tmp_path / "run", REPLAY, *own, *few))
    updates = list(read_jsonl(RunPaths(tmp_path / "run").updates))
    assert {row["step"] for row in updates} == {1, 2}
    for row in updates:
        assert row["policy/grad_norm"] > 0
        assert row["routes/known"] == 1.0
        assert row["routes/mismatch"] < 0.01
    for row in read_jsonl(RunPaths(tmp_path / "run").metrics):
        assert row["rollout/engine_gap_mean"] < 1e-5
    trained = exported(tmp_path / "run")
    assert trained.keys() == load_file(folder / "model.safetensors").keys()
