"""Tokens that environments gave count nowhere: updates against a reference that masks by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bapo_megatron.algo.advantages import Rewards, grpo
from bapo_megatron.algo.bapo import BoundsConfig, balanced, eq8_literal, published_code
from bapo_megatron.algo.losses import LOSSES, build_loss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.rollout.sampler.response import Answer, Response, continued, given
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.types import Group, PackLayout, Prompt, ResponseTokens, Rollout
from tests.support import literal_bapo as literal
from tests.support.batches import in_memory, samples_of

LAYOUTS = [
    PackLayout(),
    PackLayout(length_multiple=8, document_multiple=4),
    PackLayout(length_multiple=2, fixed_length=True, count_multiple=2),
]


def episode(random: np.random.Generator, reward: float) -> tuple[Rollout, list[bool]]:
    """A response of one to four turns, and by hand whether each of its tokens was sampled."""
    response, hand, turns = Response(), [], int(random.integers(1, 5))
    for turn in range(turns):
        count = int(random.integers(1, 9))
        ids, versions = random.integers(1, 99, count), random.integers(0, 4, count)
        log_probs = -random.exponential(1.0, count) - 0.05
        columns = (ids.astype(np.int32), log_probs.astype(np.float32), versions.astype(np.int32))
        response = continued(response, ResponseTokens(*columns), "turn")
        hand += [True] * count
        if turn == turns - 1:
            break
        seen = random.integers(1, 99, int(random.integers(1, 12))).astype(np.int32)
        response = given(response, Answer(seen, "seen"))
        hand += [False] * len(seen)
    response = given(response, Answer(np.zeros(0, np.int32), finish_reason="stop"))
    return response.rollouts(reward)[0], hand


def _samples(group: Group) -> list[Sample]:
    [stored] = samples_of(in_memory(group), grpo)
    return [one.loaded() for one in stored]


class Update:
    """Three groups of four episodes; the policy has drifted from what sampled them."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.samples: list[Sample] = []
        self.log_probs: list[np.ndarray] = []
        """The policy's, of all tokens of each response; rubbish where they were given."""
        self.tokens: list[list[literal.Token]] = []
        """The sampled tokens of each response, for the reference."""
        for number in range(3):
            rewards = random.permutation([0.0, 0.0, 1.0, float(random.integers(0, 2))]).tolist()
            made = [episode(random, reward) for reward in rewards]
            prompt = Prompt(number, random.integers(1, 99, 5).astype(np.int32), "", "")
            self.samples += _samples(Group(prompt, tuple(one for one, _ in made)))
            for (rollout, hand), advantage in zip(made, grpo(Rewards.of(rewards)), strict=True):
                drift = random.normal(0, 0.3, len(hand))
                log_probs = np.where(hand, np.minimum(rollout.log_probs_R + drift, -1e-3), 1e6)
                self.log_probs.append(log_probs.astype(np.float32))
                columns = zip(hand, self.log_probs[-1].tolist(), rollout.log_probs_R.tolist(), strict=True)
                ours = [(now, then) for sampled, now, then in columns if sampled]
                value = float(np.float32(advantage))
                self.tokens.append([literal.Token(now - then, value, then, 1.0) for now, then in ours])

    def stats(self, pack: MicroBatch) -> TokenStats:
        """What the policy says of a pack; the entropy of a token is its log-prob's magnitude."""
        found_T = torch.zeros_like(pack.mask_T)
        for index, start, positions in pack.rows:
            own = torch.from_numpy(self.log_probs[index])
            found_T[start + positions - len(own) : start + positions] = own
        return TokenStats(found_T, found_T.abs())

    def vector(
        self, config: AlgorithmConfig, layout: PackLayout, samples: Sequence[Sample] | None = None
    ) -> tuple[torch.Tensor, object]:
        """The sums of the update, over all of its packs, and what its search found."""
        loss = build_loss(config)
        packs = pack_samples(samples or self.samples, 64, config.loss_mean, layout)
        found, search = None, loss.search
        if search is not None:
            sums = [search.measure(self.stats(pack), pack) for pack in packs]
            found = search.known or search.find(torch.stack(sums).sum(0))
        token_fn = Objective(loss).token_fn(found, 5)
        return torch.stack([token_fn(self.stats(pack), pack) for pack in packs]).sum(0), found


def with_rubbish(sample: Sample, random: np.random.Generator) -> Sample:
    """The same with other log-probs and versions where the tokens were given."""
    others = ~sample.trained_R
    return dataclasses.replace(
        sample,
        log_probs_R=np.where(others, np.float32(-7e5), sample.log_probs_R),
        versions_R=np.where(others, random.integers(-9, 99, len(others)), sample.versions_R).astype(np.int32),
    )


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_what_a_given_token_has_in_its_columns_changes_nothing(name: str, loss_mean: str) -> None:
    random = np.random.default_rng(0)
    config = AlgorithmConfig(loss=name, loss_mean=loss_mean)  # type: ignore[arg-type]
    for seed, layout in enumerate(LAYOUTS):
        update = Update(seed)
        assert any((~sample.trained_R).any() for sample in update.samples)
        ours, _ = update.vector(config, layout)
        rubbish = [with_rubbish(sample, random) for sample in update.samples]
        theirs, _ = update.vector(config, layout, rubbish)
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()


@pytest.mark.parametrize("preset", [balanced, eq8_literal, published_code])
@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_bounds_and_loss_are_those_of_the_sampled_tokens(preset: object, loss_mean: str) -> None:
    bounds: BoundsConfig = preset()  # type: ignore[operator]
    config = AlgorithmConfig(bounds=bounds, loss_mean=loss_mean)  # type: ignore[arg-type]
    for seed in range(6):
        update = Update(seed)
        counts = [len(one) for one in update.tokens]
        mean = sum(counts) / len(counts)
        weights = [1.0 if loss_mean == "token" else mean / count for count in counts for _ in range(count)]
        flat = [token for one in update.tokens for token in one]
        weighted = [one._replace(mask=weight) for one, weight in zip(flat, weights, strict=True)]
        expected = literal.search_tokens(weighted, bounds)
        losses = [literal.token_loss(one, expected.low, expected.high, bounds.dual_clip) for one in weighted]
        for layout in LAYOUTS:
            sums, found = update.vector(config, layout)
            ours = getattr(found, "bounds", found)
            assert (ours.low, ours.high) == pytest.approx((expected.low, expected.high))  # type: ignore[attr-defined]
            assert float(sums[0]) == pytest.approx(sum(losses), rel=1e-5, abs=1e-5)
            assert float(sums[1]) == len(flat)
