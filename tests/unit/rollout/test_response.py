"""One response by hand: its states, what an answer makes of them, and its table of per-token columns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.answer_text import final_answer
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.response import (
    Answer,
    Response,
    Sampling,
    continued,
    finish_reason_of,
    given,
    most_tokens,
)
from bapo_megatron.rollout.sampler.scoring import judged_prompt
from bapo_megatron.types import RESPONSE_COLUMNS, Prompt, ResponseTokens
from tests.support.pages import ROOT
from tests.support.responses import answer, segment, turn

STOP = 9
SAMPLING = Sampling(0.5, 10, 7, (STOP, 11), segment_tokens=4)


def test_the_most_tokens_of_a_request() -> None:
    """Those of a segment, of the response's rest, and of the budget; without any it waits for new weights."""
    eight = continued(continued(Response(), segment(1, 2, 3, 4), None), segment(5, 6, 7, 8), None)
    budgets = (None, 3, 5, 0, -2)
    assert [most_tokens(Response(), SAMPLING, budget) for budget in budgets] == [4, 3, 4, 0, 0]
    assert most_tokens(eight, SAMPLING) == 2
    assert most_tokens(Response(), dataclasses.replace(SAMPLING, segment_tokens=None)) == 10


@pytest.mark.parametrize(
    ("before", "ids", "reason", "in_environment"),
    [
        (0, (1, 2), None, None),
        (0, (1, STOP), "stop", "turn"),
        (0, (1, 11), "stop", "turn"),
        (0, (STOP, 1), None, None),
        (8, (1, 2), "length", "length"),
        (8, (1, STOP), "stop", "turn"),  # whatever is left of the response
        (10, (), "length", "length"),
    ],
)
def test_the_finish_rule(
    before: int, ids: tuple[int, ...], reason: str | None, in_environment: str | None
) -> None:
    assert finish_reason_of(before, segment(*ids), SAMPLING) == reason
    within = dataclasses.replace(SAMPLING, in_environment=True)
    assert finish_reason_of(before, segment(*ids), within) == in_environment


def test_what_an_episode_sums_up() -> None:
    waiting = turn(Response(), 1, STOP)
    again = given(waiting, answer(20, text="seen", reward=0.5, note={"a": 1}, metrics={"calls": 1}))
    last = answer(finish_reason="stop", reward=1.0, metrics={"calls": 2, "wins": 1})
    episode = given(turn(again, 4, STOP), last).episode
    assert (episode.rewards, episode.reward, episode.metrics) == ((0.5, 1.0), 1.5, {"calls": 3, "wins": 1})
    assert episode.note == {"a": 1}, "the last that was given"
    assert (episode.sampled_turns, episode.steps, episode.given_tokens) == (2, 2, 1)
    assert again.tokens_by_version == {1: 2}, "no policy sampled what was given"


@pytest.mark.parametrize("special", [False, True])
def test_the_tags_of_a_thinking_part_are_text_though_a_tokenizer_calls_them_special(special: bool) -> None:
    """As after `add_special_tokens` before an SFT. Without them a box in the thoughts would be an answer."""
    tokenizer = load_tokenizer(ROOT / "recipes/demo/policy")
    assert tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special) == 2
    whole, cut_off = "<think>\\boxed{1}</think> \\boxed{2}", "<think>\\boxed{1}"
    ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in (whole, cut_off)]
    texts = Dataset((), tokenizer, ()).texts([np.array(one, np.int32) for one in ids])
    assert texts == [whole, cut_off]
    assert [final_answer(text) for text in texts] == ["2", None]


def test_a_pad_token_that_is_an_ordinary_character_is_text() -> None:
    r"""Else `\boxed{5!}` was judged as `\boxed{5}`. The end token and others are still left out."""
    tokenizer = load_tokenizer(ROOT / "recipes/demo/policy")
    tokenizer.add_special_tokens({"pad_token": "!"})
    assert tokenizer.added_tokens_decoder[0].special
    text = r"3! is 6, \boxed{5!}"
    ids = [*tokenizer.encode(text), tokenizer.convert_tokens_to_ids("<|endoftext|>"), tokenizer.eos_token_id]
    assert Dataset((), tokenizer, ()).texts([np.array(ids, np.int32)]) == [text]


def test_the_turns_before_the_one_that_is_judged() -> None:
    """As text, with the tag of a thought that the template has opened and that has no end."""
    tokenizer = load_tokenizer(ROOT / "recipes/demo/policy")

    def ids(text: str) -> ResponseTokens:
        return segment(*tokenizer.encode(text, add_special_tokens=False))

    opened = Prompt(0, ids("1+1=<think>").token_ids_R, "", "test", opens_thinking=True)
    episode = Response()
    for text, said in (("Hm.<|im_end|>", "5"), ("7<|im_end|>", "8"), ("9<|im_end|>", None)):
        episode = continued(episode, ids(text), "turn" if said else "stop")
        if said:
            episode = given(episode, Answer(ids(f"<|im_start|>{said}\n").token_ids_R, said))
    found = judged_prompt(tokenizer, opened, episode)
    assert [(one["role"], one["content"]) for one in found.turns] == [
        ("assistant", "<think>Hm."),
        ("environment", "5"),
        ("assistant", "7"),
        ("environment", "8"),
    ]
    assert not found.opens_thinking
    assert judged_prompt(tokenizer, opened, continued(Response(), ids("Hm."), "stop")).turns == []


def test_a_column_that_old_files_lack_must_be_optional() -> None:
    first = {"token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}
    assert {c.array: c.dtype for c in RESPONSE_COLUMNS.values() if c.fill is None} == first


def test_a_column_has_one_value_for_each_token() -> None:
    longer = dataclasses.replace(segment(5, 6), loss_mask_R=np.array([True, True, False]))
    with pytest.raises(ValueError, match="loss_mask_R has 4 values for 3 tokens; give one for each"):
        ResponseTokens.joined([longer, segment(7)])
