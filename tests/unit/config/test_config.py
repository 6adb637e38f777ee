"""Mistakes in a recipe or a flag end at once, with one clear message and exit code 2."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
from annotated_types import Ge, Gt, Le, Lt

from bapo_megatron import config
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.algo.settings import out_of_range
from bapo_megatron.checkpoint.run_directory import (
    changed_settings,
    check_partial_step,
    check_same_run,
    check_writable,
    only_writer,
    read_config,
    store_config,
    with_former_defaults,
)
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReferenceKlConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
    SglangConfig,
)
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.config.validation import parallel_problems
from bapo_megatron.errors import ConfigError, StorageFailed
from bapo_megatron.hf.config import ModelShape, read_model_shape
from bapo_megatron.layers.mlp import Experts
from bapo_megatron.policy.layout import chunk_layers, data_parallel_size, layout_problems, stage_kinds
from bapo_megatron.rollout.engines.sglang.requirements import placement_problem
from bapo_megatron.trainer.preflight import check_new_run
from tests.support.altered import altered
from tests.support.cluster_recipes import FOLDER
from tests.support.shapes import resized

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
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"steps": "3"}, "steps='3'"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"model.hf_path": "a string"}, "model.hf_path='a string'"),
        ({"optimizer": None}, "optimizer=None"),
        ({"optimizer.beta2": 1.5}, "optimizer.beta2=1.5 must be at least 0 and below 1"),
        ({"optimizer.lr": 1e-6, "optimizer.min_lr": 1e-5}, "optimizer.min_lr=1e-05 is above"),
        ({"optimizer.lr": float("nan")}, "optimizer.lr=nan is not a finite number"),
        ({"batch.pack_tokens": 299}, "set it to at least 300"),
        ({"parallel.tensor": 0}, "parallel.tensor=0 must be"),
        ({"parallel.sequence": True}, "parallel.sequence needs parallel.tensor"),
        ({"parallel.virtual": 2}, "parallel.virtual=2 needs parallel.pipeline"),
        ({"rollout.group_size": 1}, "group_size=1 must be at least 2"),
        ({"rollout.temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"rollout.segment_tokens": 0}, "segment_tokens=0 must be"),
        ({"rollout.budget_tokens": 66, "rollout.max_staleness": 2}, "s=66 .*set rollout.max_staleness=3$"),
        ({"rollout.budget_tokens": 100, "rollout.max_staleness": 0}, "s=100 .*set rollout.max_staleness=1$"),
        ({"rollout.sglang.memory_fraction": 1.0}, "memory_fraction=1.0 must be above 0 and below 1"),
        ({"checkpoint.every": 0}, "checkpoint.every=0 must be"),
        ({"checkpoint.keep_every": 0}, "checkpoint.keep_every=0 must be"),
        ({"checkpoint.export_every": -10}, "checkpoint.export_every=-10 must be"),
        ({"checkpoint.every": 10, "checkpoint.export_every": 25}, "export_every=25 .*=10.*: set it to 20$"),
        ({"checkpoint.every": 10, "checkpoint.export_every": 4}, "set it to 10$"),
        ({"checkpoint.after_export": "up"}, "after_export='up' has no {folder}"),
        ({"checkpoint.after_export": "up '{folder}"}, "after_export=.*no closing quotation"),
        ({"checkpoint.after_export": " "}, "after_export=' ': it is empty"),
        ({"logging.on_event": ("mail 'me",)}, "on_event=.*no closing quotation"),
        ({"evaluation.every": 5}, "evaluation.every=5 needs evaluation.suites"),
        ({"checkpoint.keep_best": 1}, "keep_best=1 needs evaluation.every"),
        (
            {"checkpoint": CheckpointConfig(every=4, keep_best=1), "evaluation": EvaluationConfig(6, ("a",))},
            "evaluation.every=6 .*checkpoint.every=4",
        ),
        ({"reward.workers": 0}, "reward.workers=0 must be"),
        ({"reward.time_limit_s": 0.0}, "reward.time_limit_s=0.0 must be above 0"),
        ({"reward.memory_limit_mb": 255}, "reward.memory_limit_mb=255 must be at least 256"),
        ({"reward.failed": float("inf")}, "reward.failed=inf is not a finite number"),
        ({"reward.function": "maths"}, "reward.function='maths' is unknown: give math, code"),
        ({"reward.function": "a.b:c.d"}, "package.module:function"),
        ({"reward.format_pattern": "("}, r"reward.format_pattern='\(' is not a regular expression"),
        ({"reward.format_penalty": 0.1}, "needs reward.format_pattern"),
        ({"reward.overlong_tokens": 200}, "must be below rollout.max_response_tokens=200"),
        ({"reward.overlong_penalty": 0.1}, "needs reward.overlong_tokens"),
        ({"reward.code_case_limit_s": 31.0}, "is above reward.time_limit_s=30.0"),
        ({"algorithm.updates_per_epoch": 65}, "an update needs at least one group"),
        ({"algorithm.advantage": "ppo"}, "algorithm.advantage='ppo'"),
        ({"algorithm.bounds.measure": "surogate"}, "algorithm.bounds.measure='surogate'"),
        ({"algorithm.bounds.low_step": 0.0}, "algorithm.bounds.low_step=0.0"),
        ({"algorithm.importance_cap": 2.0}, "importance_cap=2.0 .*old_log_probs=rollout: set that to"),
        (
            {"algorithm.old_log_probs": "trainer", "algorithm.importance_cap": 0.0},
            "algorithm.importance_cap=0.0 must be above 0",
        ),
        (
            {"algorithm.reference_kl": ReferenceKlConfig(0.1, place="reward", unbiased=True)},
            "unbiased=true .*place=reward with coefficient=0.1",
        ),
        ({"algorithm.reference_kl.unbiased": True}, "not place=loss with coefficient=0"),
        ({"algorithm.gap_mean_limit": -1.0}, "gap_mean_limit=-1.0 must be above 0"),
        ({"algorithm.gap_max_limit": 0.0}, "gap_max_limit=0.0 must be above 0"),
    ],
)
def test_a_mistake_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        altered(GOOD, change).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name='' names no run"),
        ({"name": ".."}, r"name='\.\.' names no run"),
        ({"checkpoint.every": 10, "checkpoint.keep_every": 25}, "keep_every=25 .*=10.*: set it to 20$"),
        ({"profile.memory": True}, "profile.memory needs profile.steps"),
        ({"logging.trackers": ("wandb",), "logging.project": "team/sums"}, "logging.project=.team/sums"),
        ({"logging.wandb_project": "50%"}, "logging.wandb_project='50%': W&B"),
    ],
)
def test_a_run_that_has_begun_with_a_mistake_goes_on(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Earlier versions took them, and nothing that the run computes depends on them."""
    config = altered(GOOD, {"run_dir": tmp_path, **change})
    config.check()
    with pytest.raises(ConfigError, match=message):
        check_new_run(config)
    begin(tmp_path)
    check_new_run(config)


