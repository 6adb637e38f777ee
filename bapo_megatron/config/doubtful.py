"""Warnings about settings of a run that have no effect or are probably mistakes: ``setting_warnings``.

A training run prints them at each start, each a line with the fix. They are not errors, because a run that
began with such a setting must be able to continue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bapo_megatron.algo.bounds import sum_count
from bapo_megatron.algo.parts import CENTERED_ADVANTAGES
from bapo_megatron.config.sections import AlgorithmConfig, DataConfig, RewardConfig
from bapo_megatron.config.validation import REWARD_FUNCTIONS

if TYPE_CHECKING:
    from bapo_megatron.config import RunConfig


def setting_warnings(run: RunConfig) -> Iterator[str]:
    """Yield warnings about the settings of a run, one line each."""
    yield from _of_algorithm(run)
    yield from _of_rewards(run.reward, run.reward_functions)
    yield from _of_learning_rate(run)
    data = run.data
    for name in ("min_difficulty", "max_difficulty"):
        value = getattr(data, name)
        if data.difficulty is None and value != getattr(DataConfig, name):
            yield (
                f"data.{name}={value:g} leaves nothing out without data.difficulty: say there where in "
                "extra_info a problem's difficulty is"
            )


def _of_algorithm(run: RunConfig) -> Iterator[str]:
    algorithm, reference = run.algorithm, run.algorithm.reference_kl
    yield from _balanced_by_mean(algorithm)
    if reference.in_loss and reference.estimator == "k1" and not reference.unbiased:
        yield (
            "algorithm.reference_kl.estimator=k1 in the loss has a gradient that does not depend on the "
            "reference, so it holds the policy to nothing: take k2 or k3, or place=reward"
        )
    if algorithm.advantage == "reinforce_plus_plus" and run.rollout.drop_uniform_groups:
        yield (
            "rollout.drop_uniform_groups drops groups of equal rewards, which have advantages with "
            "algorithm.advantage=reinforce_plus_plus: switch it off (--rollout.no-drop-uniform-groups)"
        )


def searches_groups_advantages(algorithm: AlgorithmConfig) -> bool:
    """Return whether clipping bounds are searched, and the share at ratios of 1 depends on the groups'
    advantages alone: not if training changes these advantages or leaves out responses."""
    bounds = algorithm.bounds
    changed = algorithm.polarity.enabled or algorithm.reference_kl.in_reward or algorithm.corrections.rejects
    changed = changed or bool(algorithm.masks) or algorithm.advantage not in CENTERED_ADVANTAGES
    is_theirs = (bounds.share, bounds.weight) == ("absolute", "uniform")
    return algorithm.loss == "clip" and sum_count(bounds) > 2 and is_theirs and not changed


def _balanced_by_mean(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield a warning if the mean over sequences leaves a search of clipping bounds nothing to balance: in a
    group advantages sum to 0, so responses of equal weight give both signs half of the gradient."""
    bounds = algorithm.bounds
    is_half = searches_groups_advantages(algorithm) and algorithm.loss_mean == "sequence"
    if is_half and bounds.target <= 0.5:
        parts = ", and those of its parts move by which responses they see"
        yield (
            f"algorithm.loss_mean=sequence gives positive tokens half of the gradient at ratios of 1, and "
            f"algorithm.bounds.target={bounds.target:g} is no more: a search over an update has nothing to "
            f"balance{parts * (bounds.scope == 'micro_batch')} (docs/algorithm.md#which-preset); set "
            "loss_mean=token, or fixed bounds"
        )


def _of_rewards(reward: RewardConfig, functions: tuple[str, ...]) -> Iterator[str]:
    pays_wrong = any(function in (*REWARD_FUNCTIONS, "llm_judge") for function in functions)
    if pays_wrong and reward.on_failure == "value" and reward.failed > reward.wrong:
        yield (
            f"reward.failed={reward.failed:g} is above reward.wrong={reward.wrong:g}: a response that hangs "
            "its scorer gets more than a wrong one; lower reward.failed"
        )
    if reward.format_pattern is not None and not reward.format_penalty:
        yield (
            "reward.format_pattern changes no reward, as reward.format_penalty=0: set the penalty, or leave "
            "the pattern out"
        )
    if reward.overlong_tokens and not reward.overlong_penalty:
        yield (
            f"reward.overlong_tokens={reward.overlong_tokens} changes no reward, as "
            "reward.overlong_penalty=0: set the penalty, or leave the zone out"
        )


def _of_learning_rate(run: RunConfig) -> Iterator[str]:
    optimizer, planned = run.optimizer, run.planned_updates
    if optimizer.min_lr and optimizer.decay == "constant":
        yield (
            f"optimizer.min_lr={optimizer.min_lr:g} is where a decay ends, and optimizer.decay=constant has "
            "none: the learning rate stays; set optimizer.decay to linear or cosine"
        )
    if optimizer.warmup_updates >= planned:
        yield (
            f"optimizer.warmup_updates={optimizer.warmup_updates} of {planned} planned updates: the learning "
            f"rate never reaches optimizer.lr={optimizer.lr:g}; lower it"
        )
