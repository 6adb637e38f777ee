"""Several sources of prompts: as settings, as flags, as prompts, and in what a journal is bound to."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.run_directory import plain_values
from bapo_megatron.commands.recipe_flags import recipe_config
from bapo_megatron.config import (
    DataConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SftConfig,
    SourceConfig,
    load_recipe,
)
from bapo_megatron.config.sources import source_problems
from bapo_megatron.data.problem_sets import load_problems
from bapo_megatron.data.prompts import MixedSource
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.functions import check_functions
from bapo_megatron.reward.pool import RewardPool, RewardResult
from bapo_megatron.rollout.sampler.state import GroupSummary
from bapo_megatron.trainer.sft import _batches, load_solutions
from bapo_megatron.types import StepBatch
from tests.support.sampling import ScriptedEngine, World, mixed, prompt_ids

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes/demo_cpu.py"


def write(path: Path, *answers: str, question: str = "{}+0=") -> Path:
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": question.format(number)}],
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"solution": answer, "level": number},
        }
        for number, answer in enumerate(answers)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flagged(*flags: str) -> RunConfig:
    return recipe_config("train", RunConfig, [str(RECIPE), *flags])


# --- settings and flags ---------------------------------------------------------------------------


def test_a_flag_is_a_json_list_that_takes_the_place_of_the_recipes_file() -> None:
    found = flagged("--data.sources", '[{"path": "a.jsonl", "weight": 2, "reward": "math"}, {"path": "b"}]')
    assert found.data.sources == (
        SourceConfig(Path("a.jsonl"), 2, "math"),
        SourceConfig(Path("b"), 1.0, None),
    )
    assert found.data.path is None
    found.check()
    assert flagged('data.sources=[{"path": "b"}]').data.sources == (SourceConfig(Path("b")),)


def test_a_file_as_a_flag_takes_the_place_of_the_recipes_sources(tmp_path: Path) -> None:
    recipe = tmp_path / "two.py"
    recipe.write_text(
        "from dataclasses import replace\nfrom pathlib import Path\n"
        "from bapo_megatron.config import DataConfig, RunConfig, SourceConfig, load_recipe\n\n"
        "def recipe():\n"
        f"    run = load_recipe(Path({str(RECIPE)!r}), RunConfig)\n"
        "    sources = (SourceConfig(Path('a.jsonl')), SourceConfig(Path('b.jsonl'), 0.5))\n"
        "    return replace(run, data=DataConfig(sources=sources, max_prompt_tokens=48))\n"
    )
    two = recipe_config("train", RunConfig, [str(recipe), "--steps", "3"])
    assert two.data.source_names == ("a", "b")
    one = recipe_config("train", RunConfig, [str(recipe), "--data.path", "c.jsonl"])
    assert (one.data.path, one.data.sources) == (Path("c.jsonl"), ())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('[{"path": "a", "wight": 2}]', "a source has no wight"),
        ('{"path": "a"}', "is not a JSON list of sources"),
        ('[{"weight": 2}]', "is not a JSON list of sources"),
    ],
)
def test_a_flag_of_another_form_is_refused(
    value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        flagged("--data.sources", value)
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(), "data.path is None: name a file"),
        (DataConfig(Path("x"), sources=(SourceConfig(Path("a")),)), "data.path=x and data.sources are both"),
        (DataConfig(sources=(SourceConfig(Path("a"), 0),)), r"data.sources\[0\].weight=0 must be above 0"),
        (DataConfig(sources=(SourceConfig(Path("a"), float("inf")),)), "weight=inf is not a finite number"),
        (DataConfig(sources=(SourceConfig("a"),)), r"data.sources\[0\].path='a' must be a path"),  # type: ignore[arg-type]
        (
            DataConfig(sources=(SourceConfig(Path("x/a.jsonl")), SourceConfig(Path("y/a.json")))),
            "data.sources: 2 of them are called a",
        ),
        (
            DataConfig(sources=(SourceConfig(Path("a"), reward="maths"),)),
            r"data.sources\[a\].reward='maths' is unknown: give math, code",
        ),
    ],
)
def test_wrong_sources_are_named(data: DataConfig, message: str) -> None:
    run = load_recipe(RECIPE, RunConfig)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(run, data=dataclasses.replace(data, max_prompt_tokens=48)).check()


def test_folders_of_one_name_but_for_what_follows_a_point(tmp_path: Path) -> None:
    """Runs have begun with the shorter name, and metrics and journals have it."""
    folders = [tmp_path / "mix_v1.5", tmp_path / "mix_v1.6"]
    for folder in folders:
        write(folder / "data.jsonl", "1")
    says = r"2 of them are called mix_v1: .*; .*/mix_v1\.5/data\.jsonl has the whole name of its folder"
    assert re.search(says, "".join(source_problems(None, tuple(map(SourceConfig, folders)))))
    whole = tuple(SourceConfig(folder / "data.jsonl") for folder in folders)
    assert list(source_problems(None, whole)) == []
    assert [one.name for one in whole] == ["mix_v1.5", "mix_v1.6"]


def test_names_are_those_of_files_and_of_prepared_folders(tmp_path: Path) -> None:
    write(tmp_path / "math/data.jsonl", "1")
    folder, file = SourceConfig(tmp_path / "math"), SourceConfig(tmp_path / "math/data.jsonl")
    assert (folder.name, file.name, SourceConfig(Path("x/mine.v2.jsonl")).name) == ("math", "math", "mine.v2")
    assert folder.file == file.file == tmp_path / "math/data.jsonl"


def test_a_run_directory_holds_sources_as_plain_values() -> None:
    found = flagged("--data.sources", '[{"path": "a.jsonl", "weight": 2}]')
    expected = {"path": "a.jsonl", "weight": 2, "reward": None, "environment": None}
    assert plain_values(found)["data.sources"] == [expected]


def test_the_reward_functions_are_those_that_judge() -> None:
    run = flagged("--data.sources", '[{"path": "a", "reward": "m:f"}, {"path": "b", "reward": "code"}]')
    assert run.reward_functions == ("m:f", "code", "math")  # the demo's suite is judged by the last
    assert flagged("--evaluation.every", "0").reward_functions == ("math",)


# --- prompts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ROOT / "recipes/demo/policy")


def test_prompts_of_all_sources_lie_one_after_the_other(tmp_path: Path, tokenizer: Any) -> None:
    first = write(tmp_path / "first/data.jsonl", "1", "2", "3")
    second = write(tmp_path / "second.jsonl", "proof", "more", question="{}?")  # no answer for "math"
    sources = (SourceConfig(first.parent, 2), SourceConfig(second, 1, "mine:score"))
    found = load_problems(DataConfig(sources=sources, max_prompt_tokens=48), "math", tokenizer)
    assert [(one.source, one.reward, one.prompt_id) for one in found.prompts] == [
        *(("first", "", number) for number in range(3)),
        *(("second", "mine:score", number) for number in range(2)),
    ]
    assert [(one.name, one.prompts, one.weight) for one in found.sources] == [
        ("first", 3, 2),
        ("second", 2, 1),
    ]
    assert len({one.sha256 for one in found.sources}) == 2
    data = DataConfig(sources=sources, max_prompt_tokens=48, difficulty="level", min_difficulty=1)
    harder = load_problems(data, "math", tokenizer)
    assert ([one.prompt_id for one in harder.prompts], harder.found) == ([1, 2, 1], 5)
    assert [one.prompts for one in harder.sources] == [2, 1]
    write(second, "proof", "less", question="{}?")
    again = load_problems(DataConfig(sources=sources, max_prompt_tokens=48), "math", tokenizer)
    assert [a.sha256 == b.sha256 for a, b in zip(found.sources, again.sources, strict=True)] == [True, False]


def test_a_mistake_in_a_source_names_it(tmp_path: Path, tokenizer: Any) -> None:
    good, bad = (
        write(tmp_path / "good.jsonl", "1", "2"),
        write(tmp_path / "bad.jsonl", "1", " "),
    )
    data = DataConfig(sources=(SourceConfig(good), SourceConfig(bad)), max_prompt_tokens=48)
    with pytest.raises(ConfigError, match=r"^data\.sources\[bad\]\.path=.*bad\.jsonl, row 1 .*ground_truth"):
        load_problems(data, "math", tokenizer)
    data = dataclasses.replace(data, sources=(SourceConfig(good), SourceConfig(tmp_path / "none.jsonl")))
    with pytest.raises(ConfigError, match=r"^data\.sources\[none\]\.path=.*none\.jsonl: no such file"):
        load_problems(data, "math", tokenizer)


def test_a_run_that_has_begun_keeps_its_ground_truths(tmp_path: Path, tokenizer: Any) -> None:
    """Later versions refuse more of them, and a run's files must stay as they are."""
    old = write(tmp_path / "old.jsonl", "1", "proof", "['3', '4']")
    for data in (DataConfig(old, 48), DataConfig(sources=(SourceConfig(old),), max_prompt_tokens=48)):
        with pytest.raises(ConfigError, match="row 1 .*'proof' stands for no answer"):
            load_problems(data, "math", tokenizer)
        found = load_problems(data, "math", tokenizer, begun=True)
        assert [one.ground_truth for one in found.prompts] == ["1", "proof", "['3', '4']"]