def test_a_good_new_run_passes(tmp_path: Path) -> None:
    milestones = CheckpointConfig(every=10, keep_every=20)
    logging = LoggingConfig(trackers=("mlflow",), project="/team/sums")
    check_new_run(dataclasses.replace(GOOD, run_dir=tmp_path, checkpoint=milestones, logging=logging))


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


SHAPE = read_model_shape(FOLDER / "shapes/DeepSeek-R1-Distill-Qwen-7B")


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
        ({"flags": ("--hicache-storage-backend", "file")}, "flags: --hicache-storage-backend keeps keys"),
        ({"flags": ("--hicache-storage-backend=file",)}, "flags: --hicache-storage-backend keeps keys"),
        ({"flags": ("--enable-lmcache",)}, "flags: --enable-lmcache keeps keys"),
        ({"flags": ("--enable-flexkv",)}, "flags: --enable-flexkv keeps keys"),
    ],
)
def test_what_does_not_go_with_servers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.sglang\.{message}"):
        check_servers(**settings)


def test_what_goes_with_servers() -> None:
    check_servers(colocated=True)
    check_servers(colocated=True, sync="ipc")
    check_servers(flags=("--enable-hierarchical-cache",))  # in the server's own memory, which a flush empties


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "draft"),
        ("--speculative-algorithm=standalone",),
        ("--speculative-draft-model-path=draft",),
    ],
)
def test_a_draft_model_gets_its_weights_from_disk_alone(flags: tuple[str, ...]) -> None:
    check_servers(flags=flags, sync="disk")
    for sync in ("broadcast", "ipc"):
        given = {"sync": sync, "colocated": sync == "ipc"}
        check_servers(flags=("--speculative-algorithm", "NGRAM"), **given)
        name = flags[0].split("=")[0]
        with pytest.raises(ConfigError, match=rf"flags: {name} has a draft .* sync={sync} .*sync=disk"):
            check_servers(flags=flags, **given)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://", "it has no host"),
        ("http://:30000", "it has no host"),
        ("http://::1:30000", "Port could not be cast"),
        ("http://fe80::1:30000", "Port could not be cast"),
        ("http://[::1:30000", "Invalid IPv6 URL"),
        ("http://[h]:30000", "h"),
        ("http://h:99999", "Port out of range"),
        ("http://h:0", "its port is missing, or 0"),
        ("http://h:", "its port is missing, or 0"),
        ("http://h:port", "Port could not be cast"),
        ("http://h 2:1", "it has a blank"),
        ("http://h:1\n", "it has a blank"),
        ("http://user@h:1", "it has a user"),
        ("http://h:1?key=2", "it has a user, a query"),
        ("ftp://h:1", "begins with neither"),
        ("h:1", "begins with neither"),
    ],
)
def test_an_address_that_no_server_has(url: str, problem: str) -> None:
    [told] = EngineConfig(urls=(url,)).problems(100)
    assert told.startswith(f"urls: {url!r} is not an address (")
    assert problem in told


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://h:1", "http://h:1/"),
        ("http://h:80", "http://H"),
        ("http://[::1]:30000", "http://[0:0::1]:30000/"),
        ("https://h:443/a", "https://h/a/"),
    ],
)
def test_a_server_is_named_once(first: str, second: str) -> None:
    for url in (first, second):
        assert not list(EngineConfig(urls=(url,)).problems(100))
    [told] = EngineConfig(urls=(first, second)).problems(100)
    assert told.startswith("urls names a server twice: ")
    assert not list(EngineConfig(urls=(first, "http://[::2]:30000", "http://h:2")).problems(100))


