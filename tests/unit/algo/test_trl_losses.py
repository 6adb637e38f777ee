"""Losses and rejection against what TRL says of fixed batches: tests/fixtures/trl and trl_sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.algo.bapo import BoundsConfig, fixed
from bapo_megatron.algo.corrections import is_off_policy
from bapo_megatron.algo.losses import LOSSES, build_loss
from bapo_megatron.algo.sequences import sequence_means, sums_by_sequence
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.types import MicroBatch, TokenStats

TOLD = json.loads((Path(__file__).parents[2] / "fixtures/trl/losses.json").read_text())
CLIP = AlgorithmConfig().loss
OURS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip": (CLIP, "token", {}),
    "cispo": ("cispo", "token", {}),
    "cispo_2": ("cispo", "token", {"ratio_high": 2.0}),
    "sapo": ("sapo", "sequence", {"temperature_negative": torch.tensor(1.05).item()}),
    "sapo_3_4": ("sapo", "sequence", {"temperature_positive": 3.0, "temperature_negative": 4.0}),
    "gspo": ("gspo", "sequence", {}),
    "vespo": ("vespo", "token", {}),
}
"""Our loss, the mean that TRL takes for it, and its settings (TRL holds SAPO's temperature in float32)."""


def pack(mean: str) -> tuple[TokenStats, MicroBatch]:
    """TRL's batch as one pack: the tokens of its responses, padding as masked tokens, in float64."""
    fields = {name: torch.tensor(values, dtype=torch.float64) for name, values in TOLD["batch"].items()}
    mask_BT = fields["mask"]
    lengths_B = mask_BT.sum(1, keepdim=True)
    mean_BT = mask_BT if mean == "token" else mask_BT * mask_BT.sum() / len(mask_BT) / lengths_B
    sequence_BT = torch.arange(len(mask_BT))[:, None].expand_as(mask_BT)
    batch = MicroBatch.of(
        (0, mask_BT.numel()),
        sequences=len(mask_BT),
        mask_T=mask_BT.flatten(),
        weight_T=mean_BT.flatten(),
        advantage_T=(fields["advantage"][:, None] * mask_BT).flatten(),
        old_log_prob_T=fields["old_log_prob"].flatten(),
        rollout_log_prob_T=fields["old_log_prob"].flatten(),
        sequence_T=torch.where(mask_BT != 0, sequence_BT, -1).flatten(),
    )
    log_prob_T = fields["log_prob"].flatten()
    return TokenStats(log_prob_T, torch.zeros_like(log_prob_T)), batch


@pytest.mark.parametrize("case", [case for case in TOLD["cases"] if OURS[case][0] in LOSSES])
def test_loss_and_gradient_are_trls(case: str) -> None:
    name, mean, settings = OURS[case]
    bounds = fixed(0.8, 1.28) if case == "clip" else BoundsConfig()
    loss = build_loss(AlgorithmConfig(loss=name, loss_settings=settings, bounds=bounds))
    stats, batch = pack(mean)
    found = loss.search.find(loss.search.measure(stats, batch)) if loss.search else None
    log_prob_T = stats.log_prob_T.requires_grad_()
    value = loss.terms(TokenStats(log_prob_T, stats.entropy_T), batch, found).loss / batch.mask_T.sum()
    value.backward()
    assert log_prob_T.grad is not None
    expected = TOLD["cases"][case]
    assert value.item() == pytest.approx(expected["loss"], rel=1e-12)
    gradient_T = torch.tensor(expected["gradient"], dtype=torch.float64).flatten()
    torch.testing.assert_close(log_prob_T.grad, gradient_T, rtol=1e-10, atol=1e-15)


def test_every_case_is_compared() -> None:
    """As soon as the loss has its name."""
    assert set(OURS) == set(TOLD["cases"])


FIXTURE = json.loads((Path(__file__).parents[2] / "fixtures/trl_sequences/losses.json").read_text())
INPUTS = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in FIXTURE["inputs"].items()}
RESPONSES, TOKENS = INPUTS["mask"].shape


def packed(mean: str, kept: list[bool]) -> tuple[TokenStats, MicroBatch]:
    """The responses that are kept, end to end, with the weights of a mean over tokens or responses."""
    mask = INPUTS["mask"] * torch.tensor(kept)[:, None]
    lengths = mask.sum(1, keepdim=True)
    weight = mask if mean == "token" else mask * lengths.sum() / sum(kept) / lengths.clamp(min=1)
    rows = torch.arange(RESPONSES)[:, None].expand(RESPONSES, TOKENS)
    columns: dict[str, Any] = {
        "mask_T": mask,
        "weight_T": weight,
        "advantage_T": INPUTS["advantages"][:, None].expand(RESPONSES, TOKENS),
        "old_log_prob_T": INPUTS["old"],
        "rollout_log_prob_T": INPUTS["old"],
        "sequence_T": torch.where(mask != 0, rows, -1),
    }
    flat = {name: column.flatten() for name, column in columns.items()}
    batch = MicroBatch.of((0, RESPONSES * TOKENS), sequences=RESPONSES, **flat)
    return TokenStats(INPUTS["log_prob"].flatten(), torch.zeros(RESPONSES * TOKENS)), batch


def off_policy(delta: float) -> list[bool]:
    stats, batch = packed("token", [True] * RESPONSES)
    means = sequence_means(sums_by_sequence(batch.rollout_log_prob_T - stats.log_prob_T, batch)).tolist()
    advantages = INPUTS["advantages"].tolist()
    return [is_off_policy(*pair, delta) for pair in zip(advantages, means, strict=True)]


@pytest.mark.parametrize(
    ("case", "name", "mean"),
    [("gspo", "gspo", "sequence"), ("vespo", "vespo", "token"), ("vespo_masked", "vespo", "token")],
)
def test_losses_and_gradients_are_those_of_trl(case: str, name: str, mean: str) -> None:
    """TRL keeps a masked response in its count of tokens, here it leaves it."""
    expected: dict[str, Any] = FIXTURE["outputs"][case]
    kept = [not out for out in off_policy(0.02)] if case == "vespo_masked" else [True] * RESPONSES
    stats, batch = packed(mean, kept)
    loss = build_loss(AlgorithmConfig(loss=name))
    assert loss.search is not None
    found = loss.search.find(loss.search.measure(stats, batch))
    log_prob_T = stats.log_prob_T.clone().requires_grad_()
    terms = loss.terms(TokenStats(log_prob_T, stats.entropy_T), batch, found)
    ours = terms.loss / batch.mask_T.sum() * (batch.mask_T.sum() / INPUTS["mask"].sum())
    ours.backward()
    assert log_prob_T.grad is not None
    assert ours.item() == pytest.approx(expected["loss"], rel=1e-9)
    theirs_T = torch.tensor(expected["gradient"], dtype=torch.float64).flatten()
    torch.testing.assert_close(log_prob_T.grad, theirs_T, rtol=1e-9, atol=1e-12)


def test_the_mask_rejects_what_trls_does() -> None:
    """One response of the eight: TRL's gradient is zero there, and only there."""
    masked = torch.tensor(FIXTURE["outputs"]["vespo_masked"]["gradient"]).abs().sum(1) == 0
    assert masked.tolist() == off_policy(0.02)
    assert sum(off_policy(0.02)) == 1
