"""Runs of a hybrid (Gated DeltaNet beside attention): the embedded engine and real SGLang servers sample from
the weights that its trainer hands over, of a text model and of a multi-modal one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang.server_process import sglang_python
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from tests.support.forked_commands import start_bapo
from tests.support.short_runs import SUMS, exported, finish
from tests.unit.data.test_demo_task import make_task

pytestmark = pytest.mark.e2e

SHORT = (
    SUMS,
    "--steps=2",
    "--checkpoint.every=2",
    *("--evaluation.every=0", "--reward.workers=1"),
    "--rollout.prompts-per-step=4",
    "--rollout.group-size=4",
    "--rollout.max-response-tokens=48",
    "--reward.function=tests.support.reward_functions:odd",  # which random responses earn, too
    "--rollout.segment-tokens=24",  # later segments begin behind a prefix of the weights before, too
    "--optimizer.lr=1e-3",  # so that weights of an earlier version show
    "--optimizer.warmup-updates=0",
)
NEVER = {"digests_not_compared", "engine_lost", "broadcast_failed", "handover_failed", "engine_gap"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid of the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("policy")
    make_task.make_model(folder, make_task.make_tokenizer(folder), hybrid=True)
    return folder


@pytest.fixture(scope="module")
def expert_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid with experts, a tensor for each."""
    folder = tmp_path_factory.mktemp("experts")
    make_task.make_model(folder, make_task.make_tokenizer(folder), hybrid=True, experts=4)
    return folder


def check_run(run_dir: Path, policy: Path, *flags: str) -> None:
    """A short run, whose engine's log-probs are the trainer's."""
    own = (f"--model.hf-path={policy}", f"--run-dir={run_dir}")
    finish(start_bapo("train", "recipes/demo_hybrid_cpu.py", *SHORT, *own, *flags))
    kinds = {event["kind"] for event in read_jsonl(RunPaths(run_dir).events)}
    assert not NEVER & kinds
    updates = [row for row in read_jsonl(RunPaths(run_dir).updates) if row["policy/tokens"]]
    assert {row["step"] for row in updates} == {1, 2}
    for step in (1, 2):
        first = next(row for row in updates if row["step"] == step)
        assert first["rollout/engine_gap_mean"] < 1e-4
        assert first["staleness/mean"] == 0
    assert updates[-1]["policy/ratio_gap"] > 1e-3  # the updates have moved the weights by more than that


def test_the_embedded_engine_samples_what_a_hybrid_trains_on(policy: Path, tmp_path: Path) -> None:
    check_run(tmp_path, policy)
    assert "full_attention_interval" not in json.loads((policy / "config.json").read_text())
    assert json.loads((tmp_path / "export/config.json").read_text())["full_attention_interval"] == 2
    before, after = load_file(policy / "model.safetensors"), exported(tmp_path)
    assert before.keys() == after.keys()
    assert not [name for name in before if torch.equal(before[name], after[name])]


def save_multimodal(policy: Path, folder: Path) -> Path:
    """The policy as a folder of the hub: the text model under a prefix, a tower and MTP beside it."""
    shutil.copytree(policy, folder)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(policy / "model.safetensors").items()
    }
    tower = {"model.visual.patch_embed.proj.bias": torch.ones(4), "mtp.fc.weight": torch.ones(2, 2)}
    save_file({**tensors, **tower}, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((policy / "config.json").read_text())
    whole = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "float32",
        "tie_word_embeddings": False,
        "eos_token_id": text["eos_token_id"],
        "text_config": text,
        "vision_config": {"depth": 1},
    }
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


IN_TURNS = ("--rollout.sglang.colocated", "--parallel.offload")


@pytest.mark.slow
def test_servers_sample_from_the_hybrid_that_was_handed_over(policy: Path, tmp_path: Path) -> None:
    """A multi-modal one, by ipc. (A text model's, by broadcast: below; by disk: tests/contract.)"""
    try:
        sglang_python()
    except ConfigError:
        pytest.skip("SGLang is not installed: make sglang")
    policy = save_multimodal(policy, tmp_path / "policy")
    server = ("--rollout.engine=sglang", "--rollout.sglang.servers=1", "--rollout.sglang.sync=ipc")
    check_run(tmp_path / "run", policy, *server, *IN_TURNS)
    kinds = [event["kind"] for event in read_jsonl(RunPaths(tmp_path / "run").events)]
    assert "digests_compared" in kinds, "servers were not held to what was sent"
    before, after = load_file(policy / "model.safetensors"), exported(tmp_path / "run")
    assert before.keys() == after.keys()
    untrained = [name for name in before if name.startswith(("model.visual", "mtp"))]
    assert [name for name in before if torch.equal(before[name], after[name])] == untrained


@pytest.mark.slow
def test_servers_sample_from_the_experts_that_were_handed_over(expert_policy: Path, tmp_path: Path) -> None:
    """By broadcast. (Experts by disk: tests/contract/test_sent_digests.py; hybrids by disk: above.)"""
    try:
        sglang_python()
    except ConfigError:
        pytest.skip("SGLang is not installed: make sglang")
    server = ("--rollout.engine=sglang", "--rollout.sglang.servers=1", "--rollout.sglang.sync=broadcast")
    server += ("--rollout.route-replay=replay",)
    check_run(tmp_path, expert_policy, *server)
    assert "digests_compared" in [event["kind"] for event in read_jsonl(RunPaths(tmp_path).events)]
    first = read_jsonl(RunPaths(tmp_path).updates)[0]
    assert first["routes/mismatch"] == 0  # the routes are those of the trainer's own routers