def test_the_reward_of_a_source_that_cannot_be_had_is_named_by_its_field(tmp_path: Path) -> None:
    sources = (SourceConfig(tmp_path / "a.jsonl"), SourceConfig(tmp_path / "b.jsonl", reward="math:nothing"))
    config = RunConfig("run", ModelConfig(tmp_path), DataConfig(sources=sources))
    with pytest.raises(ConfigError, match=r"^data\.sources\[b\]\.reward=math:nothing: math has no function"):
        check_functions(config, config.reward_functions)


# --- rewards --------------------------------------------------------------------------------------


def test_each_response_is_judged_by_the_reward_of_its_source(tmp_path: Path, tokenizer: Any) -> None:
    own = "tests.support.reward_functions:by_source"
    files = [write(tmp_path / f"{name}.jsonl", "7", "8") for name in ("plain", "own")]
    sources = (SourceConfig(files[0]), SourceConfig(files[1], reward=own))
    prompts = load_problems(DataConfig(sources=sources, max_prompt_tokens=48), "math", tokenizer).prompts

    async def scores() -> list[RewardResult]:
        pool = RewardPool(RewardConfig(workers=1), 100, ("math", own))
        await pool.start()
        try:
            return [await pool.score(one, r"\boxed{7}", 3) for one in (prompts[0], prompts[1], prompts[2])]
        finally:
            await pool.close()

    assert [one.reward for one in asyncio.run(scores())] == [1.0, 0.0, 0.25]


