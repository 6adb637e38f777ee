"""Rehearsals of models with experts against the plan, and of the recipes, shortened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from bapo_megatron.config import ParallelConfig, RunConfig
from bapo_megatron.hf.config import attention_flops, linear_flops_per_token, read_model_shape
from bapo_megatron.planning.job import Job
from bapo_megatron.planning.memory import FIXED, stage_memory
from bapo_rehearsal.job import rehearse
from bapo_rehearsal.records import RankRequest, RankResult
from bapo_rehearsal.results import collective_mismatches
from tests.support.cluster_recipes import cluster_recipe
from tests.support.rehearsals import TOKENS, expert_run, shortened
from tests.support.shapes import activation_bytes_per_token

pytestmark = pytest.mark.distributed

EP = ParallelConfig(data=2, expert=2)
BOTH = ParallelConfig(tensor=2, sequence=True, data=2, expert=2, expert_tensor=2)


@pytest.mark.slow
def test_every_rank_of_a_layout_agrees(tmp_path: Path) -> None:
    """With torch's layers and recomputation, where all are as busy."""
    config = expert_run(tmp_path, BOTH, recompute="selective")
    ranks = rehearse([RankRequest(config, rank, 1) for rank in range(4)], workers=2)
    assert [rank.error for rank in ranks] == [None] * 4
    assert collective_mismatches(ranks) == []
    assert {"EP", "ETP", "expert DP"} & {call.group for call in ranks[0].calls} >= {"EP", "ETP"}


BUSY = 1.5
FEW, MORE = 2, 4
"""Layers of a small model."""

RECIPES = {
    "qwen3_30b_a3b": (2, ()),
    "qwen3_6_35b_a3b": (4, ()),  # three of Gated DeltaNet, one of attention
    "qwen3_235b_a22b": (5, (1, 1, 1, 2)),
}
"""Layers to which a recipe's model is shortened, and those of its stages."""


WORKSPACES = 4 * 33_555_456
"""Bytes of Transformer Engine's workspaces for grouped products, which the plan has in its reserve."""


@dataclass
class Rehearsals:
    """All with Transformer Engine's layers in one go, as its import takes as long as some of them."""

    small: list[tuple[RunConfig, RankResult]]
    """Of few layers, and of more."""
    recipes: dict[str, tuple[Job, RankResult]]


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> Rehearsals:
    jobs: dict[str, Job] = {}
    for name, (layers, stages) in RECIPES.items():
        jobs[name] = shortened(cluster_recipe(name), layers, tmp_path_factory.mktemp("recipe"), stages)
    small = [expert_run(tmp_path_factory.mktemp("small"), EP, layers=layers) for layers in (FEW, MORE)]
    requests = [RankRequest(config, 0, 1, expert_imbalance=BUSY) for config in small]
    for job in jobs.values():
        packs = job.parallel.pipeline + 1 if job.parallel.pipeline > 1 else 1
        requests.append(RankRequest(job.run, 0, packs, expert_imbalance=job.options.expert_imbalance))
    few, more, *others = rehearse(requests, "te")
    found = zip(jobs.items(), others, strict=True)
    return Rehearsals(
        [*zip(small, (few, more), strict=True)], {name: (job, result) for (name, job), result in found}
    )


@pytest.mark.slow
def test_the_busiest_rank_of_transformer_engines_layers(rehearsals: Rehearsals) -> None:
    """What a layer keeps by the plan, and the FLOPs of half as many copies again as the mean."""
    (config, few), (_, more) = rehearsals.small
    assert (few.error, more.error) == (None, None)
    shape = read_model_shape(config.model.hf_path)
    assert shape.experts is not None
    planned = activation_bytes_per_token(shape, EP, 2, "none", "te", BUSY).layer
    kept = [result.gpu["update 2"].kinds["activations"] for result in (few, more)]
    assert (kept[1] - kept[0]) / 2 / TOKENS == pytest.approx(planned, rel=0.03)  # blocks of 512 B
    forward = linear_flops_per_token(shape) * TOKENS + attention_flops(shape, TOKENS)
    experts = 2 * shape.layers * 3 * shape.hidden * shape.experts.per_token * shape.experts.ffn * TOKENS
    assert few.flops["bounds search 2"] == pytest.approx(forward + (BUSY - 1) * experts, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_the_plan_agrees(name: str, rehearsals: Rehearsals) -> None:
    check_plan(*rehearsals.recipes[name])


def check_plan(job: Job, found: RankResult) -> None:
    """States exactly; peaks to 2 % where all is recomputed, else to 8, and to 3: in a model of few layers one
    chunk of logits is much."""
    assert found.error is None
    plan, update = stage_memory(job, 0), found.gpu["update 2"]
    within = 0.02 if job.run.batch.recompute == "full" else 0.08
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(plan, kind) == pytest.approx(update.kinds.get(kind, 0), rel=0.001), kind
    assert plan.training - plan.reserve == pytest.approx(update.size - WORKSPACES, rel=within)
    sync = found.gpu["weight sync"].size - WORKSPACES
    assert plan.syncing - FIXED == pytest.approx(sync, rel=0.03)
    # A load has no moments twice; it joins the weights of each MLP's first matrix anew.
    states = plan.weights + plan.gradients + plan.optimizer
    assert found.gpu["load"].size - WORKSPACES < states + plan.weights / 2
