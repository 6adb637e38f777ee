"""Rows of a dataset for an agent program with prompts of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.environment import PROMPT_TOOLS, Reply, Task
from bapo_megatron.environment.adapters import agent_rows
from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
from tests.support.scripted_episodes import play

pytestmark = pytest.mark.integration

AGENT = Path(__file__).parents[2] / "support/agent_program.py"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TASK = Task([{"role": "user", "content": "Guess my number."}], ground_truth="6")


@pytest.mark.parametrize("arguments", [[], ["tools"]])
def test_rows_whose_prompts_are_what_a_program_asks_first(arguments: list[str], tmp_path: Path) -> None:
    """In a run it gets the problem, as it did then, and its first request is the row's prompt."""
    briefed = tmp_path / "briefed.py"
    text = AGENT.read_text().replace("[*task[", '[{"role": "developer", "content": "Be brief."}, *task[')
    text = text.replace("[{}]", json.dumps(TOOLS))
    briefed.write_text(text)
    command = [sys.executable, str(briefed), *arguments]
    problems, output = tmp_path / "problems.jsonl", tmp_path / "rows.jsonl"
    problem = {"prompt": TASK.messages, "reward_model": {"ground_truth": "6"}, "extra_info": {"n": 1}}
    problems.write_text(json.dumps(problem) + "\n")
    agent_rows.main([str(problems), str(output), "--", *command])
    row = json.loads(output.read_text())
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, *TASK.messages]
    assert row["extra_info"]["n"] == 1
    assert row["extra_info"].get(PROMPT_TOOLS) == (TOOLS if arguments else None)
    task = replace(TASK, messages=row["prompt"], extra_info=row["extra_info"])
    assert play(EndpointEnvironment, task, {"command": command}, ["6"]) == [Reply(None, reward=1.0)]
    with pytest.raises(SystemExit, match="2"):
        agent_rows.main([str(problems), str(tmp_path / "none"), "--", sys.executable, "-c", "pass"])


def test_no_file_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The problems themselves, say, or a dataset that a run reads; before any program starts."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"prompt": TASK.messages}) + "\n")
    before, never = problems.read_text(), tmp_path / "started"
    command = ["--", sys.executable, "-c", f"open({str(never)!r}, 'w')"]
    with pytest.raises(SystemExit, match="2"):
        agent_rows.main([str(problems), str(problems), *command])
    assert "problems.jsonl exists: name another file" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        agent_rows.main([str(problems), str(tmp_path / "no/rows.jsonl"), *command])
    assert "does not exist; make it" in capsys.readouterr().err
    problems.with_name("odd.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="2"):
        agent_rows.main([str(tmp_path / "odd.jsonl"), str(tmp_path / "rows.jsonl"), *command])
    assert "prompt is missing" in capsys.readouterr().err
    assert problems.read_text() == before
    assert not never.exists()
