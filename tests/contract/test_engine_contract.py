"""The contract suite of every engine (``interfaces.Engine``), against Hugging Face's own forward pass."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bapo_megatron.hf.config import read_text_config
from bapo_megatron.hf.parameter_map import expert_tensors
from bapo_megatron.types import GenerateRequest, Generation, RouteShape, SamplingParams
from tests.support.tiers import slow_but

from .blocking import BlockingEngine
from .conftest import FAMILIES, SHAPE, EngineKind

Start = Callable[..., BlockingEngine]
MakeModel = Callable[..., Path]

TOLERANCE = 2e-5
"""Natural log; float32 on both sides."""

FOREVER = 3500
"""New tokens that no test waits for: such requests are aborted."""


def request(
    name: str | int = "r",
    ids: Sequence[int] = (1, 2, 3),
    *,
    new: int = 12,
    temperature: float = 0.7,
    stop: tuple[int, ...] = (),
    seed: int | None = 5,
    prefix: int = 0,
) -> GenerateRequest:
    params = SamplingParams(temperature, new, stop, seed)
    return GenerateRequest(str(name), np.array(ids, np.int32), params, prefix)


def mixed_requests(count: int, **more: Any) -> list[GenerateRequest]:
    """Prompts of many lengths, each with a seed of its own."""
    rng = np.random.default_rng(0)
    vocabulary = SHAPE["vocab_size"]
    prompts = [rng.integers(0, vocabulary, rng.integers(1, 17)) for _ in range(count)]
    return [request(i, ids, seed=i, **more) for i, ids in enumerate(prompts)]


@cache
def reference_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.inference_mode()
def reference_log_probs(folder: Path, asked: GenerateRequest, answer: Generation) -> np.ndarray:
    """Log-probs of the answer by one forward pass over prompt and answer, alone in its batch."""
    ids = torch.tensor([[*asked.input_ids.tolist(), *answer.token_ids_R.tolist()]])
    start = len(asked.input_ids)
    logits = reference_model(folder)(ids).logits[0, start - 1 : -1] / (asked.params.temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(1, ids[0, start:, None])[:, 0].numpy()


def assert_from_model(folder: Path, asked: list[GenerateRequest], answers: list[Generation]) -> None:
    for one, answer in zip(asked, answers, strict=True):
        expected = reference_log_probs(folder, one, answer)
        np.testing.assert_allclose(answer.log_probs_R, expected, atol=TOLERANCE, rtol=0)


def tensors(folder: Path) -> list[tuple[str, Tensor]]:
    """The trained weights by the folder's names, in the model's order; experts one by one, as a run's."""
    found: list[tuple[str, Tensor]] = []
    family, _ = read_text_config(folder)
    for name, tensor in reference_model(folder).named_parameters():
        experts = expert_tensors(name, tensor.shape)
        places = {own: tensor[place] for own, place in experts.items()} or {name: tensor}
        found += [
            (own.replace("model.", family.body, 1), one.detach().clone()) for own, one in places.items()
        ]
    return found


def next_segments(asked: list[GenerateRequest], answers: list[Generation]) -> list[GenerateRequest]:
    """Requests that continue behind the answers, as of responses that are made in segments."""
    return [
        dataclasses.replace(
            one,
            input_ids=np.concatenate([one.input_ids, answer.token_ids_R]),
            prefix_tokens=len(answer.token_ids_R),
        )
        for one, answer in zip(asked, answers, strict=True)
    ]


WAITS_S = (0.4, 2.0, 10.0, 60.0)
"""A busy machine may have sampled nothing after the first of them."""


