"""Crash tests of the sampler: it dies at every write, under every rule; nothing is trained twice or lost."""

from __future__ import annotations

from collections import Counter
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.audit import Audit
from tests.support.mortal import WAYS, MortalRun
from tests.support.tiers import slow_but
from tests.support.virtual_time import run_virtually

pytestmark = pytest.mark.integration

STEPS = 6

RULES = [
    {
        "on_stale": on_stale,
        "max_staleness": staleness,
        "budget_tokens": (4 if staleness else 12) if budget else None,
        "drop_uniform_groups": dynamic,
    }
    for on_stale, staleness, budget, dynamic in product(
        ("resample", "drop", "train"), (0, 2), (True, False), (True, False)
    )
]


@pytest.mark.parametrize(
    "rules", slow_but(RULES, *RULES[::5]), ids=lambda rules: "-".join(map(str, rules.values()))
)
def test_crashes_at_random_writes_train_nothing_twice(
    tmp_path: Path, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sampler after the other dies, in every way, while engines come and go and weights arrive."""
    chance = np.random.default_rng(RULES.index(rules))

    async def check() -> None:
        run = MortalRun(tmp_path, chance, monkeypatch, **rules)
        for _ in range(3):
            for way in chance.permutation(WAYS):
                await run.live(STEPS, int(chance.integers(0, 25)), way)
                run.check()
        assert await run.live(STEPS, None)
        run.check()

    run_virtually(check(), chance, monkeypatch)


@pytest.mark.parametrize("turn", range(2))
def test_a_crash_at_every_write_trains_nothing_twice(
    tmp_path: Path, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash at each write of four steps; the next sampler survives. Together they cover all hard cases."""
    chance = np.random.default_rng(turn)
    seen: Counter[str] = Counter()

    async def check() -> None:
        for deadly in count():
            rules = {"max_staleness": 2, "budget_tokens": 4, "prompts": 30}
            run = MortalRun(tmp_path / f"{deadly}", chance, monkeypatch, **rules)
            if await run.live(4, deadly, WAYS[(deadly + 2 * turn) % len(WAYS)]):
                break
            assert await run.live(4, None)
            note_what_was_hard(run.check(), run, seen)
        assert deadly > 30

    run_virtually(check(), chance, monkeypatch)
    assert all(seen.values()), seen


def note_what_was_hard(found: Audit, run: MortalRun, seen: Counter[str]) -> None:
    """Checks that the runs cover all hard cases: else the tests above would be empty."""
    responses = [response for group in found.groups for response in group.responses]
    seen["engine lost"] += run.world.event_kinds().count("engine_lost")
    seen["uniform"] += sum(group.end == "uniform" for group in found.groups)
    seen["resampled"] += sum(len(groups) > 1 for groups in found.begun.values())
    seen["two versions"] += sum(len(set(response.versions)) > 1 for response in responses)
    seen["older weights again"] += sum(one.versions != sorted(one.versions) for one in responses)
    seen["logs deleted"] += len([*run.kept.iterdir()]) > len([*run.world.journal.glob("*.log")])