def test_a_server_that_reads_memory_needs_a_process_that_trains_on_its_gpu() -> None:
    def problem(training: int, **settings: Any) -> str | None:
        sglang = SglangConfig(servers=4, tensor=2, colocated=True, **settings)
        return placement_problem(RolloutConfig(engine="sglang", sglang=sglang), 8, training)

    assert problem(8, sync="ipc") is None
    assert problem(4, sync="disk") is None
    assert "GPUs 0 to 7, and this run trains on GPUs 0 to 3" in (problem(4, sync="ipc") or "")


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "listed", "chunks", "stages"),
    [
        (8, 4, 1, (), (2, 2, 2, 2), [2, 2, 2, 2]),
        (94, 4, 1, (), (23, 24, 24, 23), [23, 24, 24, 23]),  # Qwen3-235B-A22B
        (94, 8, 1, (), (11, 12, 12, 12, 12, 12, 12, 11), [11, 12, 12, 12, 12, 12, 12, 11]),
        (94, 4, 2, (), (11, 12, 12, 12, 12, 12, 12, 11), [23, 24, 24, 23]),
        (28, 8, 1, (), (3, 3, 3, 4, 4, 4, 4, 3), [3, 3, 3, 4, 4, 4, 4, 3]),
        (5, 4, 1, (), (1, 1, 2, 1), [1, 1, 2, 1]),
        (7, 2, 2, (), (2, 2, 2, 1), [4, 3]),
        (10, 2, 2, (1, 4, 2, 3), (1, 4, 2, 3), [3, 7]),
    ],
)
def test_layers_of_chunks_and_stages(
    layers: int, pipeline: int, virtual: int, listed: tuple[int, ...], chunks: Any, stages: list[int]
) -> None:
    """Layers that the chunks do not divide are spread; listed ones are taken as they are."""
    parallel = ParallelConfig(pipeline=pipeline, virtual=virtual, pipeline_layers=listed)
    assert chunk_layers(parallel, layers) == chunks
    shape = resized(SHAPE, layers=layers)
    assert [kinds[shape.attention] for kinds in stage_kinds(parallel, shape)] == stages
    assert not list(layout_problems(parallel, shape))


EXPERTS = resized(SHAPE, experts=Experts(count=6, per_token=2, ffn=40, normalized=True))


