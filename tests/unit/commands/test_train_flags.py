"""``--rollout-only`` and ``--train-only``: the changed recipe, and contradictory flags that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from bapo_megatron import cli
from bapo_megatron.checkpoint.fork_record import ForkSource
from bapo_megatron.checkpoint.run_directory import check_same_run, store_config
from bapo_megatron.commands.cluster.submit import SubmitCommand
from bapo_megatron.commands.train import _tell_summary
from bapo_megatron.commands.train_flags import rollout_only_config, train_flags
from bapo_megatron.config import EvaluationConfig, RolloutConfig, RunConfig, SglangConfig, load_recipe
from bapo_megatron.config.engines import EngineConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.run_paths import RunPaths

RECIPE = Path(__file__).parents[3] / "recipes/demo_cpu.py"


def flags(*words: str) -> tuple[RunConfig, bool]:
    """The run, and whether it samples alone; none of these is a fork."""
    run, samples_only, fork = train_flags("train", [str(RECIPE), *words])
    assert fork is None
    return run, samples_only


def stored(run_dir: Path, *steps: int) -> Path:
    """A run directory that has rollouts of these steps."""
    (run_dir / "journal").mkdir(parents=True)
    for step in steps:
        (run_dir / f"journal/step_{step:06d}.npz").touch()
    return run_dir


def test_without_other_flags_the_recipe_is_unchanged() -> None:
    assert flags("--steps=7") == (flags("steps=7")[0], False)
    assert flags()[0] == load_recipe(RECIPE, RunConfig)
    run, samples_only, fork = train_flags("train", [str(RECIPE), "--fork", "runs/a:7", "--steps=9"])
    assert (run.steps, samples_only, fork) == (9, False, ForkSource(Path("runs/a"), 7))
    assert train_flags("train", [str(RECIPE), "--fork=runs/a"]).fork == ForkSource(Path("runs/a"), None)


def test_sampling_alone_has_a_directory_of_its_own_and_no_evaluations() -> None:
    for words in (("--rollout-only",), ("--rollout-only", "true"), ("--rollout_only",)):
        run, samples_only = flags(*words, "steps=9", "--checkpoint.keep-best=1")
        assert (samples_only, run.steps) == (True, 9)
        assert run.directory == Path("runs/demo_cpu-rollout-only")
        assert not any(run.evaluates(step) for step in range(10))
        run.check()
        assert flags(*words, "--run-dir=here")[0].directory == Path("here")


@pytest.mark.parametrize(
    ("rollout", "alone"),
    [
        ({"engine": "sglang", "sglang": SglangConfig(colocated=True)}, SglangConfig()),
        ({"engine": "sglang", "sglang": SglangConfig(servers=2, sync="broadcast")}, SglangConfig(servers=2)),
        ({"engine": "my.engine:Mine", "custom_engine": EngineConfig(sync="broadcast")}, EngineConfig()),
        ({}, RolloutConfig().engine_config),
    ],
)
def test_engines_without_a_trainer_have_their_gpus_and_need_no_broadcast(
    rollout: dict[str, Any], alone: object
) -> None:
    run = flags()[0]
    best = replace(run.checkpoint, keep_best=1)  # which would need evaluations
    run = replace(
        run, evaluation=EvaluationConfig(every=10), checkpoint=best, rollout=RolloutConfig(**rollout)
    )
    assert rollout_only_config(run).rollout.engine_config == alone


def test_a_job_is_submitted_with_its_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted = []

    def submit(command: SubmitCommand, config: RunConfig, _forked: None) -> str:
        submitted.append((command.flags, config.directory))
        return "7\n"

    monkeypatch.setattr("bapo_megatron.commands.cluster.submit.submit", submit)
    assert cli.run(["submit", str(RECIPE), "--cluster", "x.toml", "--rollout-only"]) == 0
    assert submitted == [(("--rollout-only",), Path("runs/demo_cpu-rollout-only"))]
    printed = capsys.readouterr()
    assert printed.out == "7\n"  # which scripts read
    place = Path("runs/demo_cpu-rollout-only").absolute()
    assert f"job 7 is submitted; run directory {place}\nbapo status {place} " in printed.err
    assert f"bapo cancel {place} " in printed.err


def test_training_alone_makes_no_more_steps_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the run that sampled alone, unless another is named."""
    monkeypatch.chdir(tmp_path)
    source = stored(Path("runs/demo_cpu-rollout-only"), 1, 2, 4)
    for asked, found in ((1, 1), (40, 2)):
        run, samples_only = flags("--train-only", f"--steps={asked}")
        assert (samples_only, run.steps, run.rollout.replay) == (False, found, source)
        assert run.directory == Path("runs/demo_cpu-train-only")
        told = f"{source} holds the rollouts of {found} steps: steps={found} instead of {asked}"
        assert (told in capsys.readouterr().err) == (found < asked)
    other = stored(tmp_path / "other", 1)
    assert flags("--train-only", f"--rollout.replay={other}")[0].rollout.replay == other
    monkeypatch.setenv("RANK", "1")  # only the first rank says it
    capsys.readouterr()
    assert flags("--train-only", str(other))[0].rollout.replay == other
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rollout-only", "--train-only"], "exclude each other"),
        (["--rollout-only", "--fork=runs/x"], "--rollout-only samples from the recipe's model, and --fork"),
        (["--fork=runs/x", "--run-dir=y"], "no checkpoint between two steps can be taken; runs/x has"),
        (["--rollout-only", "--rollout.replay=runs/x"], "rollout.replay=runs/x gives stored rollouts"),
        (["--rollout-only", "--profile.steps", "1"], "makes no updates, which profile.steps would trace"),
        (["--train-only", "a", "b"], "--train-only takes one run, not a b"),
        (["--train-only", "a", "--rollout.replay=b"], "--train-only a and rollout.replay=b name two runs"),
        (["--train-only", "nowhere"], "nowhere holds no rollouts from step 1 on; sample some with"),
        (["--train-only"], "runs/demo_cpu-rollout-only holds no rollouts from step 1 on"),
        (["--train-only", "late"], "late holds no rollouts from step 1 on"),
    ],
)
def test_contradictory_flags_are_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    stored(tmp_path / "late", 7, 8)
    assert cli.run(["train", str(RECIPE), *words]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["late"]


def test_a_training_run_and_one_that_samples_alone_do_not_mix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any file of a training run tells. More steps are the same run, another temperature is not."""
    for trace in ("metrics.jsonl", "checkpoints", "journal"):
        (tmp_path / trace / trace).mkdir(parents=True)
        assert cli.run(["train", str(RECIPE), f"--run-dir={tmp_path / trace}", "--rollout-only"]) == 2
        assert f"{tmp_path / trace} is the directory of a training run" in capsys.readouterr().err
    run, _ = flags("--rollout-only", f"--run-dir={tmp_path / 'run'}", "--optimizer.decay=cosine")
    check_same_run(run, samples_only=True)  # nothing is there yet
    (tmp_path / "run").mkdir()
    store_config(run, samples_only=True)
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    check_same_run(replace(run, steps=99), samples_only=True)
    warmer = replace(run, rollout=replace(run.rollout, temperature=0.5))
    with pytest.raises(ConfigError, match=r"rollout.temperature: 1.0 in the run, 0.5 now"):
        check_same_run(warmer, samples_only=True)
    assert cli.run(["train", str(RECIPE), f"--run-dir={run.directory}"]) == 2
    said = capsys.readouterr().err
    assert "holds the rollouts of a run with --rollout-only" in said
    assert f"--train-only {run.directory} trains on them" in said


def test_the_servers_of_a_job_take_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    serve = "bapo_megatron.rollout.engines.sglang.server_process.serve"
    monkeypatch.setattr(serve, lambda command, _cuda: served.append(command))
    alone = ["--rollout-only", "--rollout-only true", "--rollout_only=True", "rollout-only=true"]
    for words in (*alone, "--fork runs/a:7", "--fork=runs/a", "fork=runs/a"):
        assert cli.run(["rollout-server", str(RECIPE), *words.split(), "--port=1"]) == 0
        assert served.pop().port == 1


@pytest.mark.parametrize(("updates", "is_new", "warned"), [(0, True, 1), (0, False, 0), (4, True, 0)])
def test_a_run_that_ends_without_an_update_says_so(
    updates: int, is_new: bool, warned: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ({"step": step, "reward/mean": 0.5, "policy/updates": updates} for step in (1, 2))
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run: Any = SimpleNamespace(config=SimpleNamespace(paths=RunPaths(tmp_path)))
    recorder = Mock()
    _tell_summary(run, recorder, is_new)
    assert f"in 2 steps, {2 * updates} updates\n" in capsys.readouterr().out
    assert recorder.no_updates.call_count == warned
