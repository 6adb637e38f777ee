"""Runs with a judge and with a teacher behind an endpoint: they train, stop without it, and continue."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
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
from tests.support.forked_commands import ROOT
from tests.support.judge_server import JudgeServer, completion, judge_server, says
from tests.support.short_runs import finish, output_of, start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY = "sk-never-stored-4711"
TEMPLATE = "{ground_truth}|{response}"


async def compare(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Right is a response that names the ground truth; one call in four has no answer at first."""
    if len(SEEN) % 4 == 3:
        SEEN.append("busy")
        return web.Response(status=429)
    truth, _, response = body["messages"][0]["content"].partition("|")
    SEEN.append(response)
    verdict = "Score: 1" if re.search(rf"\b{truth}\b", response) else "Score: 0"
    return await says(completion(verdict))(body, request)


SEEN: list[str] = []


def flags(server: JudgeServer | None, **more: Any) -> list[str]:
    url = server.url if server else "http://127.0.0.1:9/v1"  # the port of `discard`: nobody listens
    settings = {"url": url, "model": "m", "template": TEMPLATE, "api_key_env": "JUDGE_KEY", **more}
    return ["--reward.function=llm_judge", "--reward.settings", json.dumps(settings)]


def test_a_run_is_scored_by_a_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    run_dir = tmp_path / "run"
    SEEN.clear()

    absent = start(run_dir, *flags(None, give_up_s=1.0), "--steps=1")
    output = output_of(absent)
    assert absent.returncode == 3, output[-3000:]
    assert "no server took a connection for 1 s: http://127.0.0.1:9/v1/chat/completions" in output

    with judge_server(says({"error": f"no such key: {KEY}"}, 401)) as wrong:
        refused = start(run_dir, *flags(wrong), "--steps=1")
        output += output_of(refused)
    assert refused.returncode == 2, output[-3000:]
    assert "all 24 scores of the first step failed" in output
    assert "endpoint: " in output
    failed = [row for row in read_jsonl(run_dir / "events.jsonl") if row["kind"] == "reward_failed"]
    assert (failed[0]["failure"], failed[0]["count"]) == ("endpoint", 1)
    assert "HTTP 401" in failed[0]["detail"]

    with judge_server(compare) as server:  # at another port: the same run
        output += finish(start(run_dir, *flags(server), "--steps=1"))
        assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in server.headers)
        first_asked = len(server.bodies)
        output += finish(start(run_dir, *flags(server, concurrency=2), "--steps=2"))
        assert len(server.bodies) > first_asked
    rows = list(read_jsonl(run_dir / "metrics.jsonl"))
    assert [row["reward/failures"] for row in rows] == [0, 0]
    assert 0 < rows[0]["reward/mean"] < 1
    assert "busy" in SEEN

    other = start(run_dir, *flags(None, template="{response}"), "--steps=3")
    output += output_of(other)
    assert other.returncode == 2
    assert "reward.settings: {" in output
    stored = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not [path for path in stored if KEY.encode() in path.read_bytes()]
    assert KEY not in output


TEACHER = ROOT / "recipes/demo/policy"


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
    environment = server_environment(cuda=False) | {"OMP_NUM_THREADS": "1"}
    server = ServerProcess(command, environment, url, tmp_path / "teacher.log")
    server.wait_ready()
    yield server
    server.stop(seconds=1)


def test_a_policy_learns_from_a_teacher_and_again_from_the_journal(
    teacher: ServerProcess, tmp_path: Path
) -> None:
    run_dir, url = tmp_path / "run", teacher.url
    flags = (
        *("--steps=2", f"--model.hf-path={ROOT / 'recipes/demo/policy_rambles'}"),
        "--rollout.drop-uniform-groups=False",
        *("--algorithm.distillation.coefficient=0.5", f"--algorithm.distillation.urls={url}"),
    )
    finish(start(run_dir, *flags))
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    batch = read_step(run_dir / "journal", 1)
    assert len(batch.groups) == 6
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
    finish(start(replayed, *flags, f"--rollout.replay={run_dir}"))
    names = ("distillation/k1", "policy/loss", "policy/grad_norm")
    again = read_jsonl(replayed / "updates.jsonl")
    assert [[row[name] for name in names] for row in again] == [
        [row[name] for name in names] for row in updates
    ]
