"""The third study: its arms, its problems, and its page, on runs made up by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tyro

from bapo_megatron.algo.bounds import fixed, grpo
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.trainer.update_loss import checked_loss
from benchmarks.study.measures import ArmRecord
from benchmarks.study.pages.document import COLUMNS
from benchmarks.study.plan import Arm
from benchmarks.study.real_model.command import (
    CELLS,
    RealModelOptions,
    make_plan,
    prepare_commands,
    real_model_command,
)
from benchmarks.study.real_model.page import page
from benchmarks.study.real_model.recipe import HELD_OUT, TRAIN


@pytest.fixture(autouse=True)
def a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that the recipe names."""
    monkeypatch.chdir(tmp_path)
    model = Path("models/SmolLM2-135M-Instruct")
    for path in (model / "config.json", TRAIN, HELD_OUT):
        path.parent.mkdir(parents=True)
        path.write_text("{}")


def configured(arm: Arm) -> RunConfig:
    command, recipe, *flags = arm.command
    assert command == "train"
    return tyro.cli(RunConfig, default=load_recipe(Path(recipe), RunConfig), args=flags)


def test_the_arms() -> None:
    """Seed by seed, all at one learning rate; staleness 8 is two passes of four mini-batches."""
    plan = make_plan(RealModelOptions())
    assert [(arm.method, arm.passes, arm.seed) for arm in plan.arms] == [
        (*cell, seed) for seed in range(4) for cell in CELLS
    ]
    assert {arm.memory for arm in plan.arms} == {"4.5 GB in each of two processes"}
    runs = {arm.method: configured(arm) for arm in plan.arms if arm.passes == 8}
    for run in runs.values():
        run.check()
        assert (run.algorithm.reuse_epochs, run.algorithm.updates_per_epoch) == (2, 4)
        assert (run.optimizer.lr, run.optimizer.warmup_updates) == (1.5e-5, 32)
        checked_loss(run)  # it refuses what no check of the fields sees
    assert runs["fixed_0.6_1.2"].algorithm.bounds == fixed(0.6, 1.2)
    assert runs["grpo"].algorithm.bounds == runs["grpo_sequence"].algorithm.bounds == grpo()
    assert [name for name, run in runs.items() if run.algorithm.loss_mean == "sequence"] == [
        "grpo_sequence",
        "gspo",
    ]


def test_the_problems_that_are_missing_are_made_held_out_first() -> None:
    assert prepare_commands(RealModelOptions()) == []
    TRAIN.unlink()
    HELD_OUT.unlink()
    held_out, train = prepare_commands(RealModelOptions())
    assert held_out[:2] == train[:2] == ["data", "prepare"]
    assert f"--output={HELD_OUT.parent}" in held_out
    assert "--against" not in held_out
    assert train[train.index("--against") + 1] == str(HELD_OUT)


def test_without_the_model_it_says_what_fetches_it() -> None:
    Path("models/SmolLM2-135M-Instruct/config.json").unlink()
    with pytest.raises(ConfigError, match="models/SmolLM2-135M-Instruct: `make real-model` fetches it"):
        real_model_command([], _not_run)


def _not_run(_arguments: object) -> int:
    raise AssertionError("a command was run")


def record(name: str, staleness: int, seed: int, reward: float, moved: float = math.nan) -> ArmRecord:
    figures = dict.fromkeys(COLUMNS, math.nan) | {"mean_reward": reward, "held_out": 0.5, "moved": moved}
    figures |= {"collapsed": 0.0, "positive_share": 0.375, "clipped": 0.0625, "entropy_kept": 0.2 * reward}
    figures |= {"below_target": 0.25, "one_sign": 0.5, "update_tokens": 512.0, "response_tokens": 32.0}
    return ArmRecord(
        name,
        staleness,
        seed,
        figures,
        {"reward": np.array([0.25 if seed else reward]), "positive_share": np.array([0.375 + seed / 8])},
    )


def test_the_page_shows_differences_and_calls_nothing_better() -> None:
    """Mean rewards of `paper` are 0.1, 0.2 and 0.3 above GRPO's: 0.2, and t(2) = 4.30 times 0.1 / sqrt(3)."""
    plan = make_plan(RealModelOptions(seeds=3))
    records = [
        *(
            record("grpo", passes, seed, reward)
            for passes, reward in ((1, 0.3), (8, 0.4))
            for seed in range(3)
        ),
        *(record("paper", 8, seed, 0.5 + 0.1 * seed, moved=0.75) for seed in range(3)),
        *(record("fixed_0.6_1.2", 8, seed, 0.3 + 0.1 * seed) for seed in range(3)),
    ]
    text = page(plan, records, ["gspo-8-seed0: out of memory"])
    assert "12 of 21 arms are done. All numbers are computed from [study.jsonl](study.jsonl)." in text
    differences = ("+0.200 (-0.048 to +0.448)", "+0.000 (+0.000 to +0.000)", "+0.040 (-0.010 to +0.090)")
    assert f"| `paper` | {' | '.join(f'{one}, 3 seeds' for one in differences)} |" in text
    assert "Yes: a bound moved in 0.75 ± 0 of the stale updates of `paper`." in text
    assert "A group of 256 tokens is about 8 of its responses, which have 32 tokens in the mean. An" in text
    assert "has 512 tokens, 2.0 times a group. 0.5 ± 0 of the tokens were in groups of one sign" in text
    assert "less than the target of 0.4 in 0.25 ± 0 of the stale updates of `paper`, as its searches" in text
    assert "begin with the same batch, except `grpo` at 8, seed 0, `paper` at 8, seed 0, whose" in text
    assert "they held 0.500 of it on-policy (0.375 to 0.625 over the seeds), where the" in text
    assert "| `grpo` at 8 | +0.100 (+0.100 to +0.100), 3 seeds | +0.000" in text
    gates = text.partition("## The second study's gates, here")[2].partition("## The arms")[0]
    assert "2 of the 5 would fail." in gates  # two were not measured
    assert "| positive share of the gradient | 0.2 to 0.4 | 0.375 ± 0 | no spread | 3 | holds |" in gates
    assert "| clipped tokens | 0.02 to 0.06 | 0.0625 ± 0 | no spread | 3 | **fails** |" in gates
    assert "- gspo-8-seed0: out of memory" in text
    with_start = text.partition("| minus `fixed_0.6_1.2` |")[2]
    assert "| `paper` | +0.200 (+0.200 to +0.200), 3 seeds |" in with_start
    idle = [replace(one, figures={**one.figures, "moved": 0.25}) for one in records]
    text = page(plan, idle, ())
    assert "**No**: a bound moved in 0.25 ± 0 of the stale updates of `paper`. In the other updates" in text
    assert "minus `fixed_0.6_1.2`" not in text
    assert "None has run." in page(plan, (), ())
