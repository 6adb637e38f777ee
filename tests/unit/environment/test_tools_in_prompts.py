"""Tools that an environment describes: in the prompts of its source and suites, or refused in words."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config import DataConfig, EnvironmentConfig, EvaluationConfig, SourceConfig
from bapo_megatron.data.problem_sets import load_problems
from bapo_megatron.data.prompts import load_prompts
from bapo_megatron.environment import PROMPT_TOOLS
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.requests import Dataset, identity
from bapo_megatron.rollout.sampler.turns import check_environment, check_environments, tools_of
from bapo_megatron.trainer.suites import load_suites
from tests.support.chat_templates import FOLDERS, demo_tokenizer, family_tokenizer
from tests.support.environments import Described
from tests.support.episodes import EpisodeWorld
from tests.unit.environment.test_template import CHATML, OPENING

DESCRIBED = EnvironmentConfig("tests.support.environments:Described", workers=1)
PLAIN = EnvironmentConfig("tests.support.environments:Plain", workers=1)
MESSAGES = [{"role": "user", "content": "What is a zebu?"}]


def rows(file: Path) -> Path:
    """Two problems."""
    file.parent.mkdir(exist_ok=True)
    for content in (MESSAGES[0]["content"], "And a gnu?"):
        row = {"prompt": [{"role": "user", "content": content}], "reward_model": {"ground_truth": "1"}}
        with file.open("a") as lines:
            lines.write(json.dumps({"data_source": "test", **row}) + "\n")
    return file


def writes_tools() -> Any:
    """The demo's tokenizer with a template that writes tools first."""
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML + OPENING
    return tokenizer


def config_of(folder: Path, **own: EnvironmentConfig | None) -> Any:
    """A run of sources, with an evaluation of files of the same and of another name."""
    sources = tuple(
        SourceConfig(rows(folder / f"{name}.jsonl"), environment=one) for name, one in own.items()
    )
    world = EpisodeWorld(folder / "run", lambda *_: "end")
    suites = tuple(str(rows(folder / f"suites_{name}" / f"{name}.jsonl")) for name in (*own, "other"))
    return dataclasses.replace(
        world.config,
        model=dataclasses.replace(world.config.model, hf_path=Path("recipes/demo/policy")),
        data=DataConfig(sources=sources),
        environment=EnvironmentConfig(),
        evaluation=EvaluationConfig(1, suites),
    )


def test_the_prompts_of_its_source_and_suite_have_the_tools(tmp_path: Path) -> None:
    """Others have none: of a source without an environment, of one whose environment describes nothing."""
    config = config_of(tmp_path, told=DESCRIBED, silent=PLAIN, none=None)
    tokenizer = writes_tools()
    tools = check_environments(config, tokenizer)
    assert tools == tools_of(config)
    assert {name: len(one) for name, one in tools.items()} == {"": 0, "told": 1, "silent": 0, "none": 0}
    found = load_problems(config.data, "math", tokenizer, tools)
    texts = {one.source: tokenizer.decode(one.token_ids_P) for one in found.prompts}
    assert {source: "lookup_7f3a" in text for source, text in texts.items()} == {
        "told": True,
        "silent": False,
        "none": False,
    }
    suites = load_suites(config, tokenizer, tools)
    said = {one.name: "lookup_7f3a" in tokenizer.decode(one.prompts[0].token_ids_P) for one in suites}
    assert said == {"told": True, "silent": False, "none": False, "other": False}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3", "Qwen2.5", "Llama 3.1"])
