"""Groups to samples, samples to balanced ``thd`` packs. The shift to predicting positions happens here, once.

A sample of n tokens has n - 1 predicting positions: position i holds token i as input and token i + 1 as
label, with everything that is known about that label. All ranks compute the same plan from the same
samples and each builds its own packs, so nothing is communicated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.algo.advantages import group_advantages
from bapo_megatron.types import Group, MicroBatch, PackLayout

# Padding is cut into documents of at most this many tokens, so that attention over it stays cheap.
_PADDING_DOCUMENT = 512


@dataclass(frozen=True)
class Sample:
    """One sequence to train on: a prompt and a response with its advantage."""

    token_ids: np.ndarray
    """int32, prompt and response."""
    log_probs_R: np.ndarray
    """float32, of the response under the policy that sampled it."""
    versions_R: np.ndarray
    """int32, policy version that sampled each response token."""
    advantage: float

    @property
    def response_tokens(self) -> int:
        """Tokens that the loss sees."""
        return len(self.log_probs_R)

    @property
    def positions(self) -> int:
        """Predicting positions, what the sample takes in a pack."""
        return len(self.token_ids) - 1


def samples_of(groups: Sequence[Group], advantage: Literal["grpo", "dr_grpo"]) -> list[Sample]:
    """Every rollout of ``groups`` as a sample, with advantages normalized within its group."""
    samples = []
    for group in groups:
        advantages = group_advantages([rollout.reward for rollout in group.rollouts], advantage)
        for rollout, value in zip(group.rollouts, advantages, strict=True):
            tokens = np.concatenate([group.prompt.token_ids_P, rollout.token_ids_R])
            samples.append(Sample(tokens, rollout.log_probs_R, rollout.versions_R, float(value)))
    return samples


def split_into_updates(groups: Sequence[Group], updates: int, seed: Sequence[int]) -> list[list[Group]]:
    """Groups in random order, spread over at most ``updates`` updates as evenly as they go.

    Whole groups stay together: within one, advantages sum to zero, so every update sees both signs.
    """
    order = np.random.default_rng(list(seed)).permutation(len(groups))
    parts = np.array_split(order, min(updates, len(groups))) if len(groups) else []
    return [[groups[i] for i in part] for part in parts]


def plan_packs(lengths: Sequence[int], capacity: int, multiple: int) -> list[list[int]]:
    """Indices of samples for each pack: longest first, each to the emptiest pack.

    As few packs as hold everything, in a multiple of ``multiple``, so that every replica has the same
    number; packs stay empty when there are fewer samples than packs. ValueError if a sample is longer than
    ``capacity``.
    """
    if any(length > capacity for length in lengths):
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit into packs of {capacity}")
    count = multiple * max(1, -(-sum(lengths) // (capacity * multiple)))
    while True:
        packs = _spread(lengths, count)
        if all(sum(lengths[i] for i in pack) <= capacity for pack in packs):
            return packs
        count += multiple


def _spread(lengths: Sequence[int], count: int) -> list[list[int]]:
    packs: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        filled, number = heapq.heappop(heap)
        packs[number].append(index)
        heapq.heappush(heap, (filled + lengths[index], number))
    return packs


def pack_samples(
    samples: Sequence[Sample], pack_tokens: int, loss_mean: str = "token", layout: PackLayout | None = None
) -> list[MicroBatch]:
    """This rank's micro-batches of one update, all of the same length on all ranks."""
    layout = layout or PackLayout()
    lengths = [
        -(-sample.positions // layout.document_multiple) * layout.document_multiple for sample in samples
    ]
    packs = plan_packs(lengths, pack_tokens, layout.data_size * layout.count_multiple)
    fullest = max(sum(lengths[i] for i in pack) for pack in packs)
    length = max(1, -(-fullest // layout.length_multiple)) * layout.length_multiple
    weights = _loss_weights(samples, loss_mean)
    mine = packs[layout.data_rank :: layout.data_size]
    return [_build(samples, weights, pack, length, layout.document_multiple) for pack in mine]


def _loss_weights(samples: Sequence[Sample], loss_mean: str) -> list[float]:
    """Weight of each sample's tokens. The sum is divided by the count of tokens, whatever the mean.

    A mean over sequences of means over tokens is, with N sequences of n_i tokens,
    sum_i (1 / N) sum_t l_it / n_i = (1 / sum_j n_j) sum_i sum_t l_it * (sum_j n_j / N) / n_i.
    """
    if loss_mean == "token":
        return [1.0] * len(samples)
    mean_tokens = sum(sample.response_tokens for sample in samples) / max(1, len(samples))
    return [mean_tokens / max(1, sample.response_tokens) for sample in samples]


def _build(
    samples: Sequence[Sample], weights: Sequence[float], pack: Sequence[int], length: int, multiple: int
) -> MicroBatch:
    columns = {name: torch.zeros(length, dtype=dtype) for name, dtype in _FIELDS.items()}
    bounds, rows = [0], []
    for index in pack:
        sample, start = samples[index], bounds[-1]
        end = start + sample.positions
        _fill(columns, sample, weights[index], start, end)
        bounds.append(start + -(-sample.positions // multiple) * multiple)
        rows.append((index, start, sample.positions))
    while bounds[-1] < length:
        bounds.append(min(length, bounds[-1] + -(-_PADDING_DOCUMENT // multiple) * multiple))
    return MicroBatch(
        **columns,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max(end - start for start, end in pairwise(bounds)),
        rows=tuple(rows),
    )


_FIELDS = {
    "token_T": torch.int64,
    "label_T": torch.int64,
    "position_T": torch.int64,
    "mask_T": torch.float32,
    "weight_T": torch.float32,
    "advantage_T": torch.float32,
    "rollout_log_prob_T": torch.float32,
    "version_T": torch.int32,
}


def _fill(columns: dict[str, Tensor], sample: Sample, weight: float, start: int, end: int) -> None:
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    columns["token_T"][start:end] = tokens[:-1]
    columns["label_T"][start:end] = tokens[1:]
    columns["position_T"][start:end] = torch.arange(end - start)
    answer = slice(end - sample.response_tokens, end)  # the positions that predict the response
    columns["mask_T"][answer] = 1.0
    columns["weight_T"][answer] = weight
    columns["advantage_T"][answer] = sample.advantage
    columns["rollout_log_prob_T"][answer] = torch.from_numpy(sample.log_probs_R)
    columns["version_T"][answer] = torch.from_numpy(sample.versions_R)
