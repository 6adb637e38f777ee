"""Recipes: for clusters they are built, checked, held against the model's shape, planned; and the demo."""

from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.algo.bapo import clip_higher, fixed, grpo, paper
from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.cli import run as bapo
from bapo_megatron.commands.doctor.recipe import placement_rows
from bapo_megatron.config import RewardConfig, RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.config.validation import flat
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.job import find_shape
from bapo_megatron.policy.layout import layout_problems
from bapo_megatron.trainer import preflight
from tests.support.cluster_recipes import CLUSTER_RECIPES, cluster_recipe

BASE = "r1_distill_qwen_7b_8k"

# Longest response, as in the paper where it says one, and GPUs that train.
STATED = {
    "bp_math_32b_64k": (65536, 64),
    "bp_math_7b_64k": (65536, 16),
    "octothinker_llama_3b": (8192, 4),
    "partial_rollout_7b": (8192, 4),
    "r1_distill_qwen_32b": (32768, 32),
    "r1_distill_qwen_32b_two_nodes": (32768, 8),
    "r1_distill_qwen_14b_16k": (16384, 8),
    BASE: (8192, 8),
    f"{BASE}_four_gpus": (8192, 4),
    **{
        f"{BASE}_{variant}": (8192, 8)
        for variant in ("asymmetric", "clip_higher", "grpo", "on_policy", "own_method", "papo")
    },
    "qwen3_4b_8k": (8192, 8),
    "qwen2_5_7b_tools": (8192, 4),
    "qwen3_4b_8k_four_gpus": (8192, 4),
    "qwen3_4b_tools": (8192, 8),
    "qwen3_5_4b_8k": (8192, 8),
    "qwen3_8b_16k": (16384, 8),
    "qwen3_8_27b_32k": (32768, 32),
    "qwen3_32b": (32768, 32),
    "qwen3_32b_two_nodes": (32768, 8),
    "qwen3_30b_a3b": (16384, 16),
    "qwen3_30b_a3b_two_nodes": (16384, 8),
    "qwen3_6_35b_a3b": (16384, 16),
    "qwen3_235b_a22b": (16384, 128),
}
SPLIT = ("octothinker_llama_3b", "partial_rollout_7b", "qwen2_5_7b_tools")
"""On one node, each GPU for one task."""
COLOCATED = [
    name
    for name in STATED
    if name.startswith((BASE, "r1_distill_qwen_14b", "qwen3_4b", "qwen3_5_4b", "qwen3_8b"))
]
"""On one node, each GPU for both tasks in turns."""
BOUNDS: dict[str, BoundsConfig] = {
    f"{BASE}_grpo": grpo(),
    f"{BASE}_on_policy": grpo(),
    f"{BASE}_clip_higher": clip_higher(),
    f"{BASE}_asymmetric": fixed(0.8, 1.5),
    f"{BASE}_own_method": BoundsConfig(),
    "octothinker_llama_3b": replace(paper(), low_start=0.8, high_end=2.0, target=0.45),
}


def searched_tokens(run: RunConfig) -> int:
    """As many responses in a search as 16,384 tokens are with responses of 8k."""
    return 2 * run.rollout.max_response_tokens


def load(name: str) -> RunConfig:
    return load_recipe(cluster_recipe(name), RunConfig)


def test_the_list_is_whole() -> None:
    assert [path.stem for path in CLUSTER_RECIPES] == sorted(STATED)


def plan_page(path: Path, *flags: str) -> str:
    with redirect_stdout(StringIO()) as page:
        assert bapo(["plan", str(path), *flags]) == 0
    return page.getvalue()


@cache
def plan(name: str, *flags: str) -> Any:
    return json.loads(plan_page(cluster_recipe(name), *flags, "--json"))