def test_real_templates_write_them(name: str, tmp_path: Path) -> None:
    """Episodes continue exactly behind such a prompt, and its ids are those of the template."""
    tokenizer = family_tokenizer(name)
    # Qwen3's template drops an empty thinking part, which its model may sample.
    settings = replace(DESCRIBED, history="sampled") if name == "Qwen3" else DESCRIBED
    tools = check_environment(settings, FOLDERS[name], tokenizer)
    assert tools == Described.tools
    data = DataConfig(rows(tmp_path / "a.jsonl"))
    prompt = load_problems(data, "math", tokenizer, {"": tools}).prompts[0]
    expected = tokenizer.apply_chat_template(
        MESSAGES, tools=[*Described.tools], add_generation_prompt=True, return_dict=False
    )
    assert prompt.token_ids_P.tolist() == expected
    assert "lookup_7f3a" in tokenizer.decode(expected)
    plain = load_problems(data, "math", tokenizer).prompts[0]
    assert "lookup_7f3a" not in tokenizer.decode(plain.token_ids_P)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepSeek V3", "R1"])
def test_real_templates_that_ignore_them_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="chat template ignores the tools that the environment describes"):
        check_environment(DESCRIBED, FOLDERS[name], family_tokenizer(name))


def test_a_journal_is_bound_to_the_tools_of_its_prompts(tmp_path: Path) -> None:
    """Else a resume would continue behind the new prompt with tokens that were sampled behind the old one."""
    config = config_of(tmp_path, told=DESCRIBED)
    described = check_environments(config, writes_tools())
    changed = {"told": [{**described["told"][0], "type": "other"}]}
    of = []
    for tools in (described, described, changed, {}):
        found = load_problems(config.data, "math", writes_tools(), tools)
        dataset = Dataset(found.prompts, None, (), found.sources, found.tools_sha256)
        of.append(identity(config, dataset).get("environment.tools"))
    assert of[0] == of[1] != of[2]
    assert None not in of[:3]
    assert of[3] is None, "as before, where no prompt describes any"


def test_tools_of_a_row_are_written_into_its_prompt(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl")
    first, second = map(json.loads, file.read_text().splitlines())
    first["extra_info"] = {PROMPT_TOOLS: [{"type": "function", "function": {"name": "zebu"}}]}
    file.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    tokenizer = writes_tools()
    texts = [tokenizer.decode(one.token_ids_P) for one in load_prompts(file, tokenizer, 500).prompts]
    assert ['"zebu"' in text for text in texts] == [True, False]
    refusal = r"row 0 .*extra_info.prompt_tools: the chat template ignores them: .*\"tools_in_prompts\": true"
    with pytest.raises(ConfigError, match=f"{refusal}.*folder, .*recipes/demo/policy"):
        load_prompts(file, demo_tokenizer(), 500)


def test_tools_of_rows_do_not_count_where_the_prompts_text_describes_them(tmp_path: Path) -> None:
    """Of an agent program, so says its setting: with a template that ignores tools, and with another."""
    file = rows(tmp_path / "agent.jsonl")
    before = [one.token_ids_P.tolist() for one in load_prompts(file, writes_tools(), 500).prompts]
    written = [json.loads(line) for line in file.read_text().splitlines()]
    told = {PROMPT_TOOLS: [{"type": "function", "function": {"name": "zebu"}}]}
    file.write_text("".join(json.dumps({**row, "extra_info": told}) + "\n" for row in written))
    agent = EnvironmentConfig(
        "bapo_megatron.environment.adapters.endpoint:EndpointEnvironment",
        settings={"command": ["true"], "tools_in_prompts": True},
        workers=1,
    )
    config = dataclasses.replace(
        config_of(tmp_path), data=DataConfig(file), environment=agent, evaluation=EvaluationConfig()
    )
    tools = check_environments(config, demo_tokenizer())
    assert tools == tools_of(config) == {"": None}
    assert load_problems(config.data, "math", demo_tokenizer(), tools).prompts
    found = load_problems(config.data, "math", writes_tools(), tools)
    assert [one.token_ids_P.tolist() for one in found.prompts] == before
    assert found.tools_sha256 == ""
    other = dataclasses.replace(config, environment=replace(agent, function=PLAIN.function))
    assert tools_of(other) == {"": ()}, "the setting is the agent program's own"
