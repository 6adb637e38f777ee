"""The demo with a teacher on a real SGLang server: log-probs, the journal, a run without the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang.server_process import (
    ServerProcess,
    server_command,
    server_environment,
    sglang_python,
)
from bapo_megatron.rollout.sampler.step_batches import read_step
from bapo_megatron.runtime.distributed import free_port
from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.forked_commands import ROOT, start_bapo

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEACHER = ROOT / "recipes/demo/policy"
SHORT = ["--steps=2", "--rollout.prompts-per-step=4", "--rollout.group-size=4", "--evaluation.every=0"]
SHORT += ["--reward.workers=1"]


@pytest.fixture
def teacher(tmp_path: Path) -> Iterator[ServerProcess]:
    try:
        python = sglang_python()
    except ConfigError as error:
        pytest.skip(str(error))
    port = free_port()
    # Without a limit SGLang's cache takes a share of the machine's memory: 11 of 24 GB, beside other tests.
    flags = ["--dtype", "float32", "--max-total-tokens", "40000"]
    command = server_command(python, TEACHER, "127.0.0.1", port, cuda=False, flags=flags)
    command.remove("--skip-tokenizer-init")
    url = f"http://127.0.0.1:{port}"
    server = ServerProcess(command, server_environment(cuda=False, threads=1), url, tmp_path / "teacher.log")
    server.wait_ready()
    yield server
    server.stop(seconds=1)


def trained(run_dir: Path, *flags: str) -> str:
    command = start_bapo("train", "recipes/demo_cpu.py", *SHORT, f"--run-dir={run_dir}", *flags)
    output = command.communicate(timeout=900)[0].decode()
    assert command.returncode == 0, output[-3000:]
    return output


def test_a_policy_learns_from_a_teacher_and_again_from_the_journal(
    teacher: ServerProcess, tmp_path: Path
) -> None:
    run_dir, url = tmp_path / "run", teacher.url
    flags = ("--algorithm.distillation.coefficient=0.5", f"--algorithm.distillation.urls={url}")
    trained(run_dir, *flags)
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    batch = read_step(run_dir / "journal", 1)
    assert len(batch.groups) == 4
    for group in batch.groups:
        for one in group.rollouts:
            ids = np.concatenate([group.prompt.token_ids_P, one.token_ids_R]).astype(np.int64)
            with torch.inference_mode():
                logits = model(torch.from_numpy(ids)[None]).logits[0].double()
            log_probs = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:])]
            assert one.teacher_log_probs_R is not None
            expected_R = log_probs[-len(one.token_ids_R) :].numpy()
            np.testing.assert_allclose(one.teacher_log_probs_R, expected_R, rtol=0, atol=1e-4)
    updates = read_jsonl(run_dir / "updates.jsonl")
    assert all(row["distillation/k3"] > 0.01 and row["distillation/loss"] > 0 for row in updates)
    teacher.stop(seconds=1)
    replayed = tmp_path / "replayed"
    trained(replayed, *flags, f"--rollout.replay={run_dir}")
    names = ("distillation/k1", "policy/loss", "policy/grad_norm")
    again = read_jsonl(replayed / "updates.jsonl")
    assert [[row[name] for name in names] for row in again] == [
        [row[name] for name in names] for row in updates
    ]
