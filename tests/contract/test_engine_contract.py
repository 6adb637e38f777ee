"""The contract suite of every engine (``interfaces.Engine``): what it answers, how it samples, and what it
refuses, against Hugging Face's own forward pass. Its aborts and weights: test_engine_updates.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.types import SamplingParams
from tests.support.tiers import slow_but

from .blocking import BlockingEngine
from .conftest import FAMILIES, EngineKind
from .references import (
    ROUTES,
    TOLERANCE,
    assert_from_model,
    mixed_requests,
    next_segments,
    reference_model,
    reference_routes,
    request,
)

Start = Callable[..., BlockingEngine]
MakeModel = Callable[..., Path]


# --- what an answer is ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_but(FAMILIES, *(name for name in FAMILIES if name != "qwen3_moe")))
def test_log_probs_equal_the_models(start: Start, make_model: MakeModel, family: str) -> None:
    """Also of responses that share a prompt, and end at different times."""
    folder = make_model(family)
    asked = mixed_requests(14, temperature=0.6)
    for number, place in enumerate((0, 0, 0, 5, 5)):
        prompt, new = asked[place].input_ids, 3 + 4 * number
        asked.append(request(f"again {number}", prompt, new=new, temperature=0.6, seed=90 + number))
    answers = start(folder).generate(asked)
    assert_from_model(folder, asked, answers)


@pytest.mark.own_model
def test_routes_are_the_models_and_continue_by_segment(start: Start, make_model: MakeModel) -> None:
    folder = make_model("qwen3_moe")
    engine = start(folder)
    asked = [dataclasses.replace(one, routes=ROUTES) for one in mixed_requests(8)]
    for _ in range(2):  # the second segment begins in a prefix cache
        answers = engine.generate([*asked, request("plain")])
        assert answers.pop().routes_R is None
        for one, answer in zip(asked, answers, strict=True):
            assert answer.routes_R is not None
            assert answer.routes_R.dtype == np.uint8
            wanted = reference_routes(folder, one, answer.token_ids_R.tolist())
            assert np.sort(answer.routes_R, -1).tolist() == wanted
        asked = next_segments(asked, answers)


def test_answers_come_in_order_with_plain_types(start: Start, make_model: MakeModel) -> None:
    lengths = [1, 2, 9, 5, 12, 3, 4, 8]
    engine = start(make_model("qwen2"))
    answers = engine.generate([request(place, new=new) for place, new in enumerate(lengths)])
    assert [answer.request_id for answer in answers] == [*map(str, range(len(lengths)))]
    assert {answer.finish_reason for answer in answers} == {"length"}
    for answer, length in zip(answers, lengths, strict=True):
        columns = answer.token_ids_R, answer.log_probs_R, answer.versions_R
        assert [column.dtype for column in columns] == [np.int32, np.float32, np.int32]
        assert [len(column) for column in columns] == [length] * 3


def test_stop_token_ends_and_is_included(start: Start, make_model: MakeModel) -> None:
    stop = tuple(range(0, 48, 6))
    asked = mixed_requests(20, new=1000, stop=stop)
    answers = start(make_model("qwen2")).generate(asked)
    assert {a.finish_reason for a in answers} == {"stop"}
    assert len({len(a.token_ids_R) for a in answers}) > 3
    for answer in answers:
        *before, last = answer.token_ids_R.tolist()
        assert last in stop
        assert not set(before) & set(stop)
    assert_from_model(make_model("qwen2"), asked, answers)


def test_stop_on_the_last_allowed_token_is_a_stop(start: Start, make_model: MakeModel) -> None:
    (answer,) = start(make_model("qwen2")).generate([request(new=1, stop=tuple(range(48)))])
    assert answer.finish_reason == "stop"


def test_each_request_has_its_own_params(start: Start, make_model: MakeModel) -> None:
    folder = make_model("qwen2")
    asked = [
        request("a", temperature=0.4, new=3),
        request("b", temperature=2.0, new=30, stop=(7, 8, 9, 10, 11)),
        request("c", temperature=0.0, new=8),
        request("d", temperature=1.0, new=17, stop=(1,)),
    ]
    answers = start(folder).generate(asked)
    assert_from_model(folder, asked, answers)
    for one, answer in zip(asked, answers, strict=True):
        assert len(answer.token_ids_R) <= one.params.max_new_tokens
        assert not set(answer.token_ids_R[:-1].tolist()) & set(one.params.stop_token_ids)


# --- sampling ------------------------------------------------------------------------------------


def test_greedy_takes_the_most_probable_token_and_reports_temperature_1(
    start: Start, make_model: MakeModel
) -> None:
    folder = make_model("qwen2")
    asked = request(temperature=0.0, new=10)
    (answer,) = start(folder).generate([asked])
    ids = torch.tensor([[*asked.input_ids.tolist(), *answer.token_ids_R.tolist()]])
    with torch.inference_mode():
        best = reference_model(folder)(ids).logits[0, 2:-1].argmax(-1)
    assert answer.token_ids_R.tolist() == best.tolist()
    assert_from_model(folder, [asked], [answer])


@pytest.mark.own_model
def test_sampling_follows_the_softmax(start: Start, make_model: MakeModel) -> None:
    """Chi-square over a vocabulary of 16; 44.3 is exceeded once in 10,000 by a true sampler."""
    folder = make_model("qwen2", vocab_size=16)
    draws, at_a_time = 2000, 500
    asked = [request(i, seed=i, new=1, temperature=1.5) for i in range(draws)]
    engine = start(folder, max_batch=at_a_time)
    answers = [a for i in range(0, draws, at_a_time) for a in engine.generate(asked[i : i + at_a_time])]
    tokens = [int(a.token_ids_R[0]) for a in answers]
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([[1, 2, 3]])).logits[0, -1].double()
    expected = torch.softmax(logits / 1.5, -1).numpy() * draws
    assert expected.min() > 5, "the test needs a flatter model"
    assert expected.max() > 2 * expected.min(), "the test needs a sharper model"
    counts = np.bincount(tokens, minlength=16)
    assert ((counts - expected) ** 2 / expected).sum() < 44.3


def test_draws_of_one_response_are_independent(start: Start, make_model: MakeModel) -> None:
    """Each token has a draw of its own: with a nearly uniform softmax, tokens hardly repeat."""
    (answer,) = start(make_model("qwen2")).generate([request(new=200, temperature=1e4)])
    tokens = answer.token_ids_R
    assert len(set(tokens.tolist())) > 40
    assert np.mean(tokens[1:] == tokens[:-1]) < 0.08


def test_seeds_differ(kind: EngineKind, start: Start, make_model: MakeModel) -> None:
    engine = start(make_model("qwen2"))
    answers = engine.generate([request(i, seed=i, temperature=3.0) for i in range(8)])
    unseeded = engine.generate([request(i, seed=None, temperature=3.0) for i in range(8)])
    assert len({a.token_ids_R.tobytes() for a in answers}) == 8
    assert len({a.token_ids_R.tobytes() for a in unseeded}) == 8


@pytest.mark.parametrize("family", ["llama3", "qwen3_5_text"])
def test_segments_equal_the_uncut_response(
    kind: EngineKind, start: Start, make_model: MakeModel, family: str
) -> None:
    if not kind.seeded:
        pytest.skip(f"{kind.name} does not promise seeded sampling")
    engine = start(make_model(family))
    whole = engine.generate(mixed_requests(9, new=24))
    for one, uncut in zip(mixed_requests(9, new=24), whole, strict=True):
        tokens: list[int] = []
        log_probs: list[float] = []
        for length in (7, 1, 16):
            ids = [*one.input_ids.tolist(), *tokens]
            part = request(one.request_id, ids, new=length, seed=one.params.seed, prefix=len(tokens))
            (answer,) = engine.generate([part])
            tokens += answer.token_ids_R.tolist()
            log_probs += answer.log_probs_R.tolist()
        assert tokens == uncut.token_ids_R.tolist()
        np.testing.assert_allclose(log_probs, uncut.log_probs_R, atol=TOLERANCE)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_ids": np.array([1, 48])}, "vocabulary"),
        ({"input_ids": np.array([-1, 1])}, "vocabulary"),
        ({"input_ids": np.array([], np.int32)}, "at least one token"),
        ({"params": SamplingParams(1.0, 0, ())}, "max_new_tokens"),
        ({"params": SamplingParams(1.0, 4096, ())}, "context"),
    ],
)
def test_a_malformed_request_is_named_and_harms_nothing(
    start: Start, make_model: MakeModel, change: dict[str, Any], says: str
) -> None:
    engine = start(make_model("qwen2"))
    bad = dataclasses.replace(request("culprit"), **change)
    with pytest.raises(ValueError, match=rf"'culprit'.*{says}"):
        engine.generate([request("fine"), bad])
    assert len(engine.generate([request("fine")])[0].token_ids_R) == 12
