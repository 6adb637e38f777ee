"""A real server that gives up its memory while the policy trains, and wakes with new weights.

On a CPU SGLang keeps the memory, but checks, empties and refuses what it does on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bapo_megatron.interfaces import ReleasesMemory
from tests.support.tiers import slow_but

from .blocking import BlockingEngine
from .conftest import Servers
from .references import (
    FOREVER,
    assert_from_model,
    mixed_requests,
    next_segments,
    request,
    tensors,
)

MakeModel = Callable[..., Path]


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    """The family of the server's model; a test may name another by ``indirect``."""
    return str(getattr(request, "param", "qwen2"))


@pytest.fixture
def shared(servers: Servers, make_model: MakeModel, family: str) -> Iterator[BlockingEngine]:
    """A server that other tests use, too."""
    with servers.awake_afterwards(make_model(family)) as engine:
        yield engine


def test_a_server_sleeps_and_wakes_with_new_weights(shared: BlockingEngine, make_model: MakeModel) -> None:
    """Released while requests run: their tokens come back, and nothing of them is left after the wake."""
    assert isinstance(shared.engine, ReleasesMemory)
    for version in (1, 2):
        new = make_model("qwen2", seed=version)
        running = shared.begin([request(n, [n + 2, 3], new=FOREVER, seed=n) for n in range(6)])
        while not shared.generate([request("probe", new=2)])[0].token_ids_R.size:
            time.sleep(0.01)
        shared.release_memory()
        answers = running.result(timeout=60)
        assert {answer.finish_reason for answer in answers} == {"abort"}
        assert sum(len(answer.token_ids_R) for answer in answers) > 0
        assert shared.is_alive(), "a server that sleeps answers all the same"
        later = shared.begin([request("later", new=4)])
        time.sleep(0.3)
        assert not later.done(), "a request was answered without weights"
        shared.wake(tensors(new), version)
        assert shared.weight_version == version
        assert later.result(timeout=60)[0].versions_R.tolist() == [version] * 4
        asked = mixed_requests(8)
        assert_from_model(new, asked, shared.generate(asked))
    assert shared.digests[-2] != shared.digests[-1]


@pytest.mark.parametrize(
    "family", slow_but(["qwen2", "qwen3_moe", "qwen3_5_text", "qwen3_5"], "qwen2"), indirect=True
)
def test_a_server_wakes_with_weights_from_the_memory_of_this_process(
    shared: BlockingEngine, make_model: MakeModel, family: str
) -> None:
    """Several buckets, the largest tensor one of its own; both ways give the same digest. Nothing is left of
    prefixes that the weights before have computed."""
    new, before = make_model(family, seed=1), len(shared.digests)
    asked = mixed_requests(8)
    asked += next_segments(asked, shared.generate(asked))
    shared.generate(asked)
    shared.release_memory()
    shared.wake(tensors(new), 1)
    for version in (2, 3):
        shared.release_memory()
        later = shared.begin([request("later", new=4)])
        shared.wake_by_handles(iter(tensors(new)), version)
        assert later.result(timeout=60)[0].versions_R.tolist() == [version] * 4
        assert_from_model(new, asked, shared.generate(asked))
    assert len(shared.digests) == before + 3
    assert len(set(shared.digests[before:])) == 1
