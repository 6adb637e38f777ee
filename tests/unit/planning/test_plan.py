"""``bapo plan``: FLOPs, memory and time by hand on a small shape, and published sizes of models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.algo.bapo import balanced, published_code
from bapo_megatron.cli import run as bapo
from bapo_megatron.commands.recipe_flags import parse_flags
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.advice import changed_flags, fastest_layouts, shorter_packs, smallest_changes
from bapo_megatron.planning.job import Job, find_shape
from bapo_megatron.planning.page import plan_text
from bapo_megatron.planning.plan import JobPlan, duration, make_plan, nodes_text, summary
from bapo_megatron.planning.sizes import stage_parameters, total_parameters
from tests.support.altered import altered
from tests.support.planned_jobs import BIG, ON_HOST, RECIPE, RECIPES, colocated, job, of_recipe, planned
from tests.support.shapes import resized

DEMO = RECIPES / "demo_cpu.py"


ON_7B = "r1_distill_qwen_7b_8k"
DEEP = replace(planned("tensor=8", "context=1", "data=1", "pipeline=2"), shape=resized(BIG, layers=448))
LISTED = {"run.batch.recompute": "full", "run.parallel.pipeline_layers": (220, 228)}
KEPT = {"parallel.tensor": 2, "parallel.data": 4, "rollout.sglang.kept_gb": 12.0}


@pytest.mark.parametrize(
    ("misfit", "told", "advice"),
    [
        (planned("context=1", "data=8"), "in an update", [(64, ["--batch.recompute selective"])]),
        (
            altered(planned("context=1"), {"run.batch.recompute": "full"}),
            "stage 0 needs",  # 88 GB of 72, with the optimizer's state on the host 38
            [(8, ["--optimizer.device cpu"])],
        ),
        # 448 layers with all else that saves: more stages are left, which the list does not fit
        (
            altered(DEEP, {**ON_HOST, **LISTED}),
            "stage 1 needs",
            [(64, ["--parallel.pipeline 8", "--parallel.pipeline-layers"])],
        ),
        (
            of_recipe(ON_7B, {"parallel.offload": False}),
            "while engines sample",
            [(8, ["--parallel.offload"])],
        ),
        (
            of_recipe(ON_7B, {"rollout.sglang.memory_fraction": 0.85}),
            "stage 0 needs 77.0 GB while engines sample, 3.0 of them the policy's; a GPU may use 72.0",
            [(8, ["--rollout.sglang.memory-fraction 0.75"])],
        ),
        (
            of_recipe(ON_7B, {**KEPT, "rollout.sglang.memory_fraction": 0.6}),
            "GB in an update, 12.0 of them a server's; a GPU may use 72.0",
            [(8, ["--optimizer.device cpu"])],
        ),
        (
            colocated(sync="ipc", bucket_mb=80e3, memory_fraction=0.1),
            "while servers read the weights, 1.0 of them a server's",
            [],
        ),
    ],
)
def test_a_misfit_names_its_phase_and_the_smallest_change(
    misfit: Job, told: str, advice: list[tuple[int, list[str]]]
) -> None:
    over = make_plan(misfit)
    assert any(told in line for line in over.verdict.memory)
    found = smallest_changes(over)[-len(advice) :] if advice else []
    assert [(one.job.gpus, changed_flags(over, one)) for one in found] == advice
    assert "DOES NOT FIT" in plan_text(over, found, [])
    for _, flags in advice:  # as they are pasted behind the recipe
        parse_flags("plan", RECIPE, misfit.run, ["recipe", *" ".join(flags).split()])


def test_comparison_keeps_experts_within_a_node() -> None:
    """Qwen3-30B-A3B on two nodes: EP 16 sends half of its copies over the network, the recipe's EP 8 none."""
    plan = make_plan(of_recipe("qwen3_30b_a3b", {"parallel.expert": 16}))
    [best] = fastest_layouts(plan, 1)
    assert best.job.parallel.expert == of_recipe("qwen3_30b_a3b").parallel.expert == 8
    assert all(part.link == "NVLink" for part in best.traffic if part.name == "EP")
    assert best.cost < 0.7 * plan.cost


