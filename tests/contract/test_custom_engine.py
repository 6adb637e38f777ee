"""An engine that `rollout.engine` names by its path, held to the contract of every engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.interfaces import Engine
from tests.support.plain_engine import PlainEngine

from .blocking import BlockingEngine
from .conftest import EngineKind
from .test_engine_contract import (  # noqa: F401  (collected here once more, for this engine)
    test_a_malformed_request_is_named_and_harms_nothing,
    test_each_request_has_its_own_params,
    test_greedy_takes_the_most_probable_token_and_reports_temperature_1,
    test_segments_equal_the_uncut_response,
    test_stop_token_ends_and_is_included,
)
from .test_engine_updates import (  # noqa: F401
    test_abort_does_not_reach_later_calls,
    test_abort_returns_partial_tokens,
    test_an_abort_reaches_requests_that_wait,
    test_the_digest_depends_on_the_weights_only,
    test_tokens_carry_the_version_that_sampled_them,
)


def _plain(folder: Path, _batch: int, request: pytest.FixtureRequest) -> BlockingEngine:
    async def make() -> Engine:
        return PlainEngine(folder, "plain")

    return BlockingEngine(make, folder, request.getfixturevalue("tmp_path") / "weights")


@pytest.fixture
def kind() -> EngineKind:
    """The engine under test, instead of the project's own."""
    return EngineKind("plain", _plain, seeded=True)
