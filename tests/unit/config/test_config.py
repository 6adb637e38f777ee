"""Mistakes in a recipe or a flag end at once, with one clear message and exit code 2."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from bapo_megatron import config
from bapo_megatron.algo.bounds import fixed
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    PartConfig,
    ReferenceKlConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
    SglangConfig,
)
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang.requirements import placement_problem
from bapo_megatron.trainer.preflight import check_new_run
from tests.support.altered import altered

GOOD = RunConfig(
    "good",
    ModelConfig(Path("model")),
    DataConfig(Path("data.jsonl"), max_prompt_tokens=100),
    rollout=RolloutConfig(max_response_tokens=200),
    batch=BatchConfig(pack_tokens=300),
)


def test_a_good_run_passes() -> None:
    GOOD.check()
    altered(GOOD, {"algorithm.old_log_probs": "trainer", "algorithm.importance_cap": 2.0}).check()
    reward = RewardConfig("my.rewards:score", overlong_tokens=199, overlong_penalty=0.1, format_pattern=".*")
    dataclasses.replace(GOOD, reward=reward).check()
    altered(GOOD, {"rollout.budget_tokens": 100, "rollout.max_staleness": 1}).check()
    check_new_run(altered(GOOD, {"checkpoint.every": 10, "checkpoint.keep_every": 20}))
    for kl in (ReferenceKlConfig(0.1, "k1", "reward"), ReferenceKlConfig(0.1, "k1", unbiased=True)):
        check_new_run(altered(GOOD, {"algorithm.reference_kl": kl}))


@pytest.mark.parametrize(("last", "steps"), [(True, [0, 2, 3]), (False, [0, 2])])
def test_the_last_step_is_evaluated_unless_that_is_turned_off(last: bool, steps: list[int]) -> None:
    evaluation = EvaluationConfig(every=2, suites=("aime24",), last=last)
    run = dataclasses.replace(GOOD, steps=3, evaluation=evaluation)
    assert [step for step in range(4) if run.evaluates(step)] == steps
    never = dataclasses.replace(run, evaluation=dataclasses.replace(evaluation, every=0))
    assert not any(never.evaluates(step) for step in range(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": None}, "optimizer=None"),
        ({"rollout.temperature": 0.0}, "rollout.temperature=0.0 must be above 0"),
        ({"profile.steps": (1, "2")}, r"profile.steps=\(1, '2'\) must be a list, each item a whole number$"),
        ({"optimizer.beta2": 1.5}, "optimizer.beta2=1.5 must be at least 0 and below 1"),
        ({"optimizer.lr": 1e-6, "optimizer.min_lr": 1e-5}, "optimizer.min_lr=1e-05 is above"),
        ({"optimizer.lr": float("nan")}, "optimizer.lr=nan is not a finite number"),
        ({"batch.pack_tokens": 299}, "set it to at least 300"),
        ({"parallel.virtual": 2}, "parallel.virtual=2 needs parallel.pipeline"),
        ({"rollout.budget_tokens": 66, "rollout.max_staleness": 2}, "s=66 .*set rollout.max_staleness=3$"),
        ({"checkpoint.every": 10, "checkpoint.export_every": 25}, "export_every=25 .*=10.*: set it to 20$"),
        ({"checkpoint.after_export": "up '{folder}"}, "after_export=.*No closing quotation"),
        ({"evaluation.every": 5}, "evaluation.every=5 needs evaluation.suites"),
        ({"checkpoint.keep_best": 1}, "keep_best=1 needs evaluation.every"),
        (
            {"checkpoint": CheckpointConfig(every=4, keep_best=1), "evaluation": EvaluationConfig(6, ("a",))},
            "evaluation.every=6 .*checkpoint.every=4",
        ),
        ({"reward.failed": float("inf")}, "reward.failed=inf is not a finite number"),
        ({"reward.function": "maths"}, "reward.function='maths' is unknown: give math, code"),
        ({"reward.function": "a.b:c.d"}, "package.module:function"),
        ({"reward.format_pattern": "("}, r"reward.format_pattern='\(' is not a regular expression"),
        ({"reward.format_penalty": 0.1}, "needs reward.format_pattern"),
        ({"reward.settings": {"a": 1}}, "reward.settings: reward.function=math takes none"),
        (
            {"reward.function": "llm_judge", "reward.format_pattern": "a"},
            "reward.format_pattern .*reward.function=llm_judge has none",
        ),
        ({"reward.overlong_tokens": 200}, "must be below rollout.max_response_tokens=200"),
        ({"reward.overlong_penalty": 0.1}, "needs reward.overlong_tokens"),
        ({"algorithm.updates_per_epoch": 65}, "an update needs at least one group"),
        ({"algorithm.advantage": "ppo"}, "algorithm.advantage='ppo'"),
        ({"algorithm.importance_level": "sequence"}, "importance_level=sequence needs algorithm.importance"),
        ({"algorithm.corrections.geometric_max": 1.1}, "geometric_max=1.1 compares .*: set that to trainer"),
        (
            {"algorithm.terms": (PartConfig("entropy_bonus"), PartConfig("mine:entropy_bonus"))},
            "algorithm.terms: 2 are called entropy_bonus, and so are their metrics: rename one",
        ),
        ({"algorithm.importance_cap": 2.0}, "importance_cap=2.0 .*old_log_probs=rollout: set that to"),
        ({"algorithm.masks": (PartConfig("icepop"),)}, r"masks\[0\]=icepop .*old_log_probs=rollout: set"),
        (
            {"algorithm.reference_kl": ReferenceKlConfig(0.1, place="reward", unbiased=True)},
            "unbiased=true .*place=reward with coefficient=0.1",
        ),
        ({"algorithm.reference_kl.unbiased": True}, "not place=loss with coefficient=0"),
    ],
)
def test_a_mistake_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        altered(GOOD, change).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ".."}, r"name='\.\.' names no run"),
        ({"checkpoint.every": 10, "checkpoint.keep_every": 25}, "keep_every=25 .*=10.*: set it to 20$"),
        ({"algorithm.bounds": fixed(0.2, 0.28)}, "bounds from 0.2 to 0.28 clip all .* 0.8 and 1.28$"),
        ({"algorithm.reference_kl": ReferenceKlConfig(0.1, "k1")}, "estimator=k1 in the loss has a gradient"),
    ],
)
def test_a_run_that_has_begun_with_a_mistake_goes_on(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Earlier versions took them."""
    config = altered(GOOD, {"run_dir": tmp_path, **change})
    config.check()
    with pytest.raises(ConfigError, match=message):
        check_new_run(config)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    check_new_run(config)