def for_short_responses(**algorithm: object) -> JobPlan:
    """A recipe for responses of 64k on 16 GPUs, with those of 16k: its packs have room for 67,584 tokens."""
    changes = {f"algorithm.{name}": value for name, value in algorithm.items()}
    return make_plan(of_recipe("bp_math_7b_64k", {"rollout.max_response_tokens": 16384, **changes}))


def test_packs_of_the_longest_sequence_are_proposed_and_compared() -> None:
    plan = for_short_responses()
    same, fewest = shorter_packs(plan)
    assert changed_flags(plan, same) == ["--batch.pack-tokens 18432"]
    assert changed_flags(plan, fewest) == ["--parallel.context 1", "--batch.pack-tokens 18432"]
    assert (plan.job.gpus, same.job.gpus, fewest.job.gpus) == (16, 16, 4)
    assert f"--batch.pack-tokens 18432: {same.peak / 1e9:.1f} GB on 16 GPUs" in plan_text(plan, [], [])
    compared = fastest_layouts(plan, 40)
    assert {one.job.run.batch.pack_tokens for one in compared} == {18432, 67584}
    assert compared[0].cost < plan.cost
    assert "18,432" in plan_text(plan, [], compared[:1])


def test_packs_that_are_needed_or_decide_the_search_stay() -> None:
    assert not shorter_packs(make_plan(planned()))
    in_packs = for_short_responses(bounds=published_code())
    assert not shorter_packs(in_packs)
    assert {one.job.run.batch.pack_tokens for one in fastest_layouts(in_packs, 40)} == {67584}


def test_comparison_is_sorted_and_fits() -> None:
    plans = fastest_layouts(make_plan(planned()), 5)
    assert [p.cost for p in plans] == sorted(p.cost for p in plans)
    assert [(p.verdict.memory, p.job.gpus) for p in plans] == [((), 64)] * 5


