"""A run whose reward is a judge behind an HTTP endpoint: it trains, stops without it, and goes on at another
address."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bapo_megatron.runtime.jsonl_log import read_jsonl
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
    return ["--reward.function=llm_judge", "--reward.settings", json.dumps(settings), "--parallel.data=2"]


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
