"""``bapo plan``: FLOPs, memory and time by hand on a small shape, and published sizes of models."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.algo.bapo import balanced, published_code
from bapo_megatron.cli import run as bapo
from bapo_megatron.commands.recipe_flags import parse_flags
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.advice import changed_flags, fastest_layouts, shorter_packs, smallest_changes
from bapo_megatron.planning.job import find_shape
from bapo_megatron.planning.page import plan_dict, plan_text
from bapo_megatron.planning.plan import JobPlan, duration, make_plan, nodes_text, summary
from bapo_megatron.planning.sizes import stage_parameters, total_parameters
from tests.support.altered import altered
from tests.support.planned_jobs import BIG, ON_HOST, RECIPE, RECIPES, colocated, job, of_recipe, planned
from tests.support.shapes import resized

DEMO = RECIPES / "demo_cpu.py"


def test_advice_fits_and_is_small() -> None:
    """Without context parallelism the activations do not fit; recomputing them is enough, on these GPUs."""
    plan = make_plan(planned("context=1", "data=8"))
    assert plan.verdict.memory
    [change] = smallest_changes(plan)
    assert changed_flags(plan, change) == ["--batch.recompute selective"]
    assert change.job.gpus == 64
    plan = make_plan(planned("tensor=4", "context=4"))
    bigger, same = smallest_changes(plan)
    assert changed_flags(plan, bigger) == ["--parallel.context 32"]
    assert (bigger.job.gpus, same.job.gpus) == (128, 16)
    assert len(changed_flags(plan, same)) > 1


def test_the_optimizer_on_the_host_is_advised() -> None:
    """One node, all recomputed: 88 GB of 72, with the optimizer's state on the host 38."""
    over = make_plan(altered(planned("context=1"), {"run.batch.recompute": "full"}))
    assert over.verdict.memory
    [change] = smallest_changes(over)
    assert (changed_flags(over, change), change.job.gpus) == (["--optimizer.device cpu"], 8)


def test_stages_of_listed_layers_are_advised_without_the_list() -> None:
    """448 layers at TP 8, with all else that saves: more stages are left, which the list does not fit."""
    deep = replace(planned("tensor=8", "context=1", "data=1", "pipeline=2"), shape=resized(BIG, layers=448))
    saving = {"run.batch.recompute": "full", "run.parallel.pipeline_layers": (220, 228)}
    deep = altered(deep, {**ON_HOST, **saving})
    plan = make_plan(deep)
    [flags] = [changed_flags(plan, change) for change in smallest_changes(plan)]
    assert flags == ["--parallel.pipeline 8", "--parallel.pipeline-layers"]
    words = " ".join(flags).split()
    assert parse_flags("plan", RECIPE, deep.run, ["recipe", *words]).parallel.pipeline_layers == ()


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


def test_packs_of_the_longest_sequence_are_proposed() -> None:
    plan = for_short_responses()
    same, fewest = shorter_packs(plan)
    assert changed_flags(plan, same) == ["--batch.pack-tokens 18432"]
    assert changed_flags(plan, fewest) == ["--parallel.context 1", "--batch.pack-tokens 18432"]
    assert (plan.job.gpus, same.job.gpus, fewest.job.gpus) == (16, 16, 4)
    assert same.peak < 0.7 * plan.peak
    assert fewest.verdict.fits
    page = plan_text(plan, [], [])
    assert "Packs have room for 67,584 tokens, and the longest sequence has 18,432" in page
    assert f"--batch.pack-tokens 18432: {same.peak / 1e9:.1f} GB on 16 GPUs" in page
    assert plan_dict(plan)["shorter_packs"][1]["gpus"] == 4


def test_packs_that_are_needed_or_decide_the_search_stay() -> None:
    assert not shorter_packs(make_plan(planned()))
    in_packs = for_short_responses(bounds=published_code())
    assert in_packs.job.run.algorithm.bounds.sums_over == "micro_batch"
    assert not shorter_packs(in_packs)
    assert {one.job.run.batch.pack_tokens for one in fastest_layouts(in_packs, 40)} == {67584}


