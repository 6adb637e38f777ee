"""Several sources of prompts: as settings, as flags, as prompts, and in what a journal is bound to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.run_directory import plain_values
from bapo_megatron.commands.recipe_flags import recipe_config
from bapo_megatron.config import (
    DataConfig,
    ModelConfig,
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
from bapo_megatron.rollout.sampler.state import GroupSummary
from bapo_megatron.trainer.sft import _batches, load_solutions
from bapo_megatron.types import StepBatch
from tests.support.sampling import ScriptedEngine, World, mixed

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes/demo_cpu.py"


def write(path: Path, *answers: str, question: str = "{}+0=") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number, answer in enumerate(answers):
            row: dict[str, Any] = {"data_source": "test", "extra_info": {"solution": answer, "level": number}}
            row["prompt"] = [{"role": "user", "content": question.format(number)}]
            row["reward_model"] = {"ground_truth": answer, "style": "rule"}
            file.write(json.dumps(row) + "\n")
    return path


def flagged(*flags: str) -> RunConfig:
    return recipe_config("train", RunConfig, [str(RECIPE), *flags])


def test_a_flag_is_a_json_list_that_takes_the_place_of_the_recipes_file() -> None:
    found = flagged("--data.sources", '[{"path": "a", "weight": 2, "reward": "math"}, {"path": "b"}]')
    assert found.data.sources == (SourceConfig(Path("a"), 2, "math"), SourceConfig(Path("b"), 1.0, None))
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


def test_a_flag_of_another_form_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for value, message in (
        ('[{"path": "a", "wight": 2}]', "unexpected keyword argument 'wight'"),
        ('{"path": "a"}', "is not a JSON list of sources"),
        ('[{"weight": 2}]', "is not a JSON list of sources"),
    ):
        with pytest.raises(SystemExit, match="2"):
            flagged("--data.sources", value)
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


A = Path("a")


@pytest.mark.parametrize(
    ("path", "sources", "message"),
    [
        (None, (), "data.path is None: name a file"),
        (Path("x"), (SourceConfig(A),), "data.path=x and data.sources are both"),
        (None, (SourceConfig(A, 0),), r"data.sources\[0\].weight=0 must be above 0"),
        (None, (SourceConfig(A, float("inf")),), "weight=inf is not a finite number"),
        (None, (SourceConfig("a"),), r"data.sources\[0\].path='a' must be a path"),  # type: ignore[arg-type]
        (None, (SourceConfig(Path("x/a.jsonl")), SourceConfig(Path("y/a.json"))), "2 of them are called a"),
        (None, (SourceConfig(A, reward="maths"),), r"data.sources\[a\].reward='maths' is unknown"),
    ],
)
def test_wrong_sources_are_named(path: Path | None, sources: tuple[SourceConfig, ...], message: str) -> None:
    data = DataConfig(path, sources=sources, max_prompt_tokens=48)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(load_recipe(RECIPE, RunConfig), data=data).check()


def test_names_are_those_of_files_and_of_prepared_folders(tmp_path: Path) -> None:
    write(tmp_path / "math/data.jsonl", "1")
    folder, file = SourceConfig(tmp_path / "math"), SourceConfig(tmp_path / "math/data.jsonl")
    assert (folder.name, file.name, SourceConfig(Path("x/mine.v2.jsonl")).name) == ("math", "math", "mine.v2")
    assert folder.file == file.file == tmp_path / "math/data.jsonl"
    # Of a folder what follows a point is left out: runs have begun with the shorter name.
    folders = [tmp_path / "mix_v1.5", tmp_path / "mix_v1.6"]
    for one in folders:
        write(one / "data.jsonl", "1")
    [told] = source_problems(None, tuple(map(SourceConfig, folders)))
    assert told.startswith("data.sources: 2 of them are called mix_v1: ")
    whole = tuple(SourceConfig(one / "data.jsonl") for one in folders)
    assert list(source_problems(None, whole)) == []
    assert [one.name for one in whole] == ["mix_v1.5", "mix_v1.6"]


def test_a_run_directory_holds_sources_as_plain_values() -> None:
    found = flagged("--data.sources", '[{"path": "a", "reward": "m:f"}, {"path": "b", "reward": "code"}]')
    expected = {"path": "a", "weight": 1.0, "reward": "m:f", "environment": None}
    assert plain_values(found)["data.sources"][0] == expected
    assert found.reward_functions == ("m:f", "code", "math")  # the demo's suite is judged by the last
    assert flagged("--evaluation.every", "0").reward_functions == ("math",)


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
    names = [(one.name, one.prompts, one.weight) for one in found.sources]
    assert names == [("first", 3, 2), ("second", 2, 1)]
    assert len({one.sha256 for one in found.sources}) == 2
    data = DataConfig(sources=sources, max_prompt_tokens=48, difficulty="level", min_difficulty=1)
    harder = load_problems(data, "math", tokenizer)
    assert ([one.prompt_id for one in harder.prompts], harder.found) == ([1, 2, 1], 5)
    assert [one.prompts for one in harder.sources] == [2, 1]
    write(second, "proof", "less", question="{}?")
    again = load_problems(DataConfig(sources=sources, max_prompt_tokens=48), "math", tokenizer)
    assert [a.sha256 == b.sha256 for a, b in zip(found.sources, again.sources, strict=True)] == [True, False]


def test_a_mistake_in_a_source_names_it(tmp_path: Path, tokenizer: Any) -> None:
    good = SourceConfig(write(tmp_path / "good.jsonl", "1", "2"))
    write(tmp_path / "bad.jsonl", "1", " ")
    for name, says in (("bad", r"bad\.jsonl, row 1 .*ground_truth"), ("none", r"none\.jsonl: no such file")):
        sources = (good, SourceConfig(tmp_path / f"{name}.jsonl"))
        with pytest.raises(ConfigError, match=rf"^data\.sources\[{name}\]\.path=.*{says}"):
            load_problems(DataConfig(sources=sources, max_prompt_tokens=48), "math", tokenizer)
    sources = (good, SourceConfig(tmp_path / "b.jsonl", reward="math:nothing"))
    config = RunConfig("run", ModelConfig(tmp_path), DataConfig(sources=sources))
    with pytest.raises(ConfigError, match=r"^data\.sources\[b\]\.reward=math:nothing: math has no function"):
        check_functions(config, config.reward_functions)


def test_a_run_that_has_begun_keeps_its_ground_truths(tmp_path: Path, tokenizer: Any) -> None:
    """Later versions refuse more of them, and a run's files must stay as they are."""
    old = write(tmp_path / "old.jsonl", "1", "proof", "['3', '4']")
    for data in (DataConfig(old, 48), DataConfig(sources=(SourceConfig(old),), max_prompt_tokens=48)):
        with pytest.raises(ConfigError, match="row 1 .*'proof' stands for no answer"):
            load_problems(data, "math", tokenizer)
        found = load_problems(data, "math", tokenizer, begun=True)
        assert [one.ground_truth for one in found.prompts] == ["1", "proof", "['3', '4']"]


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


