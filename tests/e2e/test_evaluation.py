"""`bapo eval` and `bapo data prepare` as a user runs them, with the demo's policy."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.data.prepare.options import DATA_FILE
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.responses import RESPONSES, SUMMARY
from bapo_megatron.evaluation.run import model_digest
from bapo_megatron.rollout.engines.sglang.server_process import sglang_python
from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.forked_commands import ROOT, ForkedCommand, start_bapo
from tests.support.processes import servers_of

pytestmark = pytest.mark.e2e

POLICY = ROOT / "recipes/demo/policy"
PROBLEMS, SAMPLES = 30, 4
SHORT = ["--samples", str(SAMPLES), "--max-response-tokens", "48", "--temperature", "1", "--dtype", "float32"]
SHORT += ["--judges", "1"]


def finish(process: ForkedCommand, code: int = 0) -> str:
    output = process.communicate(timeout=900)[0].decode()
    assert process.returncode == code, output[-3000:]
    return output


def wait_for_responses(process: ForkedCommand, path: Path, count: int) -> None:
    deadline = time.monotonic() + 900
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()[0].decode()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared by the command, from the demo's sums."""
    folder = tmp_path_factory.mktemp("suites")
    source = folder / "sums.jsonl"
    lines = (ROOT / "recipes/demo/eval.jsonl").read_text().splitlines(keepends=True)
    source.write_text("".join(lines[:PROBLEMS]))
    finish(start_bapo("data", "prepare", source, "--output", folder / "sums", "--no-instruct"))
    assert len(read_jsonl(folder / "sums" / DATA_FILE)) == PROBLEMS
    return folder


def evaluation(suites: Path, output: Path, *flags: str) -> ForkedCommand:
    where = ("--suite", "sums", "--suites", suites, "--output", output)
    return start_bapo("eval", POLICY, *where, *SHORT, *flags)


def whole_responses(folder: Path, samples: int = SAMPLES) -> list[dict[str, Any]]:
    """Every problem and sample, each once."""
    rows = read_jsonl(folder / RESPONSES)
    places = sorted((row["problem"], row["sample"]) for row in rows)
    assert places == [(problem, sample) for problem in range(PROBLEMS) for sample in range(samples)]
    return rows


def test_killed_torn_and_continued(suites: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out/sums"
    process = evaluation(suites, tmp_path / "out", "--max-batch", "8")
    wait_for_responses(process, folder / RESPONSES, 10)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = (folder / RESPONSES).read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    assert before.count(b"\n") < PROBLEMS * SAMPLES
    assert not (folder / SUMMARY).exists()
    with (folder / RESPONSES).open("ab") as file:
        file.write(b'{"problem": 3, "sam')
    output = finish(evaluation(suites, tmp_path / "out", "--max-batch", "8"))
    there = before.count(b"\n")
    assert f"{there} of {PROBLEMS * SAMPLES} responses are there" in output
    assert (folder / RESPONSES).read_bytes().startswith(before)
    rows = whole_responses(folder)
    summary = json.loads((folder / SUMMARY).read_text())
    right = sum(row["correct"] for row in rows) / len(rows)
    assert 0.1 < right < 0.7, f"the demo's policy is right in a third: {output[-500:]}\n{rows[:20]}"
    assert summary["metrics"][f"avg@{SAMPLES}"] == pytest.approx(right)
    assert summary["model"]["sha256"] == model_digest(POLICY)
    for row in rows:
        assert row["answer"] is None or row["answer"] in row["text"].replace(" ", "")

    again = finish(evaluation(suites, tmp_path / "out", "--samples", str(SAMPLES + 1)))
    assert f"sums: {PROBLEMS} problems, {SAMPLES + 1} responses each" in again
    assert f"{PROBLEMS * SAMPLES} of {PROBLEMS * (SAMPLES + 1)} responses are there" in again
    whole_responses(folder, SAMPLES + 1)
    refused = finish(evaluation(suites, tmp_path / "out", "--seed", "1"), 2)
    assert "sampling.seed: 0 then, 1 now" in refused
    compared = finish(start_bapo("eval", "compare", tmp_path / "out", tmp_path / "out"))
    assert "difference +0.0 points" in compared


@pytest.mark.slow
def test_real_servers(suites: Path, tmp_path: Path) -> None:
    try:
        sglang_python()
    except ConfigError as error:
        pytest.skip(str(error))
    finish(evaluation(suites, tmp_path / "out", "--engine", "sglang"))
    rows = whole_responses(tmp_path / "out/sums")
    assert 0.1 < sum(row["correct"] for row in rows) / len(rows) < 0.7
    assert not servers_of(tmp_path / "out")


def test_an_environment(suites: Path, tmp_path: Path) -> None:
    """Two turns, and the environment's reward; what was given is in the text, and is not a length.

    (Of a real server: test_chaos.py.)
    """
    within = ("--environment.function", "tests.support.environments:Twice", "--environment.workers", "1")
    where = ("--max-response-tokens", "160", "--samples", "1", "--engine", "local")
    finish(evaluation(suites, tmp_path / "out", *within, *where))
    rows = whole_responses(tmp_path / "out/sums", samples=1)
    found = Counter(("Sure? " in row["text"], row["finish_reason"], row["failure"]) for row in rows)
    assert found[True, "stop", None] > PROBLEMS / 2, found
    assert found.keys() <= {(True, "stop", None), (True, "length", None), (False, "length", None)}
    assert all(0 < row["tokens"] < 130 for row in rows)
    summary = json.loads((tmp_path / "out/sums" / SUMMARY).read_text())
    assert summary["sampling"]["environment"] == {"function": within[1], "settings": {}, "max_turns": 8}
    refused = evaluation(suites, tmp_path / "out", *where)
    assert "environment" in finish(refused, 2)


def test_a_reward_of_ones_own(suites: Path, tmp_path: Path) -> None:
    """From the data, whose card names it, to the summary; a failing one is told with its traceback."""
    own = "tests.support.reward_functions:is_short"
    lines = (ROOT / "recipes/demo/eval.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "texts.jsonl").write_text("".join(lines[:3]))
    where = tmp_path / "suites/texts"
    finish(start_bapo("data", "prepare", tmp_path / "texts.jsonl", "--output", where, "--reward", own))
    command = ("eval", POLICY, "--suite", where, "--output", tmp_path / "out", *SHORT)
    assert f"was prepared for {own}: add --reward {own}" in finish(start_bapo(*command), 2)
    output = finish(start_bapo(*command, "--reward", own, "--reward-correct", "2"))
    assert "unanswered" not in output
    rows = read_jsonl(tmp_path / "out/texts" / RESPONSES)
    assert len(rows) == 3 * SAMPLES
    assert all(row["correct"] == (len(row["text"]) <= 12) for row in rows)
    summary = json.loads((tmp_path / "out/texts" / SUMMARY).read_text())
    assert summary["reward"] == {"function": own, "correct": 2.0}
    assert summary["metrics"]["unanswered"] is None