@pytest.mark.parametrize(
    ("parallel", "shape", "message"),
    [
        ({"pipeline": 2, "virtual": 2, "pipeline_layers": (4, 4, 4)}, None, "has 3 numbers.* give 4 numbers"),
        ({"pipeline": 2, "pipeline_layers": (28, 0)}, None, "pipeline_layers=28 0 leaves"),
        ({"tensor": 8}, SHAPE, r"attention heads \(28\): use one of \[1, 2, 4\]"),
        ({"pipeline": 16, "virtual": 2}, SHAPE, "makes 32 model chunks .* 28 layers: use at most 28"),
        ({"pipeline": 4, "pipeline_layers": (8,) * 4}, SHAPE, "32 layers, but .* 28: .* for 7 7 7 7$"),
        ({"expert": 2, "data": 2}, SHAPE, "2 x 1, but the model has no experts: leave both at 1"),
        ({"expert": 4, "data": 4}, EXPERTS, r"experts \(6\): use one of \[1, 2, 3, 6\]"),
        ({"expert_tensor": 3, "data": 3}, EXPERTS, r"experts' width \(40\): use one of \[1, 2, 4, 5, 8,"),
        ({"tensor": 2}, EXPERTS, "needs sequence parallelism: set parallel.sequence=True"),
        ({"expert": 2, "data": 1}, EXPERTS, "tensor x context x data = 1 x 1 x 1 = 1$"),
        ({"expert": 3, "expert_tensor": 2, "data": 4}, EXPERTS, "3 x 2 does not divide the ranks"),
    ],
)
def test_a_layout_that_does_not_fit_is_named(
    parallel: dict[str, Any], shape: ModelShape | None, message: str
) -> None:
    config = ParallelConfig(**parallel)
    problems = layout_problems(config, shape) if shape else parallel_problems(config)
    assert re.search(message, "\n".join(problems))


@pytest.mark.parametrize(
    ("parallel", "shape"),
    [
        ({"tensor": 4, "pipeline": 7, "virtual": 2}, SHAPE),
        ({"tensor": 2, "sequence": True, "expert": 2, "data": 1}, dataclasses.replace(EXPERTS, ffn=7)),
    ],
)
def test_a_layout_that_splits_the_model_passes(parallel: dict[str, Any], shape: ModelShape) -> None:
    """The width of no MLP limits a layout of experts."""
    assert not list(layout_problems(ParallelConfig(**parallel), shape))


def test_data_parallel_size() -> None:
    assert data_parallel_size(ParallelConfig(tensor=2, pipeline=2), None) == 1
    assert data_parallel_size(ParallelConfig(tensor=2, data=3), None) == 3
    assert data_parallel_size(ParallelConfig(tensor=2, pipeline=2), 16) == 4
    with pytest.raises(ConfigError, match="start a multiple of 4"):
        data_parallel_size(ParallelConfig(tensor=2, pipeline=2), 6)
    with pytest.raises(ConfigError, match="leave parallel.data out or start 8 processes"):
        data_parallel_size(ParallelConfig(tensor=2, data=4), 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no function recipe"),
        ("def recipe(): return 3", "returned int, expected RunConfig"),
        ("import missing_module_of_nobody", "No module named 'missing_module_of_nobody'.*line 1"),
        ("def recipe():\n    return 1 / 0", "ZeroDivisionError.*line 2"),
        ("x = 1\ndef recipe(:", r"SyntaxError\('invalid syntax'\) in .*bad\.py, line 2$"),
        ("import json\ndef recipe():\n    json.loads('{')", r"in .*bad\.py, line 3 \(from .*decoder\.py, "),
        ("import sys\ndef recipe():\n    sys.exit(0)", r"ends the program by sys\.exit\(0\) in .*line 3: "),
    ],
)
def test_a_bad_recipe_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path, RunConfig)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_recipe(tmp_path / "none.py", RunConfig)
    with pytest.raises(ConfigError, match="is a folder: name a Python file in it"):
        load_recipe(tmp_path, RunConfig)


