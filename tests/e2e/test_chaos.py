"""A few harms of tests/support/chaos.py; more by ``python -m tests.support.chaos``, and ``--agents``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang.server_process import sglang_python
from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.chaos import COLOCATED, harm_and_check, with_agents

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


LIGHT = ("--reward.workers=1", "--evaluation.every=0")


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    try:
        sglang_python()
    except ConfigError as error:
        pytest.skip(str(error))


def test_a_harmed_run_loses_nothing(tmp_path: Path) -> None:
    """The sampler first: it is there again in seconds, and a server is not. (By disk: the runs below.)"""
    harms = ("kill the sampler", "kill a server")
    found = harm_and_check(tmp_path, harms, random.Random(3), [*LIGHT, "--rollout.sglang.sync=broadcast"])
    assert all(found[kind] == 1 for kind in harms), found
    assert found["trained"] > 0
    assert "digests_compared" in {row["kind"] for row in read_jsonl(tmp_path / "run/events.jsonl")}


def test_a_run_with_colocated_servers_loses_nothing(tmp_path: Path) -> None:
    """Killed while a server releases its memory, and while one takes it back with new weights."""
    harms, arrows = ("kill the sampler", "kill a server"), ("release_memory_occupation", "weights_checker")
    found = harm_and_check(tmp_path, harms, random.Random(5), [*LIGHT, *COLOCATED], arrows)
    assert all(found[kind] == 1 for kind in harms), found
    assert sum(found["at " + arrow] for arrow in arrows) == 2, found
    assert found["trained"] > 0


def test_a_run_with_agent_programs_loses_nothing(tmp_path: Path) -> None:
    """Killed while programs cancel streams, ask several at a time, and are answered, by one real server."""
    harms, arrows = (
        ("kill an agent program", "kill everything"),
        ("a stream is cancelled", "a program is answered"),
    )
    flags = [*LIGHT, "--rollout.sglang.servers=1"]
    found = harm_and_check(tmp_path, harms, random.Random(9), flags, arrows, with_agents(tmp_path))
    assert all(found[kind] == 1 for kind in harms), found
    assert found["trained"] > 0
    assert found["asked again, after a kill"] > 0
    assert found["cancels"] > 0
    assert found["failed"] <= 1
    gaps = [row["rollout/engine_gap_max"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")]
    measured = [gap for gap in gaps if gap is not None]  # at the same weights
    assert measured
    assert max(measured) < 0.05, "given tokens have no log-prob"
