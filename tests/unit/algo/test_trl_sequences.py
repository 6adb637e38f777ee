"""GSPO, VESPO and the off-policy sequence mask against TRL's numbers (``tests/fixtures/trl_sequences``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.algo.corrections import is_off_policy
from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.sequences import sequence_means, sums_by_sequence
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.types import MicroBatch, TokenStats

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