def test_what_a_recipe_prints_is_not_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There scripts expect the id of a job (`bapo submit`), or JSON (`bapo plan --json`)."""
    path = tmp_path / "chatty.py"
    path.write_text("print('loading')\ndef recipe():\n    print('made')\n    return {}")
    load_recipe(path, dict)
    assert capsys.readouterr() == ("", "loading\nmade\n")


def test_a_range_stands_at_the_field() -> None:
    @dataclasses.dataclass
    class Knobs:
        share: Annotated[float | None, Gt(0), Le(1)] = None
        count: Annotated[int, Ge(2)] = 2
        part: Annotated[float, Lt(1)] = -5.0
        free: float = -7.0

    assert list(out_of_range(Knobs())) == list(out_of_range(Knobs(1.0, 3, 0.99))) == []
    assert list(out_of_range(Knobs(0.0, 1, 1.0, float("nan")))) == [
        "share=0.0 must be above 0 and at most 1",
        "count=1 must be at least 2",
        "part=1.0 must be below 1",
        "free=nan is not a finite number",
    ]


def test_a_recipe_finds_every_section_in_one_place() -> None:
    def sections(kind: type) -> set[type]:
        found = [one for hint in get_type_hints(kind).values() for one in (hint, *get_args(hint))]
        own = {one for one in found if dataclasses.is_dataclass(one)}
        return own.union(*(sections(one) for one in own))

    names = {"PolarityConfig" if one is PapoConfig else one.__name__ for one in sections(RunConfig)}
    assert names <= set(config.__all__)


def begin(folder: Path) -> None:
    """The run has made its first step."""
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


@pytest.fixture
def begun(tmp_path: Path) -> RunConfig:
    run = dataclasses.replace(GOOD, run_dir=tmp_path)
    store_config(run)
    begin(tmp_path)
    return run


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, None),
        ({"name": "another", "steps": 500, "parallel.tensor": 2}, None),
        ({"algorithm.gap_mean_limit": None, "algorithm.on_gap": "stop"}, None),
        ({"optimizer.decay": "cosine", "steps": 500}, "steps: 100 in the run, 500 now"),
        ({"optimizer.lr": 0.1}, "optimizer.lr: 2e-06 in the run, 0.1 now"),
        ({"optimizer.device": "cpu"}, None),
        ({"reward.workers": 7, "reward.time_limit_s": 99.0, "reward.allow_weak_sandbox": True}, None),
        ({"reward.memory_limit_mb": 9999}, None),
        ({"reward.code_case_limit_s": 9.0}, "reward.code_case_limit_s"),  # what a right program is
        ({"reward.function": "code"}, "reward.function"),
        ({"rollout.max_batch": 7, "rollout.segment_tokens": 512, "rollout.keep_steps": None}, None),
        ({"rollout.max_staleness": 3}, "rollout.max_staleness"),
        ({"rollout.max_batch": 7, "rollout.budget_tokens": 8}, "rollout.budget_tokens"),
        ({"rollout.sglang": SglangConfig(urls=("http://x:1",), tensor=4, sync="broadcast")}, None),
        ({"rollout.sglang.on_update": "in_place"}, "rollout.sglang.on_update"),
        ({"data.path": Path("elsewhere")}, "data.path"),
        ({"algorithm.loss": "mine:Loss"}, "algorithm.loss: 'clip' in the run, 'mine:Loss' now"),
    ],
)
def test_how_a_run_is_operated_may_change(
    changes: dict[str, Any], refused: str | None, begun: RunConfig
) -> None:
    """Servers have other addresses after each start of a job; judges get more time on slow machines."""
    changed = altered(begun, changes)
    if refused is None:
        check_same_run(changed)
        return
    with pytest.raises(ConfigError, match=refused) as told:
        check_same_run(changed)
    assert str(told.value).count(" in the run, ") == 1 + ("decay" in str(changes))


def test_a_run_without_a_step_may_have_any_settings(tmp_path: Path) -> None:
    run = dataclasses.replace(GOOD, run_dir=tmp_path)
    check_same_run(run)
    store_config(run)
    check_same_run(altered(run, {"optimizer.lr": 0.1}))


@pytest.mark.parametrize(("name", "least"), [("step_000006", 6), ("step_000006_update_002", 7)])
def test_a_run_does_not_end_at_a_step_that_it_has_passed(tmp_path: Path, name: str, least: int) -> None:
    """Its newest weights would be exported as those of the earlier step."""
    (checkpoint := tmp_path / "checkpoints" / name).mkdir(parents=True)
    run = dataclasses.replace(GOOD, run_dir=tmp_path)
    check_same_run(dataclasses.replace(run, steps=4))  # a half-deleted one is not a checkpoint
    (checkpoint / "manifest.json").write_text("{}")
    check_same_run(dataclasses.replace(run, steps=least))
    with pytest.raises(
        ConfigError, match=rf"steps={least - 1}, but .* has trained 6 .* give --steps {least} "
    ):
        check_same_run(dataclasses.replace(run, steps=least - 1))


def test_a_step_ends_as_it_began(begun: RunConfig) -> None:
    """Behind a checkpoint within a step, what the step computes cannot be changed even by name."""
    allowed = {"allow_change": ("algorithm.reuse_epochs", "optimizer.lr"), "optimizer.lr": 0.1}
    slower = altered(begun, allowed)
    reused = altered(slower, {"algorithm.reuse_epochs": 7})
    changed = changed_settings(reused, read_config(reused.directory))
    assert ("optimizer.lr", 2e-6, 0.1) in changed
    with pytest.raises(ConfigError, match="^algorithm.reuse_epochs: .* lies within a step"):
        check_partial_step(changed, reused)
    check_partial_step(changed_settings(slower, read_config(slower.directory)), slower)
    assert changed_settings(begun, None) == []


def test_a_run_directory_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": 99, "config": {}}')
    with pytest.raises(ConfigError, match="run format 99"):
        check_same_run(dataclasses.replace(GOOD, run_dir=tmp_path))


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (errno.ENOSYS, ConfigError, "cannot lock files .*Lustre: -o flock"),
        (errno.ENOLCK, StorageFailed, "No locks available"),
    ],
)
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], told: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(kind, match=told), only_writer(tmp_path):
        pass


def test_a_run_directory_has_one_writer(tmp_path: Path) -> None:
    refusal = pytest.raises(ConfigError, match="another process is writing")
    check_writable(tmp_path)
    with only_writer(tmp_path), refusal, only_writer(tmp_path):
        pass
    with only_writer(tmp_path):
        pass


def test_a_requeued_job_waits_for_the_lock_of_its_last_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server keeps the lock of a node that died; exit code 2 would stop the job for good."""
    monkeypatch.setenv("BAPO_RESTART", "3")
    before = only_writer(tmp_path)
    before.__enter__()
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", lambda s: waits.append(s) or before.__exit__(None, None, None))
    with only_writer(tmp_path):
        assert waits == [1.0]


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(tmp_path / "file")


