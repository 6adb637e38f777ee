"""One response by hand: its states, what an answer makes of them, and its table of per-token columns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.answer_text import final_answer
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.events import Segment, groups_opened, segments_arrived
from bapo_megatron.rollout.sampler.response import (
    STEP,
    Answer,
    Response,
    Sampling,
    Tokens,
    continued,
    finish_reason_of,
    given,
    needs,
    next_request,
)
from bapo_megatron.rollout.sampler.scoring import judged_prompt
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.types import GIVEN, RESPONSE_COLUMNS, Generation, Prompt, ResponseTokens
from tests.support.pages import ROOT
from tests.support.responses import answer, segment

STOP = 9
SAMPLING = Sampling(0.5, 10, 7, (STOP, 11), segment_tokens=4)
WITHIN = dataclasses.replace(SAMPLING, max_response_tokens=12, in_environment=True)
PROMPT = Prompt(3, np.array([100, 101], np.int32), "", "test")


def response(*segments: ResponseTokens, complete: bool = False) -> Response:
    made = Response()
    for each in segments:
        made = continued(made, each, None)
    return dataclasses.replace(made, finish_reason="stop" if complete else None)


EIGHT = (segment(1, 2, 3, 4), segment(5, 6, 7, 8))


@pytest.mark.parametrize(
    ("made", "budget", "needed"),
    [
        (Response(), None, Tokens(4)),
        (response(*EIGHT), None, Tokens(2)),
        (Response(), 3, Tokens(3)),
        (Response(), 5, Tokens(4)),
        (Response(), 0, Tokens(0)),  # it waits for new weights
        (Response(), -2, Tokens(0)),
        (response(segment(1, STOP), complete=True), None, None),
        (response(segment(1, STOP), complete=True), 0, None),
    ],
)
def test_what_a_response_needs(made: Response, budget: int | None, needed: Tokens | None) -> None:
    assert needs(made, SAMPLING, budget=budget) == needed
    assert needs(Response(), dataclasses.replace(SAMPLING, segment_tokens=None)) == Tokens(10)


@pytest.mark.parametrize(
    ("made", "new", "name", "input_ids"),
    [
        (Response(), 4, "12-0-0", [100, 101]),
        (response(segment(1, 2), segment(3)), 2, "12-0-3", [100, 101, 1, 2, 3]),
    ],
)
def test_a_request_goes_on_from_all_tokens_so_far(
    made: Response, new: int, name: str, input_ids: list[int]
) -> None:
    request = next_request(made, Tokens(new), SAMPLING, PROMPT, "12-0", 55)
    assert (request.request_id, request.prefix_tokens) == (name, made.tokens)
    assert (request.input_ids.tolist(), request.input_ids.dtype) == (input_ids, np.int32)
    params = request.params
    assert (params.temperature, params.max_new_tokens, params.stop_token_ids) == (0.5, new, (9, 11))
    assert params.seed == 55


@pytest.mark.parametrize(
    ("before", "ids", "reason", "in_environment"),
    [
        (0, (1, 2), None, None),
        (0, (1, STOP), "stop", "turn"),
        (0, (1, 11), "stop", "turn"),
        (0, (STOP, 1), None, None),
        (8, (1, 2), "length", "length"),
        (8, (1, STOP), "stop", "turn"),  # whatever is left of the response
        (7, (1, 2), None, None),
        (8, (1, 2, 3), "length", "length"),
        (0, (), None, None),
        (10, (), "length", "length"),
    ],
)
def test_the_finish_rule(
    before: int, ids: tuple[int, ...], reason: str | None, in_environment: str | None
) -> None:
    assert finish_reason_of(before, segment(*ids), SAMPLING) == reason
    within = dataclasses.replace(SAMPLING, in_environment=True)
    assert finish_reason_of(before, segment(*ids), within) == in_environment


def test_an_episode_by_hand() -> None:
    first = continued(Response(), segment(1, 2), None)
    assert (first.is_sampling, first.is_complete, needs(first, WITHIN)) == (True, False, Tokens(4))
    waiting = continued(first, segment(3, STOP, version=2), "turn")
    assert (waiting.is_sampling, waiting.is_complete, waiting.finish_reason) == (False, False, None)
    assert needs(waiting, WITHIN) is STEP
    assert needs(waiting, WITHIN, budget=0) is STEP, "a step needs no budget"
    assert waiting.episode.turns == ((4, None),)
    alone = given(waiting, answer(finish_reason="stop"))
    assert (alone.rollouts(0.0)[0].loss_mask_R, alone.episode.reward) == (None, None)
    assert alone.last_turn_R.tolist() == [1, 2, 3, STOP]
    again = given(waiting, answer(20, 21, 22, text="seen", reward=0.5, note={"a": 1}, metrics={"calls": 1}))
    assert needs(again, WITHIN) == Tokens(4)
    assert again.episode.turns == ((4, None), (7, "seen"))
    assert (again.tokens, again.sampled_tokens, again.episode.given_tokens) == (7, 4, 3)
    assert again.tokens_by_version == {1: 2, 2: 2}, "no policy sampled what was given"
    assert needs(again, WITHIN, budget=2) == Tokens(2)
    last = continued(again, segment(4, STOP, version=3), "turn")
    assert last.last_turn_R.tolist() == [4, STOP]
    end = given(last, answer(finish_reason="stop", reward=1.0, metrics={"calls": 2, "wins": 1}))
    assert (end.is_complete, end.finish_reason, needs(end, WITHIN)) == (True, "stop", None)
    assert (end.episode.rewards, end.episode.reward) == ((0.5, 1.0), 1.5)
    assert end.episode.metrics == {"calls": 3.0, "wins": 1}
    assert end.episode.note == {"a": 1}, "the last that was given"
    assert (end.episode.sampled_turns, end.episode.steps) == (2, 2)
    rollout = end.rollouts(1.5)[0]
    assert rollout.token_ids_R.tolist() == [1, 2, 3, STOP, 20, 21, 22, 4, STOP]
    assert rollout.loss_mask_R is not None
    assert rollout.loss_mask_R.tolist() == [True] * 4 + [False] * 3 + [True] * 2
    assert rollout.versions_R.tolist() == [1, 1, 2, 2, GIVEN, GIVEN, GIVEN, 3, 3]
    assert rollout.log_probs_R.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.9, 0, 0, 0, -0.4, -0.9])


def test_a_mask_of_one_segment_is_filled_for_the_others() -> None:
    masked = dataclasses.replace(segment(3, 4), loss_mask_R=np.array([False, True]))
    found = response(segment(1, 2), masked, segment(5), complete=True).rollouts(0.0)[0]
    assert found.loss_mask_R is not None
    assert found.loss_mask_R.tolist() == [True, True, False, True, True]
    assert found.loss_mask_R.dtype == np.bool_


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
    for turn, said in (("Hm.<|im_end|>", "5"), ("7<|im_end|>", "8"), ("9<|im_end|>", None)):
        episode = continued(episode, ids(turn), "turn" if said else "stop")
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
    assert judged_prompt(tokenizer, opened, response(ids("Hm."), complete=True)).turns == []


ONE_TOKEN = Prompt(0, np.array([1], np.int32), "", "test")


def sampled(*ids: int, mask: list[bool] | None = None) -> Generation:
    zeros = np.zeros(len(ids))
    mask_R = None if mask is None else np.array(mask)
    ids_R = np.array(ids, np.int64)
    return Generation(ids_R, zeros, ids_R, loss_mask_R=mask_R, request_id="r", finish_reason="length")


def test_a_column_that_old_files_lack_must_be_optional() -> None:
    first = {"token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}
    assert {c.array: c.dtype for c in RESPONSE_COLUMNS.values() if c.fill is None} == first


def test_the_logs_record_is_as_in_earlier_versions() -> None:
    """Names, order and dtypes of its arrays, and the rows: by hand."""
    state = SamplerState([ONE_TOKEN], 2)
    state.apply(groups_opened([(0, 0, 0)], 1))
    record = segments_arrived(
        [Segment(state.open[0], 1, 0, sampled(5, 6), None), Segment(state.open[0], 0, 0, sampled(7), "stop")]
    )
    assert record.fields == {"parts": [[0, 0, 0, 1, 0, 2, None], [0, 0, 0, 0, 0, 1, "stop"]]}
    assert [(name, array.dtype.str) for name, array in record.arrays.items()] == [
        ("token_ids", "<i4"),
        ("log_probs", "<f4"),
        ("versions", "<i4"),
    ]
    assert record.arrays["token_ids"].tolist() == [5, 6, 7]
    state.apply(record)
    assert [one.tokens for one in state.open[0].responses] == [1, 2]
    assert [one.is_complete for one in state.open[0].responses] == [True, False]


def test_a_mask_goes_through_the_log() -> None:
    state = SamplerState([ONE_TOKEN], 2)
    state.apply(groups_opened([(0, 0, 0)], 1))
    group = state.open[0]
    masked, plain = sampled(5, 6, mask=[False, True]), sampled(7)
    state.apply(segments_arrived([Segment(group, 0, 0, masked, None), Segment(group, 1, 0, plain, None)]))
    first, second = (one.so_far.loss_mask_R for one in group.responses)
    assert first is not None
    assert second is not None
    assert (first.tolist(), second.tolist()) == ([False, True], [True])


def test_a_file_without_a_needed_column_and_values_of_another_kind_are_refused() -> None:
    arrays = ResponseTokens.joined([sampled(5)]).arrays
    del arrays["versions"]
    with pytest.raises(KeyError, match="versions"):
        next(ResponseTokens.split(arrays, [1]))
    wrong = ResponseTokens(np.array([0.5]), np.zeros(1), np.zeros(1, np.int32))
    with pytest.raises(TypeError, match=r"Cannot cast .*float64.* to .*int32"):
        ResponseTokens.joined([wrong])


def test_a_column_has_one_value_for_each_token() -> None:
    longer = sampled(5, 6, mask=[True, True, False])
    with pytest.raises(ValueError, match="loss_mask_R has 4 values for 3 tokens; give one for each"):
        ResponseTokens.joined([longer, sampled(7)])