def interrupted(
    start: Callable[[], BlockingEngine],
    asked: list[GenerateRequest],
    interrupt: Callable[[BlockingEngine, float], None],
    versions: int = 1,
) -> tuple[BlockingEngine, list[Generation]]:
    """An engine, and its answers to requests that are interrupted after a while.

    After a longer while, on an engine started anew, if the last of them had not five tokens, or not of
    so many ``versions``.
    """
    for wait_s in WAITS_S:
        engine = start()
        running = engine.begin(asked)
        time.sleep(wait_s)
        interrupt(engine, wait_s)
        answers = running.result(timeout=600)
        last = answers[-1].versions_R.tolist()
        if len(last) >= 5 and len(set(last)) >= versions:
            return engine, answers
    raise AssertionError("the engine has sampled nothing in a minute")


# --- what an answer is ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_but(FAMILIES, *(name for name in FAMILIES if name != "qwen3_moe")))
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_log_probs_equal_the_models(
    start: Start, make_model: MakeModel, family: str, temperature: float
) -> None:
    folder = make_model(family)
    asked = mixed_requests(14, temperature=temperature)
    answers = start(folder).generate(asked)
    assert_from_model(folder, asked, answers)


ROUTES = RouteShape(SHAPE["num_hidden_layers"], 2, 8)
"""Of the model with experts."""


def reference_routes(folder: Path, asked: GenerateRequest, tokens: Sequence[int]) -> list[list[list[int]]]:
    """The experts of the positions that predict the answer's ``tokens``, in order of their numbers."""
    ids = torch.tensor([[*asked.input_ids.tolist(), *tokens]])
    with torch.inference_mode():
        logits = reference_model(folder)(ids[:, :-1], output_router_logits=True).router_logits
    routes = torch.stack([one.topk(2, -1).indices.sort(-1).values for one in logits], 1)
    found: list[list[list[int]]] = routes[len(asked.input_ids) - 1 :].tolist()
    return found


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


@pytest.mark.own_model
def test_tokens_before_an_update_keep_their_routes(start: Start, make_model: MakeModel) -> None:
    """Those of the weights that sampled them, also where the engine computes their prefix anew."""
    old, new = make_model("qwen3_moe"), make_model("qwen3_moe", seed=1)

    def update(engine: BlockingEngine, _wait_s: float) -> None:
        engine.update_weights(iter(tensors(new)), 1)
        engine.abort()

    asked = [dataclasses.replace(one, routes=ROUTES) for one in mixed_requests(4, new=FOREVER)]
    _, answers = interrupted(lambda: start(old), asked, update)
    kept = 0
    for one, answer in zip(asked, answers, strict=True):
        before = int((answer.versions_R == 0).sum())
        assert answer.routes_R is not None or not len(answer.token_ids_R)
        if answer.routes_R is not None and before:
            wanted = reference_routes(old, one, answer.token_ids_R[:before].tolist())
            assert np.sort(answer.routes_R[:before], -1).tolist() == wanted
            assert wanted != reference_routes(new, one, answer.token_ids_R[:before].tolist())
            kept += before
    assert kept > 4


def test_answers_come_in_order_with_plain_types(start: Start, make_model: MakeModel) -> None:
    asked = mixed_requests(14)
    answers = start(make_model("qwen2")).generate(asked)
    assert [a.request_id for a in answers] == [r.request_id for r in asked]
    for answer in answers:
        assert answer.token_ids_R.dtype == np.int32
        assert answer.log_probs_R.dtype == np.float32
        assert answer.versions_R.dtype == np.int32
        assert len(answer.token_ids_R) == len(answer.log_probs_R) == len(answer.versions_R)


def test_finish_by_length(start: Start, make_model: MakeModel) -> None:
    answers = start(make_model("qwen2")).generate([request(n, new=n) for n in (1, 2, 9, 5)])
    assert [len(a.token_ids_R) for a in answers] == [1, 2, 9, 5]
    assert {a.finish_reason for a in answers} == {"length"}


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


