"""The state machine of one response, by hand: each state, what it needs, and what an answer makes of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.answer_text import final_answer
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.response import (
    Response,
    Sampling,
    Tokens,
    continued,
    finish_reason_of,
    given_up,
    needs,
    next_request,
)
from bapo_megatron.types import Generation, Prompt, ResponseTokens
from tests.support.pages import ROOT

STOP = 9
SAMPLING = Sampling(0.5, 10, 7, (STOP, 11), segment_tokens=4)
PROMPT = Prompt(3, np.array([100, 101], np.int32), "", "test")


def tokens(*ids: int, version: int = 1) -> ResponseTokens:
    """A segment; the log-prob of a token is minus a tenth of its id."""
    versions = np.full(len(ids), version, np.int32)
    return ResponseTokens(np.array(ids, np.int32), -np.array(ids, np.float32) / 10, versions)


def response(*segments: ResponseTokens, complete: bool = False) -> Response:
    made = Response()
    for segment in segments:
        made = continued(made, segment, None)
    return dataclasses.replace(made, finish_reason="stop" if complete else None)


def answer(*ids: int, versions: tuple[int, ...]) -> Generation:
    columns = tokens(*ids).columns | {"versions_R": np.array(versions, np.int32)}
    return Generation(**columns, request_id="r", finish_reason="length")


def test_a_new_response_needs_a_segment() -> None:
    assert not Response().is_complete
    assert Response().tokens == 0
    assert needs(Response(), SAMPLING) == Tokens(4)
    assert needs(Response(), dataclasses.replace(SAMPLING, segment_tokens=None)) == Tokens(10)


def test_the_last_segment_is_what_is_left_of_the_response() -> None:
    assert needs(response(tokens(1, 2, 3, 4), tokens(5, 6, 7, 8)), SAMPLING) == Tokens(2)


def test_a_budget_cuts_a_segment_and_can_make_it_wait() -> None:
    assert needs(Response(), SAMPLING, budget=3) == Tokens(3)
    assert needs(Response(), SAMPLING, budget=5) == Tokens(4)
    assert needs(Response(), SAMPLING, budget=0) == Tokens(0), "it waits for new weights"
    assert needs(Response(), SAMPLING, budget=-2) == Tokens(0)


def test_a_complete_response_needs_nothing() -> None:
    assert needs(response(tokens(1, STOP), complete=True), SAMPLING) is None
    assert needs(response(tokens(1, STOP), complete=True), SAMPLING, budget=0) is None


def test_the_first_request_is_the_prompt() -> None:
    request = next_request(Response(), Tokens(4), SAMPLING, PROMPT, "12-0", 55)
    assert request.request_id == "12-0-0"
    assert request.input_ids.tolist() == [100, 101]
    assert request.prefix_tokens == 0
    params = request.params
    assert (params.temperature, params.max_new_tokens, params.stop_token_ids) == (0.5, 4, (9, 11))
    assert params.seed == 55


def test_a_later_request_goes_on_from_all_tokens_so_far() -> None:
    request = next_request(response(tokens(1, 2), tokens(3)), Tokens(2), SAMPLING, PROMPT, "12-0", 55)
    assert request.request_id == "12-0-3"
    assert request.input_ids.tolist() == [100, 101, 1, 2, 3]
    assert request.input_ids.dtype == np.int32
    assert (request.prefix_tokens, request.params.max_new_tokens, request.params.seed) == (3, 2, 55)


@pytest.mark.parametrize(
    ("before", "ids", "reason"),
    [
        (0, (1, 2), None),
        (0, (1, STOP), "stop"),
        (0, (1, 11), "stop"),
        (0, (STOP, 1), None),
        (8, (1, 2), "length"),
        (8, (1, STOP), "stop"),
        (7, (1, 2), None),
        (8, (1, 2, 3), "length"),
        (0, (), None),
        (10, (), "length"),
    ],
)
def test_the_finish_rule(before: int, ids: tuple[int, ...], reason: str | None) -> None:
    assert finish_reason_of(before, tokens(*ids), SAMPLING) == reason


def test_segments_are_appended_with_all_columns() -> None:
    first = continued(Response(), tokens(1, 2, version=4), None)
    second = continued(first, tokens(3, STOP, version=5), "stop")
    assert (first.tokens, first.is_complete) == (2, False), "the state before is unchanged"
    assert (second.tokens, second.is_complete) == (4, True)
    rollout = second.rollout(0.25)
    assert rollout.token_ids_R.tolist() == [1, 2, 3, 9]
    np.testing.assert_allclose(rollout.log_probs_R, [-0.1, -0.2, -0.3, -0.9], rtol=1e-6)
    assert rollout.versions_R.tolist() == [4, 4, 5, 5]
    assert (rollout.finish_reason, rollout.reward, rollout.loss_mask_R) == ("stop", 0.25, None)


def test_tokens_are_counted_by_the_weights_that_sampled_them() -> None:
    mixed = answer(1, 2, 3, versions=(2, 2, 3))
    found = continued(continued(Response(), mixed, None), tokens(4, 5, version=3), None)
    assert dict(found.tokens_by_version) == {2: 2, 3: 3}
    assert dict(Response().tokens_by_version) == {}


def test_a_mask_of_one_segment_is_filled_for_the_others() -> None:
    masked = dataclasses.replace(tokens(3, 4), loss_mask_R=np.array([False, True]))
    found = response(tokens(1, 2), masked, tokens(5), complete=True).rollout(0.0)
    assert found.loss_mask_R is not None
    assert found.loss_mask_R.tolist() == [True, True, False, True, True]
    assert found.loss_mask_R.dtype == np.bool_


def test_the_twentieth_lost_engine_gives_a_response_up() -> None:
    assert given_up(0, "a") is None
    assert given_up(19, "a") is None
    assert given_up(20, "a") == "20 engines were lost with request 'a'"


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
