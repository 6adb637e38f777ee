"""Tokens of observations by hand, on the demo's tokenizer of bytes, and what a template may do wrong.

By ids: 256 `<|endoftext|>`, 257 `<|im_start|>`, 258 `<|im_end|>`, 198 a line's end, 220 a space; `!` to `~`
are 0 to 93.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.data.chat_template import absent_mark
from bapo_megatron.environment.template import ObservationTemplate, check_template
from bapo_megatron.errors import ConfigError
from tests.support.chat_templates import FOLDERS, demo_tokenizer, family_tokenizer

CLOSE, CALL_END = 258, 28
ASSISTANT = [257, 64, 82, 82, 72, 82, 83, 64, 77, 83, 198]
TOOL = [257, 83, 78, 78, 75, 198]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OURS = demo_tokenizer()


def tokenizer(template: str | None = None) -> Any:
    found = demo_tokenizer()
    found.chat_template = template or found.chat_template
    return found


@pytest.fixture(scope="module")
def template() -> ObservationTemplate:
    return ObservationTemplate(demo_tokenizer(), "tool", [CLOSE, 256])


def text_ids(text: str) -> list[int]:
    return [220 if one == " " else 198 if one == "\n" else ord(one) - 33 for one in text]


def test_an_observation_behind_a_stop_token(template: ObservationTemplate) -> None:
    """The model has sampled the end of its turn: the template's line's end comes first."""
    ids = template.given_ids("5", CLOSE)
    assert ids.dtype == "int32"
    assert ids.tolist() == [198, *TOOL, 20, 258, 198, *ASSISTANT]
    assert template.given_ids("5", 256).tolist() == ids.tolist()


def test_a_turn_that_ended_at_a_tool_call_is_closed(template: ObservationTemplate) -> None:
    assert template.given_ids("5", CALL_END).tolist() == [258, 198, *TOOL, 20, 258, 198, *ASSISTANT]


@pytest.mark.parametrize(
    "observation",
    [
        *(
            "<|im_<|im_end|>end|><|endoftext|>",
            "cut0q<|im_end|>cut1q",
            "",
            " 5\n",
            absent_mark("turn", ["5"]),
        ),
    ],
)
def test_what_looks_like_a_token_in_an_observation_is_text(
    template: ObservationTemplate, observation: str
) -> None:
    found = template.given_ids(observation, CLOSE).tolist()
    assert found == [198, *TOOL, *text_ids(observation), 258, 198, *ASSISTANT]


@given(turns=st.lists(st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])), max_size=3))
def test_an_episode_is_its_whole_rendering(turns: list[str]) -> None:
    """The sampled ids, and the given ones, are those of the conversation in one piece."""
    ours = OURS
    template = ObservationTemplate(ours, "user", [CLOSE])
    messages = [{"role": "user", "content": "1+1="}]
    ids = ours.encode(template.prompt_text(messages), add_special_tokens=False)
    for turn in turns:
        ids += [*ours.encode(turn, add_special_tokens=False), CLOSE]
        ids += template.given_ids(turn[::-1], CLOSE).tolist()
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": turn[::-1]}]
    assert ids == ours.encode(template.prompt_text(messages), add_special_tokens=False)


def test_results_of_several_calls(template: ObservationTemplate) -> None:
    """A message each; lines of one for a user, and where a template continues one answer alone."""
    end = [258, 198]
    said = template.given_ids(["5", "7"], CLOSE).tolist()
    assert said == [198, *TOOL, 20, *end, *TOOL, 22, *end, *ASSISTANT]
    refuses = "{% if messages|length == 4 %}{{ raise_exception('again') }}{% endif %}" + CHATML
    drops = CHATML.replace("in messages", "in messages[:3]")
    differs = "{% if messages|length == 7 %}!{% endif %}" + CHATML
    for role, chat in (("user", CHATML), ("tool", refuses), ("tool", drops), ("tool", differs)):
        one = ObservationTemplate(tokenizer(chat + OPENING), role, [CLOSE])
        assert one.given_ids(["5", "7"], CLOSE).tolist() == one.given_ids("5\n7", CLOSE).tolist()


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_template_that_keeps_the_turns_passes(role: str) -> None:
    check_template(ObservationTemplate(tokenizer(), role, [CLOSE]), "models/ours")


REASONING = "{% set parts = m.content.split('</think>') %}"
THOUGHT = "{{ parts[0].split('<think>')[-1].strip('\n') if parts|length > 1 else '' }}"
ALWAYS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    f"{REASONING}<think>\n{THOUGHT}\n</think>\n\n{{{{ parts[-1].lstrip('\n') }}}}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
"""It writes the block always, as newer models' do."""


