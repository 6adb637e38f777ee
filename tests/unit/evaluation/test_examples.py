"""`bapo eval compare --examples`: problems with the responses of both evaluations."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.cli import run
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.command import examples_text
from bapo_megatron.evaluation.responses import FORMAT, RESPONSES, open_folder, read_responses, write_summary
from bapo_megatron.evaluation.scoring import ScoredResponse, score

QUESTIONS = ("1 + 1 =", "2 + 2 =", "3 + 3 =")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of three sums, each behind a system message."""
    path = tmp_path / "sums/data.jsonl"
    path.parent.mkdir()
    system = {"role": "system", "content": "Be brief."}
    rows = [{"prompt": [system, {"role": "user", "content": text}]} for text in QUESTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluation(folder: Path, suite: Path, texts: dict[tuple[int, int], str], right: str) -> Path:
    """A finished evaluation with these responses, by problem and sample; those that are ``right`` are so."""
    digest = hashlib.sha256(suite.read_bytes()).hexdigest()
    about: dict[str, Any] = {
        "format": FORMAT,
        "suite": {"name": "sums", "path": str(suite), "sha256": digest, "problems": len(QUESTIONS)},
        "sampling": {"temperature": 1.0},
        "samples": 2,
    }
    with open_folder(folder / "sums", about) as log:
        for (problem, sample), text in texts.items():
            judged = ScoredResponse(problem, sample, text == right, None, 3, "stop")
            log.append_all([{**asdict(judged), "text": text}])
    responses = read_responses(folder / "sums" / RESPONSES, 2)
    write_summary(folder / "sums", about, score(responses))
    return folder


def both(tmp_path: Path, suite: Path) -> tuple[Path, Path]:
    """Responses are stored in any order: here the second samples come first."""
    places = [(problem, sample) for sample in (1, 0) for problem in (2, 0, 1)]
    a = evaluation(tmp_path / "a", suite, {place: f"perhaps {place}" for place in places}, "perhaps (1, 0)")
    b = evaluation(tmp_path / "b", suite, {place: f"surely {place}" for place in places}, "surely (0, 0)")
    return a, b


def test_the_first_problems_with_the_first_response_of_each(tmp_path: Path, suite: Path) -> None:
    text = examples_text(*both(tmp_path, suite), 2)
    assert text == (
        "sums, problem 0: 1 + 1 =\n  A, wrong: perhaps (0, 0)\n  B, right: surely (0, 0)\n"
        "sums, problem 1: 2 + 2 =\n  A, right: perhaps (1, 0)\n  B, wrong: surely (1, 0)\n"
    )
    assert examples_text(tmp_path / "a", tmp_path / "b/sums", 99).count("problem") == 3


def test_the_command_prints_them(tmp_path: Path, suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = map(str, both(tmp_path, suite))
    assert run(["eval", "compare", a, b, "--examples", "1"]) == 0
    assert capsys.readouterr().out.endswith(
        "sums, problem 0: 1 + 1 =\n  A, wrong: perhaps (0, 0)\n  B, right: surely (0, 0)\n"
    )
    assert run(["eval", "compare", a, b]) == 0
    assert "problem 0" not in capsys.readouterr().out
    for flags, says in (
        (["--examples", "-1"], "examples=-1"),
        (["--examples", "1", "--json"], "leave --json"),
    ):
        assert run(["eval", "compare", a, b, *flags]) == 2
        assert says in capsys.readouterr().err


def test_a_text_is_one_line_however_long_and_whatever_it_holds(tmp_path: Path, suite: Path) -> None:
    long = "x" * 300 + "MIDDLE" + "y" * 300
    a = evaluation(
        tmp_path / "a", suite, {(n, s): f"one\ntwo \x1b[2J{n}{s}" for n in range(3) for s in (0, 1)}, ""
    )
    b = evaluation(tmp_path / "b", suite, {(n, s): long for n in range(3) for s in (0, 1)}, "")
    lines = examples_text(a, b, 1).splitlines()
    assert lines[1] == "  A, wrong: one ⏎ two \\x1b[2J00"
    assert lines[2] == f"  B, wrong: {'x' * 250} [...] {'y' * 250}"


def test_a_suite_that_is_not_what_was_asked(tmp_path: Path, suite: Path) -> None:
    a, b = both(tmp_path, suite)
    content = suite.read_text()
    suite.write_text(content + "\n")
    with pytest.raises(ConfigError, match="data.jsonl has changed since .*a/sums was asked from it"):
        examples_text(a, b, 1)
    suite.unlink()
    with pytest.raises(ConfigError, match="data.jsonl, which .*a/sums was asked from, is gone"):
        examples_text(a, b, 1)
    summary = a / "sums/summary.json"
    about = json.loads(summary.read_text())
    del about["suite"]["path"]
    summary.write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="an earlier version wrote it; run `bapo eval` again"):
        examples_text(a, b, 1)
