"""Verification of a weight sync: engines' digests against those sent, and against each other's.

Engines that agree can all be wrong. Where the sent digests are unknown a quorum says which is right.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.sent_weights import (
    DigestingIterator,
    DigestMismatch,
    DigestQuorum,
    SentCheck,
    SentDigests,
    TensorDigests,
    UnknownDigests,
)
from tests.support.sampling import ScriptedEngine, mixed

OLD = {"embed": "0a", "norm": "0b", "head": "0c"}
SENT = {"embed": "1a", "norm": "1b", "head": "1c"}
NOT_SENT = "not the weights that were sent"


def told(*ranks: Mapping[str, str]) -> TensorDigests:
    """An engine's digest, with those of its tensors."""
    return TensorDigests(json.dumps(ranks), ranks)


class Events:
    """Events of a run, and a check that has seen digests match."""

    def __init__(self, proven: bool = True) -> None:
        self.all: list[dict[str, Any]] = []
        self.check = SentCheck(self.report)
        if proven:
            assert self.check.is_sent(SentDigests((OLD,)), "first", told(OLD))
            self.all.clear()

    def report(self, kind: str, **fields: Any) -> None:
        self.all.append({"kind": kind, **fields})


def test_equal_digests_match_and_are_reported_once() -> None:
    events = Events(proven=False)
    for engine in ("a", "b"):
        assert events.check.is_sent(SentDigests((SENT, OLD), 4000), engine, told(SENT, OLD))
    (event,) = events.all
    assert event == {
        "kind": "digests_compared",
        "engine": "a",
        "ranks": 2,
        "tensors": 6,
        "hashed_bytes": 4000,
    }


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([SENT, {**SENT, "norm": "0b"}], "other values in norm on rank 1$"),
        ([{**SENT, "norm": "0b", "embed": "0a"}, SENT], "other values in embed on rank 0, norm on rank 0$"),
        ([SENT, {"embed": "0a", "head": "1c"}], "other values in embed on rank 1, norm on rank 1$"),
        ([OLD, OLD], "other values in embed on rank 0, head on rank 0, norm on rank 0 and 3 more$"),
    ],
)
def test_the_first_differing_tensors_are_named(found: list[dict[str, str]], message: str) -> None:
    with pytest.raises(DigestMismatch, match=f"{NOT_SENT}: {message}"):
        Events().check.is_sent(SentDigests((SENT, SENT)), "a", told(*found))


def test_computed_buffers_are_ignored_and_unknown_tensors_reported() -> None:
    events = Events()
    rotary = {**SENT, "layers.0.rotary_emb.cos_sin_cache": "77", "layers.0.inv_freq": "78"}
    assert events.check.is_sent(SentDigests((SENT,)), "a", told(rotary))
    assert not events.all
    for engine in ("a", "b"):  # what is not known is left to the comparison of engines with each other
        assert not events.check.is_sent(SentDigests((SENT,)), engine, told({**rotary, "scale": "9"}))
    reason = "tensors that were not sent: scale on rank 0"
    assert events.all == [{"kind": "digests_not_compared", "engine": "a", "reason": reason}]


@pytest.mark.parametrize(
    ("sent", "digest", "reason"),
    [
        (SentDigests(unknown="the model is quantized"), told(SENT), "the model is quantized"),
        (SentDigests((SENT,)), "plain", "the engine reports no digests of single tensors"),
        (SentDigests((SENT,)), told(SENT, SENT), "the engine has 2 ranks, and not 1"),
    ],
)
def test_each_reason_not_to_compare_is_reported_once(sent: SentDigests, digest: str, reason: str) -> None:
    events = Events()
    for engine in ("a", "b", "a"):
        assert not events.check.is_sent(sent, engine, digest)
    assert events.all == [{"kind": "digests_not_compared", "engine": "a", "reason": reason}]


def test_another_hash_function_is_no_mismatch() -> None:
    """For example trainer on a CPU, servers on GPUs. After a first match it is a mismatch."""
    events = Events(proven=False)
    assert not events.check.is_sent(SentDigests((SENT,)), "a", told(OLD))
    assert "another hash" in events.all[0]["reason"]
    assert events.check.is_sent(SentDigests((SENT,)), "a", told(SENT))
    with pytest.raises(DigestMismatch, match=NOT_SENT):
        events.check.is_sent(SentDigests((SENT,)), "a", told(OLD))


def test_digests_round_trip_with_the_folder(tmp_path: Path) -> None:
    assert SentDigests.read(tmp_path) is None, "a foreign folder has none"
    assert not Events().check.is_sent(None, "a", "plain")
    for sent in (SentDigests((SENT, OLD), 12), SentDigests(unknown="why")):
        sent.write(tmp_path)
        assert SentDigests.read(tmp_path) == sent


# --- while weights pass --------------------------------------------------------------------------