def test_no_requests(start: Start, make_model: MakeModel) -> None:
    assert start(make_model("qwen2")).generate([]) == []


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


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_tokens_do_not_depend_on_the_batch(
    kind: EngineKind, start: Start, make_model: MakeModel, family: str
) -> None:
    if not kind.seeded:
        pytest.skip(f"{kind.name} does not promise seeded sampling")
    engine = start(make_model(family))
    asked = mixed_requests(14, new=30, stop=(0, 1, 2))
    together = engine.generate(asked)
    backwards = engine.generate(asked[::-1])[::-1]
    alone = [engine.generate([one])[0] for one in asked]
    for others in (backwards, alone):
        for left, right in zip(together, others, strict=True):
            assert left.token_ids_R.tolist() == right.token_ids_R.tolist()
            np.testing.assert_allclose(left.log_probs_R, right.log_probs_R, atol=TOLERANCE)


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
        ({"input_ids": np.array([1.5])}, "integers"),
        ({"input_ids": np.array([[1, 2]])}, "shape"),
        ({"prefix_tokens": 4}, "prefix_tokens"),
        ({"params": SamplingParams(1.0, 0, ())}, "max_new_tokens"),
        ({"params": SamplingParams(1.0, 4096, ())}, "context"),
        ({"params": SamplingParams(-1.0, 4, ())}, "temperature"),
        ({"params": SamplingParams(float("nan"), 4, ())}, "temperature"),
        ({"params": SamplingParams(1.0, 4, (), seed=-3)}, "seed"),
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


# --- control from other threads -----------------------------------------------------------------


def test_abort_returns_partial_tokens(start: Start, make_model: MakeModel) -> None:
    folder = make_model("qwen2")
    asked = [request("short", new=3), *[request(i, seed=i, new=FOREVER) for i in range(8)]]
    _, (short, *victims) = interrupted(
        lambda: start(folder, max_batch=16), asked, lambda engine, _: engine.abort()
    )
    assert short.finish_reason == "length"
    assert {v.finish_reason for v in victims} == {"abort"}
    begun = [v for v in victims if len(v.token_ids_R)]
    assert begun
    assert all(len(v.token_ids_R) < FOREVER for v in victims)
    assert_from_model(folder, [next(r for r in asked if r.request_id == begun[0].request_id)], begun[:1])


def test_unsent_requests_return_no_token_after_an_abort(start: Start, make_model: MakeModel) -> None:
    engine = start(make_model("qwen2"))
    engine.pause()
    running = engine.begin([request(i, new=FOREVER) for i in range(8)])
    while not running.done():  # an abort may overtake them on their way
        engine.abort()
        time.sleep(0.2)
    answers = running.result(timeout=600)
    assert {(len(a.token_ids_R), a.finish_reason) for a in answers} == {(0, "abort")}
    engine.resume()


def test_abort_does_not_reach_later_calls(start: Start, make_model: MakeModel) -> None:
    engine = start(make_model("qwen2"))
    engine.abort()
    (answer,) = engine.generate([request()])
    assert answer.finish_reason == "length"


def test_aborted_responses_can_be_continued(kind: EngineKind, start: Start, make_model: MakeModel) -> None:
    if not kind.seeded:
        pytest.skip(f"{kind.name} does not promise seeded sampling")
    asked = [request(new=FOREVER, seed=11)]
    engine, (part,) = interrupted(lambda: start(make_model("qwen2")), asked, lambda engine, _: engine.abort())
    done = part.token_ids_R[:20].tolist()  # on a busy machine it may have come less far
    ids, left = [1, 2, 3, *done], 30 - len(done)
    (rest,) = engine.generate([request(ids=ids, new=left, seed=11, prefix=len(done))])
    (uncut,) = engine.generate([request(new=30, seed=11)])
    assert [*done, *rest.token_ids_R.tolist()] == uncut.token_ids_R.tolist()