def test_the_comparison_varies_the_packs() -> None:
    plan = for_short_responses()
    found = fastest_layouts(plan, 40)
    assert {one.job.run.batch.pack_tokens for one in found} == {18432, 67584}
    assert found[0].cost < plan.cost
    assert "18,432" in plan_text(plan, [], found[:1])


def test_comparison_is_sorted_and_fits() -> None:
    plans = fastest_layouts(make_plan(planned()), 5)
    assert len(plans) == 5
    assert [p.cost for p in plans] == sorted(p.cost for p in plans)
    assert not any(p.verdict.memory for p in plans)
    assert {p.job.gpus for p in plans} == {64}
    # Only layouts that communicate less are ahead of the recipe's, and they leave less room in an update.
    ahead = list(takewhile(lambda plan: plan.job.parallel != planned().parallel, plans))
    assert len(ahead) < 5
    ours = make_plan(planned())
    assert all(plan.speed.link_seconds < ours.speed.link_seconds for plan in ahead)
    [memory] = ours.stages
    assert all(max(stage.training for stage in plan.stages) > memory.training for plan in ahead)


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


def test_a_handover_that_does_not_fit_is_reported() -> None:
    big = colocated(sync="ipc", bucket_mb=80e3, memory_fraction=0.1)
    told = make_plan(big).verdict.memory
    assert len(told) == 1
    assert "while servers read the weights, 1.0 of them a server's" in told[0]


@pytest.mark.parametrize(
    ("changes", "told", "advice"),
    [
        ({"parallel.offload": False}, "while engines sample", ["--parallel.offload"]),
        (
            {"rollout.sglang.memory_fraction": 0.85},
            "stage 0 needs 77.0 GB while engines sample, 3.0 of them the policy's; a GPU may use 72.0",
            ["--rollout.sglang.memory-fraction 0.75"],
        ),
        (
            {
                "parallel.tensor": 2,
                "parallel.data": 4,
                "rollout.sglang.kept_gb": 12.0,
                "rollout.sglang.memory_fraction": 0.6,
            },
            "GB in an update, 12.0 of them a server's; a GPU may use 72.0",
            ["--optimizer.device cpu"],
        ),
    ],
)
def test_a_misfit_names_its_phase_and_the_smallest_change(
    changes: dict[str, object], told: str, advice: list[str]
) -> None:
    over = make_plan(of_recipe("r1_distill_qwen_7b_8k", changes))
    assert any(told in line for line in over.verdict.memory)
    found = smallest_changes(over)
    assert changed_flags(over, found[-1]) == advice
    assert "DOES NOT FIT" in plan_text(over, found, [])


def test_the_text_of_a_plan_shows_both_turns() -> None:
    def text(changes: dict[str, object]) -> str:
        return plan_text(make_plan(of_recipe("r1_distill_qwen_7b_8k", changes)), [], [])

    turns = text({})
    assert "FITS: at most 46.1 GB (training) and 69.0 GB (sampling) of a GPU's 80 (h100-80gb)" in turns
    assert "  0      train        40.1      6.0   46.1  33.9  fits" in turns
    assert "  0      hand over    10.1     21.2   31.3  48.7  fits" in turns
    assert "  0      sample        3.0     66.0   69.0  11.0  fits" in turns
    assert "read 15.2 GB of weights from the policy's memory: copies 0.1 s, expected 0.7 s" in turns
    assert "hand over" not in text({"rollout.sglang.sync": "disk"})


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
        (DEMO, "--algorithm.loss ppo", "algorithm.loss='ppo' is unknown: give aspo, "),
    ],
)
def test_bad_input_is_named(
    recipe: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bapo(["plan", str(recipe), *flags.split()]) == 2
    assert message in capsys.readouterr().err
