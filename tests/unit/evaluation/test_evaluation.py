"""`bapo eval` but for its statistics: suites, scores, files, asking engines, comparisons, options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.checkpoint.run_directory import known_suites
from bapo_megatron.config import (
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SglangConfig,
    load_recipe,
)
from bapo_megatron.data.problem_sets import Suite, load_suite
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation import run as evaluation_run
from bapo_megatron.evaluation.command import results_text
from bapo_megatron.evaluation.options import EvalOptions
from bapo_megatron.evaluation.responses import (
    FORMAT,
    RESPONSES,
    SETTINGS,
    SUMMARY,
    open_folder,
    read_responses,
)
from bapo_megatron.evaluation.run import evaluate, find_checkpoint, hf_model, model_digest
from bapo_megatron.evaluation.scoring import ScoredResponse
from bapo_megatron.evaluation.suite_task import SuiteTask, open_task
from bapo_megatron.evaluation.unjudged import score_again, unjudged_responses
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.hf.weight_files import INDEX
from bapo_megatron.trainer.suites import load_suites
from bapo_megatron.types import Prompt
from checkpoints_tools.hf_to_megatron import to_megatron
from tests.unit.evaluation.test_suite_sampler import Equal

MODEL = Path(__file__).parents[3] / "recipes/demo/policy"
ROWS = [
    {"data_source": "t", "prompt": [{"role": "user", "content": f"{n}+1="}],
     "reward_model": {"ground_truth": str(n + 1)}, "extra_info": {}}
    for n in range(3)
]  # fmt: skip


def judged(problem: int, sample: int, correct: bool, answer: str | None = "1", **more: Any) -> ScoredResponse:
    fields: dict[str, Any] = {"tokens": 10, "finish_reason": "stop", **more}
    return ScoredResponse(problem, sample, correct, answer, **fields)


def write_suite(folder: Path, rows: Sequence[Any] = ROWS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FREE_TEXT = [{**row, "reward_model": {"ground_truth": "Paris, \\frac{ city"}} for row in ROWS]
LONG = {**ROWS[0], "prompt": [{"role": "user", "content": "x" * 99}]}
NO_ANSWER = [{**row, "reward_model": {"ground_truth": "-"}} for row in ROWS]


@pytest.mark.parametrize(
    ("rows", "reward", "says"),
    [
        (None, {}, r"bapo data prepare SOURCE --output .*none"),
        ([*ROWS, LONG], {}, "1 of its prompts have more than max_prompt_tokens=90"),
        (NO_ANSWER, {"reward_function": "math"}, "set reward.function=bapo_"),
        (FREE_TEXT, {}, r"^suite .*texts/data.jsonl, row 0 .*reward_model.ground_truth"),
    ],
)
def test_a_suite_that_cannot_be_asked(tmp_path: Path, rows: Any, reward: dict[str, str], says: str) -> None:
    name = "none" if rows is None else str(write_suite(tmp_path / "texts", rows))
    with pytest.raises(ConfigError, match=says):
        load_suite(name, load_tokenizer(MODEL), 90, tmp_path, **reward)


def run_with_suites(directory: Path, *suites: Path, reward: str = "math") -> RunConfig:
    data = DataConfig(directory / "train.jsonl", max_prompt_tokens=100)
    run = RunConfig("suites", ModelConfig(MODEL), data, run_dir=directory)
    evaluation = EvaluationConfig(every=5, suites=tuple(map(str, suites)))
    return replace(run, evaluation=evaluation, reward=RewardConfig(function=reward))


def test_a_run_that_has_begun_keeps_the_ground_truths_of_its_suites(tmp_path: Path) -> None:
    """Later versions refuse more of them; a suite that is added later is checked."""
    old, tokenizer = write_suite(tmp_path / "texts", FREE_TEXT), load_tokenizer(MODEL)
    metrics = tmp_path / "metrics.jsonl"
    stored = {"format": 2, "config": {"evaluation.suites": [str(old)]}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    metrics.write_text("")
    assert known_suites(tmp_path) == []
    metrics.write_text('{"step": 1}\n')
    [suite] = load_suites(run_with_suites(tmp_path, old), tokenizer)
    assert len(suite.prompts) == 3
    new = write_suite(tmp_path / "new", FREE_TEXT)
    with pytest.raises(ConfigError, match=rf"^suite {new}=.*reward_model.ground_truth"):
        load_suites(run_with_suites(tmp_path, old, new), tokenizer)


def settings(samples: int = 2, **sampling_: Any) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "suite": {"name": "s", "sha256": "1", "problems": 2},
        "model": {"checkpoint": "here", "sha256": "2"},
        "sampling": {"temperature": 1.0, **sampling_},
        "samples": samples,
    }


def row(problem: int, sample: int, correct: bool = True) -> dict[str, Any]:
    return {**asdict(judged(problem, sample, correct)), "text": "\\boxed{1} \ud83d\ude00\n"}


@pytest.mark.parametrize(
    ("truth", "reward", "share"),
    [("7", None, 0.0), ("assert f(1) == 2", None, None), ("7", "package.module:function", None)],
)
def test_programs_have_no_box(tmp_path: Path, truth: str, reward: str | None, share: float | None) -> None:
    """They are in code blocks, so no box says nothing of them; nor does it with a reward of the user's."""
    suite = Suite("s", tmp_path, "1", tuple(Prompt(p, np.array([1]), truth, "t") for p in (0, 1)))
    with open_folder(tmp_path, settings()) as log:
        log.append_all([row(problem, sample) for problem in (0, 1) for sample in (0, 1)])
        task = SuiteTask(suite, tmp_path, settings(), log, [], [])
        metrics = evaluation_run._finish(task, EvalOptions(MODEL, "s", samples=2, reward=reward))
    assert metrics["unanswered"] == share
    assert (metrics["maj@2"] is None) == truth.startswith("assert")  # a box in it is not an answer
    text = results_text({"s": (tmp_path, metrics)})
    assert ("unanswered" in text) == (share is not None)


