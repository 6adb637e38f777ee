"""Routes in the training loop: metrics by hand, and what is said of missing and of differing ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bapo_megatron.config import AlgorithmConfig, ModelConfig, RolloutConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.trainer.checks import (
    EXPERT_NAMES,
    check_route_mismatch,
    check_stored_routes,
    expert_metrics,
    route_metrics,
)
from bapo_megatron.trainer.preflight import check_route_replay
from bapo_megatron.types import StoredRoutes
from tests.support.batches import in_memory
from tests.support.models import save_tiny_model
from tests.support.small_steps import group, rollout


def test_metrics_by_hand() -> None:
    """8 trained tokens, 6 with a route; 5 positions without; 24 pairs of token and layer: 6 differ."""
    found = route_metrics(torch.tensor([8.0, 6, 5, 24, 6, 12, 3]))
    assert found == {
        "routes/known": 0.75,
        "routes/unknown_tokens": 5.0,
        "routes/mismatch": 0.25,
        "routes/engine_mismatch": 0.25,
    }
    assert route_metrics(torch.tensor([8.0, 0, 9, 0, 0, 0, 0]))["routes/mismatch"] is None
    assert route_metrics(None) == {}


def test_expert_metrics_by_hand() -> None:
    """Two layers, 6 tokens to 2 of 4 experts: means of 3; the busiest has 3 in one layer, 6 in the other."""
    even, uneven = [3.0, 3, 3, 3, 6, 6.0], [6.0, 4, 2, 0, 6, 3.0]
    found = expert_metrics(torch.tensor([even, uneven], dtype=torch.float64))
    assert found == {
        "experts/imbalance_mean": 1.5,
        "experts/imbalance_max": 2.0,
        "experts/router_entropy": 0.75,
    }
    assert expert_metrics(torch.zeros(2, 6)) == dict.fromkeys(EXPERT_NAMES)
    assert expert_metrics(None) == {}


DEFAULT = AlgorithmConfig().route_mismatch_limit


@pytest.mark.parametrize(
    ("shares", "limit", "says"),
    [
        ([0.1, 0.05], 0.1, False),
        ([0.05, 0.11], 0.1, True),
        ([None], 0.1, False),
        ([0.9], None, False),
        # What rounding to bfloat16 does: a tenth in the mean over the layers; other tokens' are near 1.
        *(([share], DEFAULT, share > 0.3) for share in (0.12, 0.96)),
    ],
)
def test_a_share_above_the_limit_is_said(shares: list[Any], limit: float | None, says: bool) -> None:
    said, config = Mock(), AlgorithmConfig(route_mismatch_limit=limit)
    updates = [{"routes/engine_mismatch": share} for share in shares]
    check_route_mismatch(config, 4, updates, said)
    check_route_mismatch(config, 4, [{}], said)
    check_route_mismatch(config, 4, updates, None)
    assert said.warning.call_count == says
    for (kind, step, message), _ in said.warning.call_args_list:
        assert (kind, step) == ("routes_differ", 4)
        assert f"{shares[-1]:.1%} of" in message


def test_stored_rollouts_without_routes_stop_a_run_that_needs_them() -> None:
    stored = StoredRoutes(Path("routes.npy"), 0, 3, 2, 2, "|u1", 0)
    header = in_memory(group(rollout(1.0, 3, stored_routes=stored), rollout(0.0, 3))).header
    check_stored_routes(RolloutConfig(), 7, header)
    with pytest.raises(ConfigError, match="1 of the 2 responses of step 7 were stored without routes"):
        check_stored_routes(RolloutConfig(route_replay="replay"), 7, header)


def test_the_preflight_asks_for_experts_and_an_engine_with_routes(tmp_path: Path) -> None:
    dense = ModelConfig(save_tiny_model("qwen3", tmp_path / "dense"))
    sparse = ModelConfig(save_tiny_model("qwen3_moe", tmp_path / "sparse"))
    for engine in ("local", "sglang"):
        check_route_replay(RolloutConfig(route_replay="replay", engine=engine), sparse)
    check_route_replay(RolloutConfig(), dense)
    with pytest.raises(ConfigError, match=r"route_replay=measure: model.hf_path=.*dense has no experts"):
        check_route_replay(RolloutConfig(route_replay="measure"), dense)
    own = RolloutConfig(route_replay="replay", engine="tests.support.plain_engine:PlainBackend")
    with pytest.raises(ConfigError, match=r"rollout.engine=tests.support.plain_engine:\w+ returns no routes"):
        check_route_replay(own, sparse)
