"""Replayed routes: one answer at every layout and recomputation, which is transformers' with these routes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.config import AlgorithmConfig, BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.trainer.checks import check_route_mismatch, route_metrics
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import Metrics
from tests.distributed.test_layouts import BOUNDS, Answer, answers, check_agreement
from tests.support.models import EXPERTS, random_samples, save_tiny_model, tiny_model
from tests.support.routed_engine import known_rows
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

LAYERS, PER_TOKEN, COUNT = 4, 2, 8
LAYOUTS = [
    *("dp2-ep2 selective", "dp4-ep2 shuffled", "cp2-ep2 full", "dp2-tp2-sp-ep2-etp2 full", "pp2-cp2-ep2"),
    "tp2-sp-pp2-vpp2-ep2 selective",
]
QUICK = ("dp2-ep2 selective", "tp2-sp-pp2-vpp2-ep2 selective", "cp2-ep2 full")


def with_random_routes(samples: list[Sample]) -> list[Sample]:
    """Routes that no router would choose; a quarter of them unknown, and all of one sample."""
    generator = np.random.default_rng(5)
    found = []
    for index, sample in enumerate(samples):
        count = sample.response_tokens
        routes = np.argsort(generator.random((count, LAYERS, COUNT)), -1)[..., :PER_TOKEN].astype(np.uint8)
        routes[generator.random(count) < 0.25] = 255
        found.append(sample if index == 3 else replace(sample, routes_R=routes))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(EXPERTS, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return with_random_routes(random_samples(12, seed=3))


@pytest.fixture(scope="module")
def reference(folder: Path, samples: list[Sample]) -> Answer:
    [found] = answers("one", folder, samples)
    return found


def forced_log_probs(sample: Sample) -> torch.Tensor:
    """Those of a transformers model that is forced to the sample's routes, where they are known."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as plain

    routes = np.full((sample.positions, LAYERS, PER_TOKEN), 255, np.uint8)
    if sample.routes_R is not None:
        tail = sample.routes_R[-sample.positions :]
        routes[len(routes) - len(tail) :] = tail
    known = torch.from_numpy(known_rows(routes))
    own = plain.Qwen3MoeTopKRouter.forward

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        logits, _, chosen = own(self, hidden)
        given = torch.from_numpy(routes[:, self.layer].astype(np.int64))
        chosen = torch.where(known[:, None], given, chosen)
        share = logits.float().softmax(-1).gather(1, chosen)
        return logits, share / share.sum(-1, keepdim=True), chosen

    model = tiny_model(EXPERTS)
    for number, layer in enumerate(model.model.layers):  # type: ignore[arg-type, union-attr]
        layer.mlp.gate.layer = number
    plain.Qwen3MoeTopKRouter.forward = forward
    try:
        ids = torch.tensor(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0] / 0.7
        return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    finally:
        plain.Qwen3MoeTopKRouter.forward = own


def test_log_probs_are_those_of_transformers_with_the_same_routes(
    samples: list[Sample], reference: Answer
) -> None:
    moved = 0.0
    for index, sample in enumerate(samples):
        theirs = forced_log_probs(sample)
        torch.testing.assert_close(reference.log_probs[index], theirs, rtol=0, atol=1e-5)
        free = forced_log_probs(replace(sample, routes_R=None))
        moved = max(moved, float((theirs - free).abs().max()))
    assert moved > 0.5


@pytest.mark.parametrize("text", slow_but(LAYOUTS, *QUICK))
def test_layout_agrees_with_one_process(
    text: str, folder: Path, samples: list[Sample], reference: Answer
) -> None:
    """With the counts of known, unknown and differing tokens: once an update, however often a layer runs."""
    check_agreement(answers(text, folder, samples), reference, samples)


def test_known_and_unknown_tokens_are_counted(samples: list[Sample], reference: Answer) -> None:
    predicted = sum(int(sample.predicted_R.sum()) for sample in samples)
    known = sum(
        int((known_rows(one.routes_R) & one.predicted_R).sum()) for one in samples if one.routes_R is not None
    )
    positions = sum(sample.positions for sample in samples)
    for number, sums in enumerate(reference.routes):
        same = LAYERS * known if number == 0 else 0  # the samples are of version 0
        assert sums[:4] == [predicted, known, positions - known, LAYERS * known]
        assert sums[5] == same
        assert (sums[6] == sums[4]) == (number == 0)
        assert 0.8 < sums[4] / sums[3] < 1.0  # one random pair in 28 is the router's