def test_what_counts_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with open_folder(tmp_path, settings()) as log:
        monkeypatch.setattr("os.fsync", lambda number: synced.append((tmp_path / RESPONSES).stat().st_size))
        log.append_all([row(0, 0), row(1, 0)])
    assert synced == [(tmp_path / RESPONSES).stat().st_size]


def test_other_settings_are_refused_and_more_samples_and_another_release_are_not(tmp_path: Path) -> None:
    other = {**settings(temperature=0.5), "model": {"checkpoint": "m", "sha256": "3"}}
    says = r"model\.sha256: '2' then, '3' now\nsampling\.temperature: 1\.0 then, 0\.5 now"
    with open_folder(tmp_path, {**settings(), "code_version": "0.1"}):
        pass
    with pytest.raises(ConfigError, match=says), open_folder(tmp_path, other):
        pass
    with open_folder(tmp_path, {**settings(samples=4), "code_version": "0.2"}):
        found = json.loads((tmp_path / SETTINGS).read_text())
        assert (found["samples"], found["code_version"]) == (4, "0.2")


@pytest.mark.parametrize("name", [RESPONSES, SUMMARY])
def test_files_that_no_evaluation_wrote_stay(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine, without an end of line")
    refused = pytest.raises(ConfigError, match=rf"holds {name} without {SETTINGS}: name another --output")
    with refused, open_folder(tmp_path, settings()):
        pass
    assert (tmp_path / name).read_text() == "mine, without an end of line"
    assert not (tmp_path / SETTINGS).exists()


class Pool(Equal):
    """In place of the pool of rewards."""

    def __init__(self, *_of: object) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


def test_responses_that_could_not_be_scored_are_scored_again_by_their_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that is scored now has another row, which counts; one that fails again stays as it was."""
    monkeypatch.setattr("bapo_megatron.evaluation.unjudged.RewardPool", Pool)
    config = load_recipe(MODEL.parents[1] / "demo_cpu.py", RunConfig)
    prompts = [Prompt(n, np.array([1]), truth, "t") for n, truth in enumerate(("1", "2", "broken"))]
    with open_folder(tmp_path, settings()) as log:
        log.append_all([row(0, 0, False), *({**row(n, 0, False), "failure": "died"} for n in range(3))])
        unjudged = unjudged_responses(log.path, 1)
        assert [(one.problem, one.failure) for one, _ in unjudged] == [(n, "died") for n in range(3)]
        score_again("s", unjudged, prompts, config, log, lambda *_, **__: None)
        assert capsys.readouterr().out == "s: 2 of 3 could be scored now\n"
        found = [(one.correct, one.failure) for one in read_responses(log.path, 1)]
        assert found == [(True, None), (False, None), (False, "died")]  # the box in all texts is 1
        [(left, text)] = unjudged_responses(log.path, 1)
        assert (left.problem, text) == (2, "\\boxed{1} \U0001f600\n")


@pytest.mark.parametrize("function", [None, "package.module:Environment"])
def test_what_is_rescored(function: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is scored again, and sampled again if an environment had answered it, which gave the reward."""
    suite = Suite("s", tmp_path, "1", tuple(Prompt(p, np.array([1]), "1", "t") for p in (0, 1)))
    options = EvalOptions(MODEL, "s", samples=1, environment=EnvironmentConfig(function))
    for _ in range(2):
        with ExitStack() as opened:
            task = open_task(opened, suite, options, {"sha256": "2"}, tmp_path)
            if not capsys.readouterr().out:
                assert (len(task.places), task.unjudged) == (2, [])
                task.log.append_all([row(0, 0), {**row(1, 0, False), "failure": "environment"}])
                continue
            assert task.places == ([] if function is None else [(1, 0)])
            assert len(task.unjudged) == (function is None)


def test_a_checkpoint_of_megatron_is_converted_once(tmp_path: Path) -> None:
    to_megatron(MODEL, tmp_path / "converted")
    location = find_checkpoint(tmp_path / "converted", "latest")
    model = hf_model(location, None, tmp_path / "out")
    assert model.folder == tmp_path / "out/model"
    weights = model.folder / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    assert hf_model(location, None, tmp_path / "out") == model
    assert weights.stat().st_mtime_ns == stamp, "it was not made again"
    (tmp_path / "converted").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="was made of .*converted.*give another --output"):
        hf_model(find_checkpoint(tmp_path / "moved", "latest"), None, tmp_path / "out")