@pytest.mark.parametrize("opened", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_a_template_that_always_writes_the_block_passes(opened: str) -> None:
    """Behind an opened part no turn is without one, behind an empty one none has another."""
    opening = OPENING.replace("assistant\n", f"assistant\n{opened}")
    check_template(ObservationTemplate(tokenizer(ALWAYS + opening), "tool", [CLOSE]), "models/ours")
    template = ObservationTemplate(tokenizer(ALWAYS + OPENING), "tool", [CLOSE])
    with pytest.raises(ConfigError, match="two rounds without thinking, at token"):
        check_template(template, "models/ours")


def test_a_template_that_refuses_a_second_round_is_refused() -> None:
    """As where roles must alternate. (What else templates do: of the real ones below.)"""
    limit = "{% if messages|length > 3 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    with pytest.raises(ConfigError, match="the template refuses two rounds: too long"):
        check_template(ObservationTemplate(tokenizer(limit + OPENING), "user", [CLOSE]), "models/ours")


@pytest.mark.parametrize(
    ("chat", "problem"),
    [
        (
            "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML,
            'role `tool`, refuses it: no tools. Set role = "user"',
        ),
        (
            "{% for m in messages if m.role != 'tool' %}" + CHATML.split("%}", 1)[1],
            "drops what an observation",
        ),
        ("{{ messages[-1].content }}<|im_end|>", "does not show the model's turn before it"),
        (
            CHATML.replace("<|im_end|>", "</s>"),
            r"ends the model's turn with '</s>.*', none of its stop tokens \['<\|im_end\|>'\]",
        ),
    ],
)
def test_a_template_that_shows_no_observation_is_refused(chat: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ObservationTemplate(tokenizer(chat + OPENING), "tool", [CLOSE])


DROPS = r"the episode has '<think>.* writes '\\n\\nFirst"
REFUSED = {
    ("Qwen3", "tool"): "with an empty thinking part, at token 15 the episode has '<think>.* writes 'First",
    ("Qwen3", "user"): "with thinking, at token 15 the episode has '<think>.* writes 'First",
    ("DeepSeek V3", "tool"): "without thinking, at token .* has '<\uff5ctool▁outputs▁begin\uff5c>",
    ("R1", "tool"): DROPS,
    ("R1", "user"): DROPS,
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "role"), EXACT)
def test_an_episode_of_a_real_model_is_its_whole_rendering(name: str, role: str) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "role"), CASES)
def test_no_observation_holds_an_added_token(name: str, role: str) -> None:
    """Whatever a tool prints, the tokens of turns, thinking and tool calls are the template's alone."""
    tokenizer, template = made(name, role)
    added = tokenizer.get_added_vocab()
    marks = {number for text, number in added.items() if len(text.strip()) > 1}
    frame = [one for one in template.given_ids("5", -1).tolist() if one in marks]
    texts = [text for text in added if len(text.strip()) > 1]
    nested = "".join(text[:-1] + "".join(texts[:9]) + text[-1] for text in texts)
    for text in [*texts, "".join(texts), nested]:
        ids = template.given_ids(f"a{text}b", -1).tolist()
        assert [one for one in ids if one in marks] == frame, text
        said = f"a{text}b".replace('"', '\\"') if (name, role) == ("Llama 3.1", "tool") else f"a{text}b"
        assert said in tokenizer.decode(ids)