async def steps_of(one: World, first: int, last: int) -> list[StepBatch]:
    async with one.sampling(first_step=first):
        return [await one.train(step) for step in range(first, last + 1)]


async def test_another_weight_or_file_is_refused(tmp_path: Path) -> None:
    await steps_of(world(tmp_path), 1, 1)
    other = world(tmp_path)
    other.config = dataclasses.replace(other.config, data=DataConfig(Path("a"), shuffle=False))
    other.dataset = dataclasses.replace(other.dataset, sources=())
    for changed, message in (
        (world(tmp_path, (3, 1)), r"data\.sources\[a\]\.weight=2\.0, now it is 3\.0: continue with the same"),
        (world(tmp_path, digest="cc"), r"data\.sources\[b\]\.sha256=bb, now it is cc: continue"),
        (other, r"data\.sources=\['a', 'b'\], now it is None"),
    ):
        with pytest.raises(ConfigError, match=message):
            await steps_of(changed, 2, 2)
    await steps_of(world(tmp_path), 2, 2)


def test_summaries_of_earlier_versions_are_of_no_source() -> None:
    assert GroupSummary(*json.loads('[3, [1.0], [5], ["stop"], []]')).source == ""


def test_a_warm_start_mixes_the_solutions_of_its_sources(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of the first to one of the second in every four, whose responses are of one and of two tokens."""
    first = write(tmp_path / "first.jsonl", *"12345")
    second = write(tmp_path / "second.jsonl", "66", "77", question="{}?")
    data = DataConfig(sources=(SourceConfig(first, 3), SourceConfig(second)), max_prompt_tokens=48)
    model = ModelConfig(ROOT / "recipes/demo/policy", "float32")
    config = SftConfig(model, data, tmp_path / "out", updates=3, samples_per_update=4)
    for batch in _batches(config):
        assert sorted(one.response_tokens for one in batch) == [2, 2, 2, 3]  # each with its end
    rated = write(tmp_path / "rated.jsonl", "1", "22", "333")
    of_one = DataConfig(rated, difficulty="level", min_difficulty=1, max_difficulty=1)
    [sample], _ = load_solutions(dataclasses.replace(config, data=of_one), tokenizer, tells=True)
    assert sample.response_tokens == 3
    assert "left out 2 prompts by their level" in capsys.readouterr().out
    missing = write(tmp_path / "none.jsonl", "1", "2")
    missing.write_text(missing.read_text().replace("solution", "other"))
    config = dataclasses.replace(config, data=DataConfig(sources=(SourceConfig(missing),)))
    with pytest.raises(ConfigError, match=r"none\.jsonl, row 0: extra_info\.solution is missing"):
        load_solutions(config, tokenizer)
