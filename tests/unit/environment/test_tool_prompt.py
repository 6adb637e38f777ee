"""The prompt of the recipes with a Python tool: what a template says of it, and the call that it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bapo_megatron.environment.tools.calls import argument, tool_calls
from tests.support.chat_templates import family_tokenizer
from tests.support.pages import ROOT

PROMPT = (ROOT / "recipes/prompts/qwen_python.txt").read_text()
QUESTION = {"role": "user", "content": "What is 2^100?"}


def tool() -> dict[str, Any]:
    """The tool as the prompt declares it."""
    found: dict[str, Any] = json.loads(PROMPT.partition("<tools>\n")[2].partition("\n</tools>")[0])
    return found


def test_the_prompt_names_the_call_that_the_tool_answers() -> None:
    [name] = tool()["function"]["parameters"]["required"]
    call = json.dumps({"name": tool()["function"]["name"], "arguments": {name: "print(2)"}})
    [found] = tool_calls(f"<tool_call>\n{call}\n</tool_call>")
    assert argument(found, "python", "code") == "print(2)"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Qwen2.5"])
def test_the_prompt_is_what_the_template_makes_of_the_tool(family: str) -> None:
    """Of the first paragraph and ``tools``: token by token what the model was trained to read."""
    template = family_tokenizer(family).apply_chat_template
    first, _, rest = PROMPT.partition("\n\n")
    assert rest.startswith("# Tools")
    ours = template([{"role": "system", "content": PROMPT.rstrip("\n")}, QUESTION], tokenize=False)
    theirs = template([{"role": "system", "content": first}, QUESTION], tools=[tool()], tokenize=False)
    assert ours == theirs
    assert '"name": "python"' in theirs