def test_a_mistake_in_a_warm_start_is_named() -> None:
    """Megatron's own answer is an assertion without the field. A text is not a number to compare with."""
    config = SftConfig(GOOD.model, GOOD.data, Path("out"), optimizer=OptimizerConfig(lr=1e-6, min_lr=1e-5))
    with pytest.raises(ConfigError, match=r"^optimizer.min_lr=1e-05 is above optimizer.lr=1e-06$"):
        config.check()
    with pytest.raises(ConfigError, match=r"^optimizer.lr='1e-4' must be a number$"):
        altered(config, {"optimizer.lr": "1e-4"}).check()


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^steps=0 [^\n]*\nparallel.context=0 [^\n]*$"):
        altered(GOOD, {"steps": 0, "parallel.context": 0}).check()


def check_servers(**settings: Any) -> None:
    altered(GOOD, {"rollout.engine": "sglang", "rollout.sglang": SglangConfig(**settings)}).check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"colocated": True, "urls": ("http://node7:30000",)},
            "colocated: .*leave out urls=http://node7:30000",
        ),
        ({"colocated": True, "sync": "broadcast"}, "colocated needs sync=ipc or disk, not broadcast"),
        ({"colocated": True, "on_update": "in_place"}, "colocated .*leave on_update out"),
        ({"sync": "ipc"}, "sync=ipc needs colocated=true.*use disk or broadcast"),
        ({"flags": ("--max-queued-requests=64",)}, "flags: --max-queued-requests fails requests"),
        ({"flags": ("--hicache-storage-backend=file",)}, "flags: --hicache-storage-backend keeps keys"),
        ({"flags": ("--enable-lmcache",)}, "flags: --enable-lmcache keeps keys"),
    ],
)
def test_what_does_not_go_with_servers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.sglang\.{message}"):
        check_servers(**settings)


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "draft"),
        ("--speculative-algorithm=standalone",),
        ("--speculative-draft-model-path=draft",),
    ],
)
def test_a_draft_model_gets_its_weights_from_disk_alone(flags: tuple[str, ...]) -> None:
    check_servers(flags=(*flags, "--enable-hierarchical-cache"), sync="disk")
    for sync in ("broadcast", "ipc"):
        given = {"sync": sync, "colocated": sync == "ipc"}
        check_servers(flags=("--speculative-algorithm", "NGRAM"), **given)
        name = flags[0].split("=")[0]
        with pytest.raises(ConfigError, match=rf"flags: {name} has a draft .* sync={sync} .*sync=disk"):
            check_servers(flags=flags, **given)