def test_the_directory_of_a_run_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    with pytest.raises(ConfigError, match="is the directory of a run"):
        evaluate(EvalOptions(checkpoint=MODEL, suite="s", output=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_the_digest_of_a_model_is_of_what_it_says(tmp_path: Path) -> None:
    names = ("config.json", "model.safetensors", "chat_template.jinja")
    for name in names:
        (tmp_path / name).write_text("{}")
    digests = {model_digest(tmp_path)}
    for name in ("README.md", "consolidated.safetensors"):
        (tmp_path / name).write_text("no matter")
        assert model_digest(tmp_path) in digests
    for name in names:
        (tmp_path / name).write_text("other")
        digests.add(model_digest(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"weight": "model-1.safetensors"}}')
    digests.add(model_digest(tmp_path))
    assert len(digests) == 5


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_checkpoint(tmp_path, "latest")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"suite": ","}, "names nothing"),
        ({"suite": "a,a"}, "twice"),
        ({"pass_at": (0,)}, "pass_at=0"),
        ({"temperature": 0.0}, "set samples=1"),
        ({"engine": "sglang", "sglang": SglangConfig(python=Path("/no/python"))}, "make sglang"),
        ({"max_response_tokens": 10**6}, "--max-response-tokens"),
    ],
)
def test_bad_options(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    suite = str(write_suite(tmp_path / "s"))
    options = {"checkpoint": MODEL, "suite": suite, "output": tmp_path / "out", **changes}
    with pytest.raises(ConfigError, match=says):
        evaluate(EvalOptions(**options))
    assert not (tmp_path / "out").exists()


def test_a_short_judgement_limit_holds_for_each_test_too() -> None:
    options = EvalOptions(MODEL, "s", judge_limit_s=2.0)
    reward = options.run_config(MODEL, Path("out"), 10).reward
    assert (reward.time_limit_s, reward.code_case_limit_s) == (2.0, 2.0)
    assert replace(options, samples=4, pass_at=(4, 1, 16)).wanted_pass_at == (1, 4)
