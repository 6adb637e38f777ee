"""Data that was prepared for a reward function of the user's, and the reward function of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapo_megatron.config import DataConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.trainer.build import load_problems

POLICY = Path(__file__).parents[3] / "recipes/demo/policy"
ROW = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"ground_truth": "Paris, the city of light"},
    "data_source": "mine",
}


def load(folder: Path, reward: str, card: object) -> int:
    """The problems that a run with ``reward`` gets of a folder with this card."""
    (folder / "data.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "card.json").write_text(card if isinstance(card, str) else json.dumps(card))
    found = load_problems(DataConfig(folder / "data.jsonl", 48), reward, load_tokenizer(POLICY))
    return len(found.prompts)


@pytest.mark.parametrize("reward", ["mine:score", "llm_judge"])
def test_a_run_that_forgets_the_reward_of_its_data_is_refused(tmp_path: Path, reward: str) -> None:
    """Or it would call every response wrong, drop every group, and end well."""
    with pytest.raises(
        ConfigError, match=rf"reward\.function=math.*for {reward}: add --reward.function {reward}"
    ):
        load(tmp_path, "math", {"options": {"reward": reward}})


@pytest.mark.parametrize(
    "card",
    [{"options": {"reward": "math_or_code"}}, {"options": {}}, {}, [], "no JSON", {"options": None}],
)
def test_other_data_cards_are_no_objection(tmp_path: Path, card: object) -> None:
    assert load(tmp_path, "math", card) == 1


def test_a_reward_of_the_user_s_may_be_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_too.py").write_text("def score(prompt, response):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load(tmp_path, "mine_too:score", {"options": {"reward": "mine:score"}}) == 1