def to_the_first_two(samples: list[Sample]) -> list[Sample]:
    """Every position by experts 0 and 1: all but the first rank of EP have no token."""
    return [
        replace(one, routes_R=np.tile(np.array([0, 1], np.uint8), (one.positions, LAYERS, 1)))
        for one in samples
    ]


@pytest.mark.parametrize("text", slow_but(["dp4-ep4", "tp2-sp-ep2 selective"], "dp4-ep4"))
def test_ranks_without_a_token_take_part(text: str, folder: Path, samples: list[Sample]) -> None:
    """In the messages, and with gradients of zero; a layer that left them out would hang."""
    crowded = to_the_first_two(samples)
    [alone] = answers("one", folder, crowded)
    [used] = {tuple((load > 0).nonzero()[:, 0].tolist()) for load in alone.experts[0][:, :COUNT]}
    assert used == (0, 1)
    check_agreement(answers(text, folder, crowded), alone, crowded)


# --- mistakes that are seen ---


def own_routes(sample: Sample) -> Sample:
    """The sample with the routes of transformers' routers, as an engine at the same weights returns them."""
    ids = torch.tensor(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        found = tiny_model(EXPERTS)(ids[None, :-1], output_router_logits=True).router_logits
    routes = torch.stack([one.topk(PER_TOKEN, -1).indices for one in found], 1).numpy().astype(np.uint8)
    routes_R = np.full((sample.response_tokens, LAYERS, PER_TOKEN), 255, np.uint8)
    count = min(sample.positions, sample.response_tokens)
    if count:
        routes_R[-count:] = routes[-count:]
    return replace(sample, routes_R=routes_R)


def rolled(samples: list[Sample], axis: int) -> list[Sample]:
    return [replace(one, routes_R=np.roll(one.routes_R, 1, axis)) for one in samples]  # type: ignore[arg-type]


def of_others(samples: list[Sample]) -> list[Sample]:
    """Each response with the routes of the next: cut, or repeated to its length."""
    found = []
    for one, other in zip(samples, [*samples[1:], samples[0]], strict=True):
        rows = np.resize(np.arange(other.response_tokens), one.response_tokens)
        assert other.routes_R is not None
        found.append(replace(one, routes_R=other.routes_R[rows]))
    return found


WAYS: dict[str, Callable[[list[Sample]], list[Sample]]] = {
    "right": lambda samples: samples,
    "measured": lambda samples: [replace(one, replays_routes=False) for one in samples],
    "shifted by a token": lambda samples: rolled(samples, 0),
    "of another layer": lambda samples: rolled(samples, 1),
    "of another sample": of_others,
}


def metrics_of(folder: Path, samples: list[Sample]) -> dict[str, tuple[Metrics, list[float]]]:
    """The metrics, and the gradient norms without and with held forward passes, of each way."""
    found = {}
    for name, change in WAYS.items():
        norms = []
        for hold in (False, True):
            batch = BatchConfig(pack_tokens=96, hold_forwards=hold, recompute="selective")
            policy = MegatronPolicy(
                ModelConfig(folder, "float32"), ParallelConfig(), batch, OptimizerConfig(lr=1e-9), 1, 0.7
            )
            packs = pack_samples(change(samples), 96, "token", policy.pack_layout)
            clipping = UpdateLoss(AlgorithmConfig(bounds=BOUNDS), hold)
            result = policy.update(packs, clipping.loss(policy, packs, on_policy=False))
            norms.append(result.grad_norm)
        found[name] = route_metrics(result.routes), norms
    return found


class Said:
    """A recorder of one kind of event."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def warning(self, _kind: str, _step: int, message: str) -> None:
        self.messages.append(message)


def test_routes_of_other_tokens_samples_or_layers_are_seen(folder: Path) -> None:
    routed = [own_routes(sample) for sample in random_samples(12, seed=3)]
    [found] = run_layout(metrics_of, ParallelConfig(), folder, routed)
    for name, (metrics, norms) in found.items():
        said = Said()
        check_route_mismatch(AlgorithmConfig(), 1, [metrics], said)  # type: ignore[arg-type]
        is_right = name in ("right", "measured")
        assert bool(said.messages) == (not is_right), name
        assert (metrics["routes/engine_mismatch"] == 0.0) == is_right, name
        assert norms[0] == pytest.approx(norms[1], rel=1e-6), name
        assert (norms[0] == pytest.approx(found["right"][1][0], rel=1e-6)) == is_right, name
        if not is_right:
            assert "send" in said.messages[0]
            assert "above algorithm.route_mismatch_limit=0.3" in said.messages[0]
