"""The contract suite of every engine (``interfaces.Engine``): aborts, and new weights while it samples."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiers import slow_but

from .blocking import BlockingEngine
from .conftest import FAMILIES, SHAPE
from .references import (
    FOREVER,
    ROUTES,
    TOLERANCE,
    assert_from_model,
    interrupted,
    mixed_requests,
    next_segments,
    reference_log_probs,
    reference_routes,
    request,
    tensors,
)

Start = Callable[..., BlockingEngine]
MakeModel = Callable[..., Path]


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


def test_an_abort_reaches_requests_that_wait(start: Start, make_model: MakeModel) -> None:
    """Behind a batch that runs, which the embedded engine finishes first."""
    engine = start(make_model("qwen2"))
    running = [engine.begin([request(f"{turn}-{n}", new=FOREVER) for n in range(4)]) for turn in range(3)]
    while not all(call.done() for call in running):  # an abort may overtake them on their way
        engine.abort()
        time.sleep(0.2)
    answers = [answer for call in running for answer in call.result()]
    assert {answer.finish_reason for answer in answers} == {"abort"}


def test_abort_does_not_reach_later_calls(start: Start, make_model: MakeModel) -> None:
    engine = start(make_model("qwen2"))
    engine.abort()
    (answer,) = engine.generate([request()])
    assert answer.finish_reason == "length"


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_but(FAMILIES, *(name for name in FAMILIES if name != "qwen3_moe")))
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
            assert {v for answer in answers for v in answer.versions_R.tolist()} == {version}
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


def test_many_threads_at_once(start: Start, make_model: MakeModel) -> None:
    """Calls and updates in any order: nothing hangs, and every token has its log-prob."""
    old, new = make_model("qwen2"), tensors(make_model("qwen2", seed=1))
    engine = start(old)
    stop = threading.Event()

    def disturb() -> None:
        version = 1
        while not stop.is_set():
            engine.update_weights(new, version)
            time.sleep(0.005)  # between two updates somebody must get to sample
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