def test_a_shape_is_found_or_asked_for(tmp_path: Path) -> None:
    assert find_shape(RECIPE, Path("anywhere/DeepSeek-R1-Distill-Qwen-32B")) == BIG
    assert find_shape(tmp_path / "my_run.py", Path("models/DeepSeek-R1-Distill-Qwen-32B")) == BIG
    with pytest.raises(ConfigError, match="needs no weights"):
        find_shape(RECIPE, tmp_path / "unknown")


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert bapo(["plan", str(RECIPE), "--json", "--compare", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert [other["gpus"] for other in found["fastest_layouts"]] == [64, 64]
    assert found["stages"][0]["parameters"] == stage_parameters(BIG, planned().parallel, 0).total
    assert bapo(["plan", str(RECIPE), "--parallel.tensor", "4", "--parallel.context", "4"]) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "Smallest change: --parallel.context 32  (takes 128 GPUs)" in text


def test_nodes_time_and_disk_of_the_whole_run() -> None:
    """500 steps, a checkpoint every 10 of them, two kept: three checkpoints of 14 bytes a parameter while one
    is written, the final export, and two versions of the weights for SGLang."""
    plan = make_plan(planned())
    assert (plan.trainer_nodes, plan.server_nodes) == (8, 8)
    assert plan.run_seconds == 500 * plan.step_seconds
    assert plan.checkpoint_seconds == 10 * plan.step_seconds
    parameters = total_parameters(BIG)
    assert plan.job.disk == parameters * (3 * 14 + 3 * 2)
    assert plan_text(plan, [], []).splitlines()[3:8] == list(summary(plan))
    short = make_plan(altered(planned(), {"run.steps": 4}))
    assert short.checkpoint_seconds == short.run_seconds == 4 * short.step_seconds
    assert [duration(s) for s in (90, 7199, 7200, 172800)] == ["90 s", "120 minutes", "2.0 h", "2.0 days"]


def test_node_count_in_the_summary() -> None:
    """A split of one node, servers that run already, and the nodes of a cluster file."""
    urls = {"rollout.sglang.urls": ("http://n1:30000",)}
    shared, split = "r1_distill_qwen_7b_8k", "partial_rollout_7b"
    for recipe, changes, counted, nodes in (
        (split, {}, (), "1, of whose GPUs 4 train and 4 sample"),
        (split, urls, (), "1 train"),
        (split, {}, ("3 train",), "3 train"),
        (shared, {}, (), "1, where 8 GPUs train and 8 sample, in turns"),
        (shared, {"parallel.data": 4}, (), "2, where 16 GPUs train and 8 of the first sample, in turns"),
    ):
        assert list(summary(make_plan(of_recipe(recipe, changes)), *counted))[1] == f"Nodes: {nodes}"


def test_the_text_of_a_plan_shows_both_turns() -> None:
    turns = plan_text(make_plan(of_recipe(ON_7B)), [], [])
    assert "FITS: at most 46.1 GB (training) and 69.0 GB (sampling) of a GPU's 80 (h100-80gb)" in turns
    for row in (
        "train        40.1      6.0   46.1  33.9",
        "hand over    10.1     21.2   31.3  48.7",
        "sample        3.0     66.0   69.0  11.0",
    ):
        assert f"  0      {row}  fits" in turns


def test_engines_that_cannot_sample_have_no_step_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert bapo(["plan", str(RECIPE), "--engine-gpus", "2"]) == 1
    assert "\nStep: no estimate, for no engine can sample\n" in capsys.readouterr().out
    assert bapo(["plan", str(RECIPE), "--engine-gpus", "2", "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # Infinity is not JSON
    assert found["step_seconds"] is found["engines"]["rollout_seconds"] is None


@pytest.mark.parametrize("recipe", ["r1_distill_qwen_7b_8k", "bp_math_32b_64k"])
def test_a_replay_has_no_engines(recipe: str) -> None:
    """Neither their time, nor their nodes, nor their memory beside a policy that stays on the GPU."""
    changes = {"parallel.offload": False, "rollout.replay": Path("run")}
    plan = make_plan(of_recipe(recipe, changes))
    assert plan.verdict.fits
    assert plan.step_seconds == plan.train_seconds
    lines = list(summary(plan))
    assert lines[1] == f"Nodes: {nodes_text(plan.trainer_nodes, 0)}"
    assert lines[2].startswith(f"Step: {plan.train_seconds:,.0f} s: training {plan.train_seconds:,.0f} s, no")
    text = plan_text(plan, [], [])
    assert not [word for word in ("Engines", "servers", "Weight sync") if word in text]


@pytest.mark.parametrize(
    ("scope", "tokens", "responses", "says"),
    [
        ("update", None, 8.0, "balanced (gradient, absolute, uniform, high_first, update, target 0.4)"),
        ("micro_batch", None, 1.0, "100% of the searches see one sign alone"),  # 16 / 16
        ("micro_batch", 7, 1.0, "micro_batch of about 7 tokens"),
    ],
)
def test_a_search_over_few_responses_is_noted(
    scope: Any, tokens: int | None, responses: float, says: str
) -> None:
    """Eight responses of 14 tokens; a pack holds one and its prompt."""
    bounds = replace(balanced(), scope=scope, bounds_tokens=tokens)
    plan = altered(job(), {"run.algorithm": AlgorithmConfig(bounds)})
    assert plan.responses_per_search == responses
    text = plan_text(make_plan(plan), [], [])
    assert says in text
    assert ("WARNING" in text) == (responses < 4)


def test_the_documentation_shows_this_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Paste the output of `bapo plan recipes/bp_math_32b_64k.py` into docs/planning.md when it changes."""
    bapo(["plan", str(RECIPE)])
    assert capsys.readouterr().out in (RECIPES.parent / "docs/planning.md").read_text()


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        (RECIPE, "--mfu 1.5", "mfu=1.5 must be above 0 and at most 1"),
        (RECIPE, "--parallel.tensor 3", "parallel.tensor=3 does not divide"),
        (RECIPE, "--parallel.tensor 0", "error: parallel.tensor=0 must be at least 1\n"),
        (DEMO, "--algorithm.loss ppo", "algorithm.loss='ppo' is unknown: give clip, "),
    ],
)
def test_bad_input_is_named(
    recipe: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bapo(["plan", str(recipe), *flags.split()]) == 2
    assert message in capsys.readouterr().err