def test_pause_and_resume(start: Start, make_model: MakeModel) -> None:
    engine = start(make_model("qwen2"))
    asked = [request(i, seed=i, new=40) for i in range(4)]
    before = time.monotonic()
    undisturbed = engine.generate(asked)
    enough = 2 * (time.monotonic() - before) + 0.3
    engine.pause()
    running = engine.begin(asked)
    time.sleep(enough)
    assert not running.done()
    engine.resume()
    again = running.result(timeout=600)
    assert [len(a.token_ids_R) for a in again] == [len(a.token_ids_R) for a in undisturbed]
    assert {a.finish_reason for a in again} == {"length"}


def test_pause_holds_requests_in_flight(start: Start, make_model: MakeModel) -> None:
    def hold(engine: BlockingEngine, _wait_s: float) -> None:
        engine.pause()
        time.sleep(0.2)
        engine.update_weights(tensors(make_model("qwen2", seed=1)), 9)
        time.sleep(0.2)
        engine.abort()

    engine, (answer,) = interrupted(lambda: start(make_model("qwen2")), [request(new=FOREVER)], hold)
    assert 0 < len(answer.token_ids_R) < FOREVER
    assert set(answer.versions_R.tolist()) == {0}, "a token was sampled after pause"
    engine.resume()


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_but(FAMILIES, *(name for name in FAMILIES if name != "qwen3_moe")))
def test_update_changes_the_distribution(start: Start, make_model: MakeModel, family: str) -> None:
    old, new = make_model(family), make_model(family, seed=1)
    engine = start(old)
    assert engine.weight_version == 0
    engine.update_weights(iter(tensors(new)), 3)
    assert engine.weight_version == 3
    asked = mixed_requests(8)
    answers = engine.generate(asked)
    assert_from_model(new, asked, answers)
    assert {v for a in answers for v in a.versions_R.tolist()} == {3}


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text"])
def test_what_an_engine_keeps_of_a_prefix_ends_with_its_weights(
    start: Start, make_model: MakeModel, family: str
) -> None:
    """Keys and values, and states of linear attention, with which a segment continues behind its prefix."""
    engine = start(make_model(family))
    prompt = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], 70).tolist()  # more than a chunk
    asked = [request(n, [*prompt, n], new=20, seed=n) for n in range(3)]
    for version, model in enumerate((make_model(family, seed) for seed in (1, 2, 3)), start=1):
        engine.update_weights(iter(tensors(model)), version)
        for _ in range(2):  # the second time with what the first has left
            answers = engine.generate(asked)
            assert_from_model(model, asked, answers)
        asked += next_segments(asked[-3:], answers[-3:])


def test_the_digest_depends_on_the_weights_only(start: Start, make_model: MakeModel) -> None:
    old, new = make_model("qwen2"), make_model("qwen2", seed=7)
    engine = start(old)
    for version, model in enumerate((old, new, new, old), start=1):
        engine.update_weights(iter(tensors(model)), version)
    first, second, again, back = engine.digests[-4:]  # a server that is used again has loaded before
    assert first == back
    assert second == again
    assert first != second
    assert len(first) > 20


@pytest.mark.own_model
def test_tied_weights_may_come_once_or_twice(start: Start, make_model: MakeModel) -> None:
    new = tensors(make_model("qwen2_tied", seed=1))
    assert "lm_head.weight" not in dict(new)
    engine = start(make_model("qwen2_tied"))
    engine.update_weights([*new, ("lm_head.weight", dict(new)["model.embed_tokens.weight"])], 1)
    assert engine.weight_version == 1
    with pytest.raises(ValueError, match="lm_head"):
        engine.update_weights([*new, ("lm_head.weight", torch.zeros(48, 32))], 2)
    assert engine.weight_version == 1


def test_the_engine_keeps_its_own_copy(start: Start, make_model: MakeModel) -> None:
    engine = start(make_model("qwen2"))
    new = tensors(make_model("qwen2", seed=1))
    engine.update_weights(new, 1)
    for _, tensor in new:
        tensor.zero_()
    asked = [request()]
    assert_from_model(make_model("qwen2", seed=1), asked, engine.generate(asked))


