"""Simulation of prefix affinity: tokens that engines prefill again for segments of partial rollouts.

    python -m benchmarks.prefix_affinity            # seconds, on one core

A simulation in which the choice of an engine is the product's (``rollout/engines/pool_state.py``), and
engines are a rate of tokens and a prefix cache that forgets what was used longest ago. Writes
benchmarks/results/prefix_affinity.md.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bapo_megatron.rollout.engines.pool_state import AFFINITY_SURPLUS, CachedPrefix, EngineSlot, choose
from benchmarks.common import no_options, write

ENGINES, PLACES = 16, 32
"""As `bapo plan recipes/bp_math_32b_64k.py` has them: 32 sequences at the assumed lengths."""
CACHE_TOKENS = 800_000
"""Of one engine: 4 GPUs with 51.6 GB of KV cache each, 256 KiB a token."""
MEDIAN, SIGMA, LONGEST, SEGMENT, PROMPT = 12_000, 0.9, 65_536, 8192, 200
RATE = 30.0
"""Tokens a second of one request."""
COMMIT_S = 0.1
"""Results that come within it are committed to the journal, and their next segments sent, together."""
SECONDS = 40_000.0


@dataclass
class Found:
    """The counts of one run."""

    sampled: int = 0
    prefilled: int = 0
    continued: int = 0
    """Segments that are not the first of their response."""
    returned: int = 0
    """Those that came to the engine of the one before."""
    unevenness: float = 0.0
    """Mean difference between the most and the least loaded engine, in requests."""


@dataclass
class Response:
    """One response: what it has, and where."""

    number: int
    length: int
    made: int = 0
    last: EngineSlot | None = None
    cached: CachedPrefix | None = None


class Cache:
    """The prefix cache of an engine."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[int, int] = OrderedDict()

    def clear(self) -> None:
        """Forget everything: new weights."""
        self._tokens.clear()

    def hit(self, response: Response) -> int:
        """Tokens of the response that need no prefill."""
        return self._tokens.get(response.number, 0)

    def keep(self, response: Response) -> None:
        """Keep it whole, but for the token that was sampled last; forget the oldest if there is no room."""
        self._tokens.pop(response.number, None)
        self._tokens[response.number] = PROMPT + response.made - 1
        while sum(self._tokens.values()) > CACHE_TOKENS:
            self._tokens.popitem(last=False)


def simulate(affinity: bool, open_for_each_place: float, jitter: float, weights_s: float = 1800.0) -> Found:
    """Sample for ``SECONDS``.

    ``open_for_each_place``: open responses. ``jitter``: how much the rates of requests differ; 0 for engines
    that decode in step, whose segments end together. ``weights_s``: between new weights.
    """
    chance, found = random.Random(0), Found()
    slots = [EngineSlot(_nobody(), is_up=True) for _ in range(ENGINES)]
    caches = {id(slot): Cache() for slot in slots}
    count = int(open_for_each_place * ENGINES * PLACES)
    numbers = iter(range(10**9))
    ready = [(n, Response(n, _length(chance))) for n in (next(numbers) for _ in range(count))]
    ends: list[tuple[float, int, EngineSlot, Response, int]] = []
    now, weights_at, uneven = 0.0, weights_s, []
    while now < SECONDS:
        while ready and (free := [slot for slot in slots if slot.load < PLACES]):
            response = heapq.heappop(ready)[1]
            slot = choose(free, PLACES, response.cached if affinity else None)
            tokens = _begin(response, slot, caches[id(slot)], found)
            takes = tokens / RATE * chance.uniform(1 - jitter, 1 + jitter)
            heapq.heappush(ends, (now + takes, response.number, slot, response, tokens))
        loads = [each.load for each in slots]
        uneven.append(max(loads) - min(loads))
        now = ends[0][0] + COMMIT_S
        while now > weights_at:
            weights_at += weights_s
            for each in slots:
                each.loads += 1
                caches[id(each)].clear()
        while ends and ends[0][0] <= now:
            _, _, slot, response, tokens = heapq.heappop(ends)
            slot.load -= 1
            response.made += tokens
            found.sampled += tokens
            response.cached = CachedPrefix(slot, slot.loads)
            caches[id(slot)].keep(response)
            if response.made >= response.length:
                response = Response(next(numbers), _length(chance))
            heapq.heappush(ready, (response.number, response))
    found.unevenness = sum(uneven) / len(uneven)
    return found


def _begin(response: Response, slot: EngineSlot, cache: Cache, found: Found) -> int:
    """Count what the engine prefills; the tokens of the segment."""
    slot.load += 1
    found.prefilled += PROMPT + response.made - cache.hit(response)
    if response.made:
        found.continued += 1
        found.returned += response.last is slot
    response.last = slot
    return min(SEGMENT, response.length - response.made)


def _length(chance: random.Random) -> int:
    return max(1, min(LONGEST, int(MEDIAN * chance.lognormvariate(0.0, SIGMA))))


def _nobody() -> Any:
    """Stand-in for a slot's engine, which the simulation never calls."""
    return None


def rows() -> Iterator[str]:
    """The table, one row for each setting and way."""
    for spare in (0.7, 1.0, 2.0):
        for jitter, ends in ((0.2, "at any time"), (0.0, "together")):
            for affinity in (False, True):
                found = simulate(affinity, spare, jitter)
                yield (
                    f"| {spare:g} | {ends} | {'last engine' if affinity else 'least loaded'} "
                    f"| {found.sampled / 1e6:,.0f} | {found.prefilled / 1e6:,.0f} "
                    f"| {found.prefilled / found.sampled:.2f} | {found.returned / found.continued:.0%} "
                    f"| {found.unevenness:.1f} |"
                )


def report() -> str:
    table = "\n".join(rows())
    return f"""# Prefill of continued segments

Command: `python -m benchmarks.prefix_affinity`

A simulation of {ENGINES} engines with {PLACES} requests each, a prefix cache of {CACHE_TOKENS:,} tokens an
engine (the oldest go first), responses of log-normal lengths (median {MEDIAN:,}, sigma {SIGMA}, at most
{LONGEST:,}) in segments of {SEGMENT:,}, {RATE:g} tokens a second a request. The choice of an engine is the
product's; the engine of the last segment may have {AFFINITY_SURPLUS:.0%} of its places more in use than the
least loaded. Results that come within {COMMIT_S} s are committed together, and their next segments sent.
New weights come every half hour and empty all caches; what continues under them is prefilled anew wherever
it goes. Requests in flight at that moment go on, and their own prefill under the new weights is not counted,
in either way.

*Open*: responses that are open for each place. *Ends*: engines decode in step, and requests that began
together end together (rates are equal), or their rates differ by up to a fifth.

| open | ends | a segment goes to | M sampled | M prefilled | prefilled / sampled | returned | uneven |
|---:|---|---|---:|---:|---:|---:|---:|
{table}

*Returned*: of the segments that continue a response, those that came to its last engine. *Uneven*: requests
of the most loaded engine above the least loaded, on average.

Where segments end one by one, the engine that has just lost a request is the least loaded: the response
returns to it without affinity, too. Where several are committed together, it may not.
"""


def main() -> None:
    """Simulate, and write the report."""
    no_options(__doc__)
    write("prefix_affinity", report())


if __name__ == "__main__":
    main()