def test_names_and_positions_that_recipes_of_version_0_1_use(tmp_path: Path) -> None:
    from bapo_megatron.config import BoundsConfig, CorrectionsConfig, PolarityConfig

    path = tmp_path / "recipe.py"
    path.write_text(
        "from bapo_megatron.algo.corrections.rejection import CorrectionsConfig\n"
        "def recipe(): return CorrectionsConfig(off_policy_delta=1.0)\n"
    )
    assert load_recipe(path, CorrectionsConfig).off_policy_delta == 1.0
    config = AlgorithmConfig(BoundsConfig(), "dr_grpo", PolarityConfig(enabled=True))
    assert (config.advantage, config.polarity.enabled, config.loss) == ("dr_grpo", True, "clip")


@pytest.mark.parametrize(
    ("field", "mark", "former", "now", "lines"),
    [
        ("optimizer.fused", "default_fused", False, True, []),
        (
            "reward.on_failure",
            "default_on_failure",
            "value",
            "leave_out",
            ["reward.failed=-0.5, and continues"],
        ),
    ],
)
def test_a_run_of_before_goes_on_with_its_default(
    field: str, mark: str, former: Any, now: Any, lines: list[str], begun: RunConfig
) -> None:
    """Its settings lack the field; also when its continuation is stored. ``--allow-change`` changes over.
    A run of today has the former value only if it says so."""
    old = altered(begun, {"reward.failed": -0.5})
    store_config(altered(old, {field: former}))
    assert with_former_defaults(old) == (old, [])
    with pytest.raises(ConfigError, match=f"{field}: {former!r} in the run, {now!r} now"):
        check_same_run(old)
    store_config(old)
    path = begun.directory / "config.json"
    stored = json.loads(path.read_text())
    del stored[mark]
    assert stored["config"].pop(field) == now
    path.write_text(json.dumps(stored))
    for _ in range(2):
        kept, told = with_former_defaults(old)
        assert kept == altered(old, {field: former})
        assert [part in line for part, line in zip(lines, told, strict=True)] == [True] * len(lines)
        check_same_run(kept)
        store_config(kept)
    changed = dataclasses.replace(old, allow_change=(field,))
    assert with_former_defaults(changed) == (changed, [])
    store_config(changed)
    assert with_former_defaults(old) == (old, [])