@pytest.mark.parametrize(
    "url",
    [
        *("http://", "http://:30000", "http://::1:30000", "http://[::1:30000", "http://[h]:30000"),
        *("http://h:99999", "http://h:0", "http://h:", "http://h:port", "http://h 2:1", "http://h:1\n"),
        *("http://user@h:1", "http://h:1?key=2", "ftp://h:1", "h:1"),
    ],
)
def test_an_address_that_no_server_has(url: str) -> None:
    [told] = EngineConfig(urls=(url,)).problems(100)
    assert told == f"urls: {url!r} is not an address; write it as http://HOST:PORT"


def test_addresses_of_servers() -> None:
    urls = ("http://h:1", "http://h:2", "http://H", "http://[::1]:30000", "https://h:443/a/")
    assert not list(EngineConfig(urls=urls).problems(100))
    [told] = EngineConfig(urls=("http://h:1", "http://h:1/")).problems(100)
    assert told.startswith("urls names a server twice: ")


def test_a_server_that_reads_memory_needs_a_process_that_trains_on_its_gpu() -> None:
    def problem(training: int, **settings: Any) -> str | None:
        sglang = SglangConfig(servers=4, tensor=2, colocated=True, **settings)
        return placement_problem(RolloutConfig(engine="sglang", sglang=sglang), 8, training)

    assert problem(8, sync="ipc") is None
    assert problem(4, sync="disk") is None
    assert "GPUs 0 to 7, and this run trains on GPUs 0 to 3" in (problem(4, sync="ipc") or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def recipe(): return 3", "returned int, expected RunConfig"),
        ("import missing_module_of_nobody", "No module named 'missing_module_of_nobody'.*line 1"),
        ("def recipe():\n    return 1 / 0", "ZeroDivisionError.*line 2"),
        ("x = 1\ndef recipe(:", r"SyntaxError\('invalid syntax'\) in .*bad\.py, line 2$"),
        ("import sys\ndef recipe():\n    sys.exit(0)", r"ends the program by sys\.exit\(0\)$"),
    ],
)
def test_a_bad_recipe_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path, RunConfig)


def test_a_recipe_finds_every_section_in_one_place() -> None:
    def sections(kind: type) -> set[type]:
        found = [one for hint in get_type_hints(kind).values() for one in (hint, *get_args(hint))]
        own = {one for one in found if dataclasses.is_dataclass(one)}
        return own.union(*(sections(one) for one in own))

    names = {"PolarityConfig" if one is PapoConfig else one.__name__ for one in sections(RunConfig)}
    assert names <= vars(config).keys()


def test_a_recipe_may_define_dataclasses_and_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Annotations are looked up in its module. On standard output scripts expect a job's id, or JSON."""
    path = tmp_path / "sized.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Sizes:\n"
        "    steps: int = 3\n"
        "print('loading')\n"
        "def recipe(): return {'steps': Sizes().steps}\n"
    )
    assert load_recipe(path, dict) == {"steps": 3}
    assert capsys.readouterr() == ("", "loading\n")