def test_tokens_carry_the_version_that_sampled_them(start: Start, make_model: MakeModel) -> None:
    old, new = make_model("qwen2"), make_model("qwen2", seed=1)
    asked = request(new=FOREVER)

    def update(engine: BlockingEngine, wait_s: float) -> None:
        engine.update_weights(tensors(new), 7)
        time.sleep(wait_s)
        engine.abort()

    _, (answer,) = interrupted(lambda: start(old), [asked], update, versions=2)
    versions = answer.versions_R.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 7}
    expected = reference_log_probs(old, asked, answer)
    error = np.abs(answer.log_probs_R - expected)
    first = versions.index(7)
    assert error[:first].max() < TOLERANCE
    assert error[first:].max() > 0.1


def raising(weights: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    yield from weights[: len(weights) // 2]
    raise ConnectionError("the sender is gone")


def wrong_shape(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    (name, tensor), *others = weights[::-1]
    return [*others, (name, tensor[:-1])]


BROKEN: dict[str, Callable[[list[tuple[str, Tensor]]], Any]] = {
    "the sender fails half-way": raising,
    "a tensor is missing": lambda weights: weights[:-1],
    "nothing comes": lambda weights: [],
    "a name is unknown": lambda weights: [*weights, ("model.layers.9.what", torch.zeros(1))],
    "a shape is wrong": wrong_shape,
    "a tensor comes twice": lambda weights: [*weights, weights[0]],
}


TOLD = {
    "the sender fails half-way": "the sender is gone",
    "a tensor is missing": "1 weights are missing: lm_head.weight",
    "nothing comes": "27 weights are missing",
    "a name is unknown": "the model has no weight model.layers.9.what",
    "a shape is wrong": "weight lm_head.weight has shape",
    "a tensor comes twice": "was given twice",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_update_changes_nothing(start: Start, make_model: MakeModel, broken: str) -> None:
    old, new = make_model("qwen2"), tensors(make_model("qwen2", seed=1))
    engine = start(old)
    with pytest.raises((ValueError, ConnectionError), match=TOLD[broken]):
        engine.update_weights(BROKEN[broken](new), 5)
    assert engine.weight_version == 0
    asked = mixed_requests(4)
    answers = engine.generate(asked)
    assert_from_model(old, asked, answers)
    engine.update_weights(new, 6)
    assert engine.weight_version == 6


def test_many_threads_at_once(start: Start, make_model: MakeModel) -> None:
    """Calls, updates and pauses in any order: nothing hangs, and every token has its log-prob."""
    old, new = make_model("qwen2"), tensors(make_model("qwen2", seed=1))
    engine = start(old)
    stop = threading.Event()

    def disturb() -> None:
        version = 1
        while not stop.is_set():
            engine.pause()
            engine.update_weights(new, version)
            engine.resume()
            time.sleep(0.005)  # between a resume and the next pause somebody must get to sample
            version += 1

    with ThreadPoolExecutor(4) as pool:
        disturber = pool.submit(disturb)
        calls = [pool.submit(engine.generate, mixed_requests(9, new=25)) for _ in range(3)]
        try:
            answers = [answer for call in calls for answer in call.result(timeout=600)]
        finally:
            stop.set()
        disturber.result(timeout=600)
    assert len(answers) == 27
    for answer in answers:
        assert len(answer.token_ids_R) == 25
        assert (np.diff(answer.versions_R) >= 0).all()


def test_close_aborts_running_requests(start: Start, make_model: MakeModel) -> None:
    engine = start(make_model("qwen2"))
    running = engine.begin([request(new=FOREVER)])
    time.sleep(1)  # it is on its way to the engine: one that arrives later would be aborted by nobody
    engine.close()
    assert running.result(timeout=600)[0].finish_reason == "abort"
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([request()])
