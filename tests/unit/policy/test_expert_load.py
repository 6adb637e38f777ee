"""Load of the experts by hand: a router of four experts, of which a token takes two."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from bapo_megatron.policy.experts import PackLoad, PackRoutes, RouterChoice, UpdateTally
from bapo_megatron.tensor_types import MicroBatch

PROBABILITY_TE = torch.tensor(
    [[0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5], [0.5, 0.125, 0.25, 0.125], [0.7, 0.1, 0.1, 0.1]]
)
"""Of four tokens, the last one padding."""
ENTROPY = 1.75 * math.log(2)  # of each of the others
REAL_T = torch.tensor([1.0, 1, 1, 0], dtype=torch.float64)


class Model:
    """What a tally reads of the model's configuration."""

    num_layers = 2

    def __init__(self, experts: int | None = 4) -> None:
        self.num_moe_experts = experts


def tally_of(pack: MicroBatch, config: Any) -> UpdateTally | None:
    return UpdateTally.of([pack], 0, config, torch.device("cpu"))


@pytest.fixture
def tally() -> UpdateTally:
    found = tally_of(MicroBatch.of((0, 4)), Model())
    assert found is not None
    return found


def routed(choice: RouterChoice, pre_softmax: bool = False) -> torch.Tensor:
    """Which experts megatron's routing sends each token to."""
    logit_TE = PROBABILITY_TE.log().requires_grad_()
    _, chosen_TE = topk_routing_with_score_function(
        logit_TE, 2, use_pre_softmax=pre_softmax, router_replay=choice
    )
    return chosen_TE


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_tokens_and_entropies_by_hand(tally: UpdateTally, pre_softmax: bool) -> None:
    """In the second of two layers: experts 0 and 1, 2 and 3, 0 and 2; padding is not counted."""
    choice = RouterChoice(pre_softmax)
    choice.layer, choice.load = 2, PackLoad(REAL_T, tally.load_LC)
    routed(choice, pre_softmax)
    assert tally.load_LC[0].tolist() == [0.0] * 6
    assert tally.load_LC[1, :5].tolist() == [2, 1, 2, 1, 3]
    assert float(tally.load_LC[1, 5]) == pytest.approx(3 * ENTROPY, rel=1e-6)
    routed(choice, pre_softmax)
    assert tally.load_LC[1, 4] == 3, "a layer counts where it is told to, once"


def test_a_pass_without_gradients_counts_nothing(tally: UpdateTally) -> None:
    """Such as the first run of a layer that is recomputed."""
    choice = RouterChoice(False)
    choice.load = PackLoad(REAL_T, tally.load_LC)
    with torch.no_grad():
        routed(choice)
    assert not tally.sums.any()


@pytest.mark.parametrize("replays", [False, True])
def test_replayed_routes_are_the_load(tally: UpdateTally, replays: bool) -> None:
    """All three tokens to experts 2 and 3, the third one's route unknown; the entropy is the router's.

    The layer is the third of the model, the second of a chunk whose first sends its tokens elsewhere.
    """
    choice = RouterChoice(False)
    choice.layer, load_LC = 3, torch.zeros(3, 6, dtype=torch.float64)
    known_T = torch.tensor([True, True, False, True])
    expert_TLK = torch.tensor([[[0, 1], [2, 3]]] * 4, dtype=torch.uint8)
    choice.routes = PackRoutes(expert_TLK, known_T, known_T, 2, replays, tally.counts)
    choice.load = PackLoad(REAL_T, load_LC)
    chosen_TE = routed(choice)
    load = [1, 0, 3, 2] if replays else [2, 1, 2, 1]
    assert chosen_TE[:3].sum(0).tolist() == load
    assert load_LC[2, :5].tolist() == [*load, 3]
    assert float(load_LC[2, 5]) == pytest.approx(3 * ENTROPY, rel=1e-6)
    assert tally.counts.tolist() == [3, 2, 3, 2]  # the padding here has a route, which no pack's has


def test_a_dense_model_has_no_tally_and_a_vector_is_split() -> None:
    assert tally_of(MicroBatch.of((0, 4)), Model(None)) is None
    pack = MicroBatch.of((0, 4))
    without = tally_of(pack, Model())
    assert without is not None
    vector = torch.arange(2 + 7 + 12.0)
    loss, routes, load = without.split(vector)
    assert (loss.tolist(), routes, load.shape) == ([0, 1], None, (2, 6))
    assert load[0, 0] == 9
    without.counts.add_(1)
    without.totals.add_(2)
    without.load_LC[1, 5] = 3
    assert without.sums.tolist() == [2] * 3 + [1] * 4 + [0] * 11 + [3]
    with_routes = tally_of(replace(pack, route_TLK=torch.zeros(4, 2, 2, dtype=torch.uint8)), Model())
    assert with_routes is not None
    found = with_routes.split(vector)[1]
    assert found is not None
    assert found.tolist() == [2, 3, 4, 5, 6, 7, 8]
