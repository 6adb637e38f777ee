"""Old log-probs computed by the trainer: pi_old, the denominator of the ratio in all updates of a step.

The engine's log-probs differ a little from the trainer's, and those of stale tokens a lot. With
``algorithm.old_log_probs=trainer`` the ratio compares the trainer with itself, and a truncated importance
weight may correct for the policy that sampled.

Legend: ``_R`` tokens of a response, ``_N`` response tokens of all samples of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from bapo_megatron.algo.importance_sampling import truncated_importance
from bapo_megatron.data.packing import Sample, pack_samples
from bapo_megatron.interfaces import Policy


def with_old_log_probs(
    policy: Policy, groups: Sequence[Sequence[Sample]], pack_tokens: int, cap: float | None
) -> list[list[Sample]]:
    """The samples with log-probs under the present weights, and importance weights up to ``cap`` (None: no
    weights).

    One forward pass, in which each rank computes its own packs; the result is equal on every rank, since
    later updates shuffle the groups. Collective.
    """
    samples = [sample for group in groups for sample in group]
    if not samples:
        return []
    old = iter(_log_probs(policy, samples, pack_tokens))
    return [[_with_old(sample, next(old), cap) for sample in group] for group in groups]


def _log_probs(policy: Policy, samples: Sequence[Sample], pack_tokens: int) -> list[np.ndarray]:
    """The log-probs of each sample's response, float32 [R]."""
    packs = pack_samples(samples, pack_tokens, layout=policy.pack_layout)
    ends = np.cumsum([sample.response_tokens for sample in samples])
    found_N = torch.zeros(int(ends[-1]))
    for pack, stats in zip(packs, policy.log_probs(packs), strict=True):
        for index, start, positions in pack.rows:
            if positions:  # else no position predicts the response
                tokens, end = samples[index].response_tokens, start + positions
                found_N[ends[index] - tokens : ends[index]] = stats.log_prob_T[end - tokens : end]
    # One replica has a sample's log-probs, the others zeros: the sum is exact.
    return np.split(policy.sum_over_replicas(found_N).numpy(), ends[:-1])


def _with_old(sample: Sample, old_log_probs_R: np.ndarray, cap: float | None) -> Sample:
    importance_R = None if cap is None else truncated_importance(old_log_probs_R, sample.log_probs_R, cap)
    return replace(sample, old_log_probs_R=old_log_probs_R, importance_R=importance_R)
