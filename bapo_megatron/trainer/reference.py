"""Frozen reference policy of a run: log-probs in each step, KL penalty in rewards.

    start      ``open_run`` loads ``algorithm.reference_kl.model`` into host memory
    each step  before the first update: one forward-only pass; log pi_ref becomes a column of the samples
    reward     with ``place=reward``: new advantages, from R - beta sum_t k_t instead of R

With ``algorithm.reference_kl.coefficient`` above 0, every rank calls ``with_reference`` in each step.
``place=loss`` uses the column in the loss. Formulas, with the estimator k_t: ``algo/reference_kl.py``.
Checkpoints do not contain the reference: a resumed run loads it again.
``check_teacher_log_probs`` is for distillation, whose teacher is the other frozen model: it raises RunStopped
if a rollout lacks the teacher's log-probs. Shapes: ``_R`` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from bapo_megatron.algo.advantages import Advantage, BranchReward, Rewards, branch_advantages
from bapo_megatron.algo.reference_kl import response_penalty
from bapo_megatron.algo.reference_kl_config import ReferenceKlConfig
from bapo_megatron.data.samples import Sample, TrainingSample
from bapo_megatron.errors import RunStopped
from bapo_megatron.interfaces import Policy
from bapo_megatron.step_header import GroupHeader
from bapo_megatron.trainer.corrections import measured_once, response_log_probs
from bapo_megatron.types import StepHeader

FIELD = "algorithm.reference_kl.model"
"""Field of the reference folder."""


def with_reference(
    policy: Policy,
    groups: Sequence[Sequence[TrainingSample]],
    header: StepHeader,
    config: ReferenceKlConfig,
    pack_tokens: int,
    advantage: Advantage,
    branch_reward: BranchReward = "whole",
) -> list[list[TrainingSample]]:
    """Return the samples of a step with log pi_ref and, with the penalty in the reward, new advantages.

    ``groups``: samples of the step of ``header``, by group, with pi_old. ``advantage`` computes advantages
    from the penalized rewards; ``branch_reward``: how an episode's branches share them. One forward pass.
    Equal on every rank. Collective. Raises FloatingPointError, on every rank, for non-finite log-probs.
    """
    samples = [sample for group in groups for sample in group]
    # Without routes: the reference is a separate policy, which chooses its own experts.
    own = [sample.without_routes() for sample in samples]
    columns = response_log_probs(policy, own, pack_tokens, policy.reference_log_probs, "the reference")
    changes = (partial(_with_column, column_R=column_R) for column_R in columns)
    referred = [[item.changed(next(changes)) for item in group] for group in groups]
    if not config.in_reward:
        return referred
    samples = [sample for group in referred for sample in group]
    penalties = measured_once(policy, samples, lambda item: (_penalty(item.loaded(), config),), 1)
    rewards = Rewards.of_step(header.groups)
    rewards = replace(rewards, reward_N=rewards.reward_N - _by_episode(penalties, header.groups))
    values = iter(branch_advantages(header.groups, advantage(rewards), branch_reward))
    return [[item.with_advantage(next(values)) for item in group] for group in referred]


def check_teacher_log_probs(step: int, header: StepHeader) -> None:
    """Raise RunStopped, on every rank, if a response of ``step`` lacks the teacher's log-probs."""
    if not all(response.has_teacher_log_probs for group in header.groups for response in group.responses):
        raise RunStopped(
            f"step {step}: rollouts without log-probs of the teacher, of a run without distillation: "
            f"train on them with --algorithm.distillation.coefficient 0, or fork the run at step {step - 1} "
            "(--fork), which samples anew"
        )


def _with_column(sample: Sample, column_R: np.ndarray) -> Sample:
    return replace(sample, reference_log_probs_R=column_R)


def _by_episode(penalties: Sequence[Sequence[float]], groups: Sequence[GroupHeader]) -> np.ndarray:
    values = iter(penalties)
    return np.array([sum(next(values)[0] for _ in rows) for group in groups for rows in group.episodes])


def _penalty(sample: Sample, config: ReferenceKlConfig) -> float:
    """Return a response's penalty at the loss's pi_old: the trainer's or the sampling engine's. With the
    engine's pi_old, every term includes the difference between engine and trainer at equal weights."""
    old_R = sample.log_probs_R if sample.old_log_probs_R is None else sample.old_log_probs_R
    assert sample.reference_log_probs_R is not None
    pair = (old_R, sample.reference_log_probs_R)
    old_N, reference_N = (torch.from_numpy(one_R[sample.predicted_R]) for one_R in pair)
    return response_penalty(old_N, reference_N, config)
