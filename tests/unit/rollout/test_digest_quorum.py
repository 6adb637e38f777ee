"""The digest quorum: which digest of a weight version is right, and which engines must load again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bapo_megatron.rollout.engines.sent_weights import DigestMismatch, DigestQuorum

Told = tuple[str, str]
"""An engine and its digest."""


def told(*rounds: Sequence[Told]) -> list[list[BaseException | None]]:
    """The outcome for engines that report these digests at once, in each round."""

    async def tell(quorum: DigestQuorum, digests: Sequence[Told]) -> list[BaseException | None]:
        for engine, _ in digests:
            quorum.expect(engine)
        calls = (quorum.confirm(engine, digest) for engine, digest in digests)
        return list(await asyncio.gather(*calls, return_exceptions=True))

    async def all_rounds() -> list[list[BaseException | None]]:
        quorum = DigestQuorum(10.0)
        return [await tell(quorum, digests) for digests in rounds]

    return asyncio.run(asyncio.wait_for(all_rounds(), 20))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
def test_two_of_three_engines_form_a_quorum(order: tuple[int, int, int]) -> None:
    engines = [("a", "x"), ("b", "y"), ("c", "x")]
    (found,) = told([engines[place] for place in order])
    assert [engines[place][0] for place, one in zip(order, found, strict=True) if one] == ["b"]
    (wrong,) = filter(None, found)
    assert isinstance(wrong, DigestMismatch)
    assert "a: x" in str(wrong)
    assert "b: y" in str(wrong)


def test_without_two_equal_digests_all_fail_and_may_retry() -> None:
    first, second = told([("a", "x"), ("b", "y")], [("a", "x"), ("b", "x")])
    assert all(first)
    assert second == [None, None]


def test_a_single_engine_sets_the_digest_for_later_ones() -> None:
    first, second, third = told([("a", "x")], [("b", "x")], [("c", "y")])
    assert first == second == [None]
    assert all(third)


def test_an_engines_earlier_digest_does_not_count_with_its_new_one() -> None:
    assert all(told([("a", "x"), ("b", "y")], [("a", "x")])[1])  # b's y still stands


def test_an_engine_without_a_match_waits_for_loading_engines() -> None:
    async def check() -> None:
        quorum = DigestQuorum(60.0)
        quorum.expect("a")
        quorum.expect("b")
        first = asyncio.create_task(quorum.confirm("a", "x"))
        await asyncio.sleep(0.05)
        assert not first.done()
        await quorum.release("b")  # it was lost
        await asyncio.wait_for(first, 10)

    asyncio.run(check())


def test_the_wait_for_loading_engines_has_a_limit() -> None:
    async def check() -> None:
        quorum = DigestQuorum(0.05)
        quorum.expect("a")
        quorum.expect("hangs")
        await asyncio.wait_for(quorum.confirm("a", "x"), 10)
        with pytest.raises(DigestMismatch, match="the engines have different weights: a: x, hangs: y"):
            await quorum.confirm("hangs", "y")

    asyncio.run(check())
