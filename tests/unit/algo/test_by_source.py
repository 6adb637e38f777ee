"""Metrics of an update by the source of its prompts, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.algo.losses.clip import ClipLoss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.types import Metrics, MicroBatch, TokenStats

LN = math.log
NAMES = ("sums", "words")

# Sequences 0 and 2 are of `sums`, 1 of `words`, 3 of no source; the last token does not count.
PACK = dataclasses.replace(
    MicroBatch.of(
        (0, 6),
        sequences=4,
        mask_T=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
        weight_T=torch.tensor([1.0, 1.0, 2.0, 0.5, 1.0, 0.0]),
        advantage_T=torch.tensor([2.0, -1.0, 3.0, -4.0, 1.0, 9.0]),
        sequence_T=torch.tensor([0, 0, 2, 1, 3, -1]),
    ),
    sources=(0, 1, 0, -1),
)
STATS = TokenStats(
    torch.tensor([LN(2.0), LN(0.5), 0.0, LN(1.1), 0.0, 50.0]), torch.tensor([0.3, 0.5, 0.4, 0.7, 0.1, 99.0])
)


def measured(packs: list[MicroBatch], stats: list[TokenStats], names: tuple[str, ...] = NAMES) -> Metrics:
    objective = Objective(ClipLoss(AlgorithmConfig(bounds=grpo())), names)
    found = objective.loss.search.known
    vector = sum(objective.token_fn(found, 0)(one, pack) for one, pack in zip(stats, packs, strict=True))
    return objective.metrics(vector, found)


def test_by_hand() -> None:
    """Bounds 0.8 and 1.2: of `sums` the first token (A = 2, r = 2) and the second (A = -1, r = 1/2) are
    clipped, the third (A = 3, r = 1, weight 2) has mass 6. `words`: A = -4, r = 1.1, weight 1/2: mass 2.2.
    The token without a source has mass 1: 9.2 in all. Without bounds `sums` has 4 + 6 positive and 0.5."""
    metrics = measured([PACK], [STATS])
    expected = {
        "source/sums/policy/tokens": 3.0,
        "source/sums/policy/entropy": 0.4,
        "source/sums/token_share": 3 / 5,
        "source/sums/gradient_share": 6 / 9.2,
        "source/sums/bapo/contribution": 1.0,
        "source/sums/bapo/contribution_unclipped": 10 / 10.5,
        "source/sums/bapo/clip_fraction_high": 1 / 3,
        "source/sums/bapo/clip_fraction_low": 1 / 3,
        "source/sums/bapo/positive_token_fraction": 2 / 3,
        "source/words/policy/tokens": 1.0,
        "source/words/policy/entropy": 0.7,
        "source/words/token_share": 1 / 5,
        "source/words/gradient_share": 2.2 / 9.2,
        "source/words/bapo/contribution": 0.0,
        "source/words/bapo/contribution_unclipped": 0.0,
        "source/words/bapo/clip_fraction_high": 0.0,
        "source/words/bapo/clip_fraction_low": 0.0,
        "source/words/bapo/positive_token_fraction": 0.0,
    }
    found = {name: value for name, value in metrics.items() if name.startswith("source/")}
    assert found == pytest.approx(expected, abs=1e-6)


def test_with_one_source_they_are_those_of_all_tokens() -> None:
    """By default the contribution is the reading gradient, absolute, uniform."""
    metrics = measured([dataclasses.replace(PACK, sources=(0, 0, 0, 0))], [STATS], ("all",))
    for name in ("policy/entropy", "policy/tokens", "bapo/contribution", "bapo/clip_fraction_high"):
        assert metrics[f"source/all/{name}"] == pytest.approx(metrics[name]), name
    for name in ("bapo/clip_fraction_low", "bapo/positive_token_fraction"):
        assert metrics[f"source/all/{name}"] == pytest.approx(metrics[name]), name
    assert metrics["source/all/token_share"] == metrics["source/all/gradient_share"] == 1.0


def test_they_add_up_over_the_parts_of_a_pack() -> None:
    parts = [slice(0, 2), slice(2, 6)]
    packs = [PACK.take(part) for part in parts]
    stats = [TokenStats(*(field_T[part] for field_T in STATS)) for part in parts]
    assert measured(packs, stats) == pytest.approx(measured([PACK], [STATS]))


def test_a_source_without_tokens_has_shares_of_nothing() -> None:
    metrics = measured([PACK], [STATS], (*NAMES, "absent"))
    assert metrics["source/absent/policy/tokens"] == 0.0
    assert metrics["source/absent/policy/entropy"] is None
    assert metrics["source/absent/bapo/contribution"] is None
    assert metrics["source/absent/token_share"] == 0.0


def test_a_run_of_one_file_measures_nothing_by_source() -> None:
    objective = Objective(ClipLoss(AlgorithmConfig(bounds=grpo())))
    assert not [name for name in objective.metric_names() if name.startswith("source/")]