class Digester:
    """A digester of names, which raises at one of them."""

    def __init__(self, refused: str = "") -> None:
        self.names: list[str] = []
        self._refused = refused

    def add(self, name: str, tensor: Tensor) -> None:
        if name == self._refused:
            raise ValueError(f"{name} is not known")
        self.names.append(name)

    def result(self) -> SentDigests:
        return SentDigests((dict.fromkeys(self.names, "1"),))


def weights() -> Iterator[tuple[str, Tensor]]:
    yield from ((name, torch.ones(2)) for name in "abc")


def test_a_failing_digest_does_not_stop_the_weights() -> None:
    found = {
        refused: DigestingIterator(weights(), lambda refused=refused: Digester(refused))  # type: ignore[misc]
        for refused in ("", "b")
    }
    for watched in found.values():
        assert [name for name, _ in watched] == ["a", "b", "c"]
    assert found[""].sent() == SentDigests(({"a": "1", "b": "1", "c": "1"},))
    assert found["b"].sent() == SentDigests(unknown="b is not known")
    assert DigestingIterator(weights(), None).sent() is None
    assert DigestingIterator(weights(), lambda: UnknownDigests("why")).sent() == SentDigests(unknown="why")


# --- the quorum of engines -----------------------------------------------------------------------


def outcomes(
    *rounds: Sequence[tuple[str, str]], is_sent: Callable[[str, str], bool] | None = None
) -> list[list[BaseException | None]]:
    """The outcome for engines that report these digests at once, in each round."""

    async def tell(quorum: DigestQuorum, digests: Sequence[tuple[str, str]]) -> list[BaseException | None]:
        for engine, _ in digests:
            quorum.expect(engine)
        calls = (quorum.confirm(engine, digest) for engine, digest in digests)
        return list(await asyncio.gather(*calls, return_exceptions=True))

    async def all_rounds() -> list[list[BaseException | None]]:
        quorum = DigestQuorum(10.0, is_sent)
        return [await tell(quorum, digests) for digests in rounds]

    return asyncio.run(asyncio.wait_for(all_rounds(), 20))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
def test_two_of_three_engines_form_a_quorum(order: tuple[int, int, int]) -> None:
    engines = [("a", "x"), ("b", "y"), ("c", "x")]
    (found,) = outcomes([engines[place] for place in order])
    assert [engines[place][0] for place, one in zip(order, found, strict=True) if one] == ["b"]
    (wrong,) = filter(None, found)
    assert isinstance(wrong, DigestMismatch)
    assert "a: x" in str(wrong)
    assert "b: y" in str(wrong)


@pytest.mark.parametrize(
    ("rounds", "passes"),
    [
        ([[("a", "x"), ("b", "y")], [("a", "x"), ("b", "x")]], [False, True]),  # all fail, and may retry
        ([[("a", "x")], [("b", "x")], [("c", "y")]], [True, True, False]),  # one sets it for later ones
        ([[("a", "x"), ("b", "y")], [("a", "x")]], [False, False]),  # b's y still stands
    ],
)
def test_digests_of_several_rounds(rounds: list[Any], passes: list[bool]) -> None:
    found = outcomes(*rounds)
    assert [[one is None for one in each] for each in found] == [
        [passed] * len(each) for passed, each in zip(passes, rounds, strict=True)
    ]


async def test_an_engine_without_a_match_waits_for_loading_engines() -> None:
    quorum = DigestQuorum(60.0)
    quorum.expect("a")
    quorum.expect("b")
    first = asyncio.create_task(quorum.confirm("a", "x"))
    await asyncio.sleep(0.05)
    assert not first.done()
    await quorum.release("b")  # it was lost
    await asyncio.wait_for(first, 10)


async def test_the_wait_for_loading_engines_has_a_limit() -> None:
    quorum = DigestQuorum(0.05)
    quorum.expect("a")
    quorum.expect("hangs")
    await asyncio.wait_for(quorum.confirm("a", "x"), 10)
    with pytest.raises(DigestMismatch, match="the engines have different weights: a: x, hangs: y"):
        await quorum.confirm("hangs", "y")


async def test_digests_are_verified_after_a_load_by_disk(tmp_path: Path) -> None:
    """Both engines of a pool are put in quarantine, and come back with the weights that were sent."""
    events = Events()
    engines = [ScriptedEngine(mixed, name) for name in ("a", "b")]
    pool = EnginePool(engines, 4, events.report)
    pool.sent_check = events.check
    SentDigests((SENT,)).write(tmp_path)
    for engine in engines:
        engine.digest = told({**SENT, "norm": OLD["norm"]})
    await pool.update(tmp_path, 1)
    assert pool.up == 0
    reasons = [event["reason"] for event in events.all if event["kind"] == "engine_refused"]
    assert reasons == [f"{NOT_SENT}: other values in norm on rank 0"] * 2
    for engine in engines:
        engine.digest = told(SENT)
    await pool.update(tmp_path, 2)
    assert pool.up == 2
    await pool.close()