# --- the sampler ----------------------------------------------------------------------------------


def world(folder: Path, weights: tuple[float, ...] = (2, 1), digest: str = "bb") -> World:
    """Prompts 0 to 7 are of source a, 8 to 11 of source b; they come in their order."""
    found = World(folder, [ScriptedEngine(mixed)], prompts_per_step=3, group_size=2)
    sources = tuple(SourceConfig(Path(name), weight) for name, weight in zip("ab", weights, strict=True))
    found.config = dataclasses.replace(
        found.config, data=DataConfig(sources=sources, shuffle=False, max_prompt_tokens=48)
    )
    prompts = [dataclasses.replace(p, source="a" if p.prompt_id < 8 else "b") for p in found.dataset.prompts]
    mixture = (MixedSource("a", 8, weights[0], "aa"), MixedSource("b", 4, weights[1], digest))
    found.dataset = dataclasses.replace(found.dataset, prompts=prompts, sources=mixture)
    return found


ORDER = [0, 8, 1, 2, 9, 3, 4, 10, 5, 6, 11, 7]


async def steps_of(one: World, first: int, last: int) -> list[StepBatch]:
    async with one.sampling(first_step=first):
        return [await one.train(step) for step in range(first, last + 1)]


async def test_a_sampler_mixes_and_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    batches = await steps_of(world(tmp_path), 1, 2)
    batches += await steps_of(world(tmp_path), 3, 4)
    assert [number for batch in batches for number in prompt_ids(batch)] == ORDER
    metrics = batches[0].metrics
    assert metrics["source/a/rollout/groups"] == 2
    assert metrics["source/b/rollout/groups_sampled"] == 1
    assert metrics["source/a/reward/mean"] == metrics["source/b/reward/mean"] == 0.5
    assert metrics["source/a/rollout/length_mean"] == metrics["rollout/length_mean"]
    assert batches[0].groups[1].prompt.source == "b"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": (3, 1)}, r"data\.sources\[a\]\.weight=2\.0, now it is 3\.0: continue with the same"),
        (
            {"digest": "cc"},
            r"data\.sources\[b\]\.sha256=bb, now it is cc: .*files, or name another --run-dir",
        ),
    ],
)
async def test_another_weight_or_file_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    await steps_of(world(tmp_path), 1, 1)
    with pytest.raises(ConfigError, match=message):
        await steps_of(world(tmp_path, **changed), 2, 2)
    other = world(tmp_path)
    other.config = dataclasses.replace(other.config, data=DataConfig(Path("a"), shuffle=False))
    other.dataset = dataclasses.replace(other.dataset, sources=())
    with pytest.raises(ConfigError, match=r"data\.sources=\['a', 'b'\], now it is None"):
        await steps_of(other, 2, 2)
    await steps_of(world(tmp_path), 2, 2)


def test_summaries_of_earlier_versions_are_of_no_source() -> None:
    assert GroupSummary(*json.loads('[3, [1.0], [5], ["stop"], []]')).source == ""


# --- the warm start -------------------------------------------------------------------------------


def test_a_warm_start_mixes_the_solutions_of_its_sources(tmp_path: Path, tokenizer: Any) -> None:
    """Three of the first to one of the second in every four, whose responses are of one and of two tokens."""
    first = write(tmp_path / "first.jsonl", *"12345")
    second = write(tmp_path / "second.jsonl", "66", "77", question="{}?")
    data = DataConfig(sources=(SourceConfig(first, 3), SourceConfig(second)), max_prompt_tokens=48)
    model = ModelConfig(ROOT / "recipes/demo/policy", "float32")
    config = SftConfig(model, data, tmp_path / "out", updates=3, samples_per_update=4)
    for batch in _batches(config):
        assert sorted(one.response_tokens for one in batch) == [2, 2, 2, 3]  # each with its end
    rated = write(tmp_path / "rated.jsonl", "1", "22", "333")
    rows = [json.loads(line) for line in rated.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["extra_info"]["failures"] = number
    rated.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_one = DataConfig(rated, difficulty="failures", min_difficulty=1, max_difficulty=1)
    [sample], _ = load_solutions(dataclasses.replace(config, data=of_one), tokenizer)
    assert sample.response_tokens == 3
    missing = write(tmp_path / "none.jsonl", "1", "2")
    missing.write_text(missing.read_text().replace("solution", "other"))
    config = dataclasses.replace(config, data=DataConfig(sources=(SourceConfig(missing),)))
    with pytest.raises(ConfigError, match=r"none\.jsonl, row 0: extra_info\.solution is missing"):
        load_solutions(config, tokenizer)
