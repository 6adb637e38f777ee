"""Tokens of observations for the tokenizers and chat templates of real models: exact, or refused in words.

By ids of Qwen3: 151644 `<|im_start|>`, 151645 `<|im_end|>`, 151665 and 151666 `<tool_response>` and its end,
198 a line's end, 397 `>` and a line's end, 872 `user`, 77091 `assistant`, 20 `5`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from bapo_megatron.environment.template import ObservationTemplate, check_template
from bapo_megatron.errors import ConfigError
from tests.support.chat_templates import FOLDERS, family_tokenizer

pytestmark = pytest.mark.slow

REFUSED = {
    ("Qwen3", "tool"): "with an empty thinking part, at token 15 the episode has '<think>.* writes 'First",
    (
        "Qwen3",
        "user",
    ): r"with thinking, at token 15 the episode has '<think>.* writes 'First.*does not continue, either",
    (
        "DeepSeek V3",
        "tool",
    ): "without thinking, at token .* the episode has '<\uff5ctool▁outputs▁begin\uff5c>",
    ("R1", "tool"): r"the episode has '<think>.* writes '\\n\\nFirst.*which it does not continue, either",
    ("R1", "user"): r"the episode has '<think>.* writes '\\n\\nFirst.*which it does not continue, either",
}
CASES = [(name, role) for name in FOLDERS for role in ("tool", "user")]
EXACT = [case for case in CASES if case not in REFUSED or case == ("Qwen3", "tool")]
"""Qwen3's is exact but for an empty thinking part, with which no test of these has a turn."""
OBSERVATIONS = [
    *(
        "5",
        "",
        "\n\nline\n",
        '{"a": "1"}',
        "Ünïcödé 漢字 🙂",
        "x" * 300,
        "```python\nprint(1)\n```",
        "tab\there",
    ),
    *("Was 7.", "a\r\nb", "'quoted' \"twice\"", "  indented"),
]


def made(name: str, role: str) -> tuple[Any, ObservationTemplate]:
    tokenizer = family_tokenizer(name)
    return tokenizer, ObservationTemplate(tokenizer, role, [tokenizer.eos_token_id])


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(("name", "role"), CASES)
def test_exact_or_refused_or_as_sampled(name: str, role: str) -> None:
    _, template = made(name, role)
    if problem := REFUSED.get((name, role)):
        with pytest.raises(ConfigError, match=problem):
            check_template(template, f"models/{name}")
    else:
        check_template(template, f"models/{name}")
    check_template(template, f"models/{name}", "sampled")
    if (name, role) == ("Qwen3", "tool"):
        check_template(template, f"models/{name}", begun=True)


@pytest.mark.parametrize(("name", "role"), EXACT)
def test_an_episode_is_its_whole_rendering(name: str, role: str) -> None:
    """Over all observations, one after the other, and over random ones; of a tool, several at once."""
    tokenizer, template = made(name, role)
    messages = [{"role": "user", "content": "What is 2+3?"}]
    ids = encoded(tokenizer, template.prompt_text(messages))
    draw = random.Random(0)
    letters = "abc XYZ 0123 .,;:!?()[]{}\n\t\\/'\"äßλ漢🙂<>|"
    for observation in [*OBSERVATIONS, *("".join(draw.choices(letters, k=30)) for _ in range(40))]:
        several = [observation, "7", observation] if role == "tool" else [observation]
        ids += [*encoded(tokenizer, "Let me add."), tokenizer.eos_token_id]
        ids += template.given_ids(several, tokenizer.eos_token_id).tolist()
        messages += [{"role": "assistant", "content": "Let me add."}]
        messages += [{"role": role, "content": one} for one in several]
    assert ids == encoded(tokenizer, template.prompt_text(messages))


@pytest.mark.parametrize(("name", "role"), CASES)
def test_no_observation_holds_an_added_token(name: str, role: str) -> None:
    """Whatever a tool prints, the tokens of turns, thinking and tool calls are the template's alone."""
    tokenizer, template = made(name, role)
    added = tokenizer.get_added_vocab()
    marks = {number for text, number in added.items() if len(text.strip()) > 1}
    frame = [one for one in template.given_ids("5", -1).tolist() if one in marks]
    texts = [text for text in added if len(text.strip()) > 1]
    for text in [
        *texts,
        "".join(texts),
        "".join(text[:-1] + "".join(texts[:9]) + text[-1] for text in texts),
    ]:
        ids = template.given_ids(f"a{text}b", -1).tolist()
        assert [one for one in ids if one in marks] == frame, text
        said = f"a{text}b".replace('"', '\\"') if (name, role) == ("Llama 3.1", "tool") else f"a{text}b"
        assert said in tokenizer.decode(ids)