@pytest.mark.parametrize("path", CLUSTER_RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_sound(path: Path) -> None:
    run = load(path.stem)
    run.check()
    shape = find_shape(path, run.model.hf_path)
    assert list(layout_problems(run.parallel, shape)) == []
    assert run.name == path.stem
    assert run.longest_sequence <= shape.max_positions
    assert run.rollout.max_response_tokens == STATED[path.stem][0]
    assert (run.optimizer.lr, run.rollout.temperature) == (2e-6, 0.6)
    assert run.algorithm.bounds == BOUNDS.get(path.stem, paper(searched_tokens(run)))
    assert run.rollout.engine == "sglang"
    assert (run.rollout.drop_uniform_groups, run.rollout.max_oversampling) == (True, 3.0)
    assert run.reward == RewardConfig()  # a box decides, no penalty for length


@pytest.mark.parametrize("path", CLUSTER_RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_gpus_and_a_run_accepts_its_servers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node of eight GPUs: a recipe whose text says one node starts there as it is; the servers of the
    others are on nodes of their own, and are named to it."""
    found = plan(path.stem)
    assert (found["recipe"], found["gpus"], found["fits"]) == (path.stem, STATED[path.stem][1], True)
    said = "servers need nodes of their own" in plan_page(path)
    alone = path.stem in (*SPLIT, *COLOCATED)
    assert said == (found["servers_problem"] is not None) == (not alone)

    monkeypatch.setattr(preflight, "has_cuda", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    run = load(path.stem)
    sglang = replace(run.rollout.sglang, python=Path(sys.executable))
    started = replace(run, rollout=replace(run.rollout, sglang=sglang))
    if alone:
        preflight._check_engine(started)
        servers = sglang.servers * sglang.tensor
        idle = 8 - found["gpus"] - servers if path.stem in SPLIT else found["gpus"] - servers
        assert idle == 0
    else:
        with pytest.raises(ConfigError, match=re.escape(found["servers_problem"])):
            preflight._check_engine(started)
        named = replace(sglang, urls=("http://node9:30000",))
        preflight._check_engine(replace(run, rollout=replace(run.rollout, sglang=named)))
    preflight._check_engine(started, of_job=True)
    rows = [row.state for row in placement_rows(started)]  # to the doctor it is a job's, and it says so
    assert rows == ([] if alone else ["optional"])


@pytest.mark.parametrize("in_job", [False, True])
def test_servers_on_gpus_that_train_are_a_problem_where_no_job_can_move_them(
    in_job: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "has_cuda", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if in_job:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    run = load("partial_rollout_7b")
    beside = replace(run.rollout.sglang, first_gpu=0, python=Path(sys.executable))
    [row] = placement_rows(replace(run, rollout=replace(run.rollout, sglang=beside)))
    assert row.state == ("optional" if in_job else "problem")


@pytest.mark.parametrize("name", COLOCATED)
def test_a_tenth_of_a_gpu_is_free_in_both_turns(name: str) -> None:
    """And of a node's host memory, if it has 1 TB. All processes of the job are on one node."""
    run = load(name)
    assert run.rollout.sglang.colocated
    assert run.parallel.offload
    found = plan(name)
    for stage in found["stages"]:
        train = max(stage[phase] for phase in ("training", "saving", "syncing")) + stage["kept"]
        assert stage["kept"] == 1e9 * run.rollout.sglang.kept_gb
        assert 0 < train <= 72e9
        assert 0 < stage["sampling"] <= 72e9
    assert found["host"] <= 0.9e12
    assert found["trainer_nodes"] == 1
    assert found["server_nodes"] == 0


@pytest.mark.parametrize(
    "name", ["r1_distill_qwen_32b_two_nodes", "qwen3_32b_two_nodes", "qwen3_30b_a3b_two_nodes"]
)
def test_a_recipe_of_two_nodes_has_one_for_each_task(name: str) -> None:
    found = plan(name, "--engine-gpus", "8")
    assert (found["trainer_nodes"], found["server_nodes"]) == (1, 1)
    assert found["engines"]["count"] * load(name).rollout.sglang.tensor == 8
    assert max(stage["peak"] for stage in found["stages"]) < 0.9 * 80e9
    assert 0.9e12 < found["host"] < 1.1e12  # as its docstring says


def differing(name: str, base: str) -> set[str]:
    ours, theirs = flat(load(name)), flat(load(base))
    return {field for field in theirs if ours[field] != theirs[field]} - {"name"}


@pytest.mark.parametrize("variant", ["grpo", "clip_higher", "asymmetric", "on_policy", "papo"])
def test_a_variant_differs_in_its_method_alone(variant: str) -> None:
    fields = differing(f"{BASE}_{variant}", BASE)
    assert fields
    method = ("algorithm.bounds.", "algorithm.polarity.", "algorithm.reuse")
    assert all(name.startswith(method) for name in fields)


def test_four_gpus_or_a_tool_differ_in_nothing_else() -> None:
    """So the ranks with a tool are those of qwen3_4b_8k, which is rehearsed."""
    for whole in (BASE, "qwen3_4b_8k"):
        assert differing(f"{whole}_four_gpus", whole) == {"parallel.data", "rollout.sglang.servers"}
    expected = {f"environment.{name}" for name in ("function", "settings", "max_turns", "workers")}
    assert differing("qwen3_4b_tools", "qwen3_4b_8k") == {"data.path", *expected}
