"""Advantages of a step's responses: the built-in ones, and the parts from which a user writes his own.

An advantage is a function from ``Rewards``, the numbers of a step's responses, to one value for each; with
``each_group`` it sees one group at a time, the responses to a prompt. Arguments after the first are its
settings, ``algorithm.advantage_settings``. ``build_advantage`` makes the one of a run. Rank 0 computes, and
all ranks take its values: before the first update of a step, with the penalties of a reference in the reward.

Pure functions on numpy arrays. The sampler asks ``is_uniform`` once a group is scored. Legend: ``_N``
responses of a step, ``_G`` of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from bapo_megatron.algo.parts import ADVANTAGES, load_part
from bapo_megatron.errors import ConfigError
from bapo_megatron.step_header import GroupHeader

BranchReward = Literal["whole", "split"]
"""What each branch of an episode gets of its advantage; see ``AlgorithmConfig.branch_reward``."""

STD_EPSILON = 1e-6
"""Epsilon of a standard deviation: nearly equal rewards give no huge advantages."""

ROUNDING = 2.0**-22
"""Relative difference of rewards that counts as none, two roundings of float32: 0.1 + 0.2 and 0.3, or a score
that a model's server gave as float32 beside the same one."""

SMALLEST_DIFFERENCE = 1e-12
"""Difference of rewards that counts as none, however small they are: 0.1 + 0.2 - 0.3 and 0."""

LARGEST_REWARD = 1e18
"""Largest size of a reward: its square, which the standard deviation and losses need, is a float32."""


@dataclass(frozen=True)
class Rewards:
    """Rewards of a step's responses, and what else an advantage may depend on: one value for each, [N].

    Plain data. The responses of a group lie together.
    """

    reward_N: np.ndarray
    """float64, with all penalties."""
    group_N: np.ndarray
    """Number of its group: responses to one prompt have the same."""
    tokens_N: np.ndarray
    """Number of tokens that are trained on."""
    cut_N: np.ndarray
    """bool: it was cut at ``rollout.max_response_tokens``."""
    source_N: np.ndarray
    """Name of its source among ``data.sources``; empty in a run of one file."""
    named: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The named rewards that the reward function gave, by name, float64 [N]; none of one that gives a number.
    A response without one of them has 0 there."""

    @classmethod
    def of(cls, *groups: Sequence[float], tokens: int = 1, **named: Sequence[float]) -> Rewards:
        """Rewards of ``groups``, each a list of numbers, for tests: all of ``tokens`` tokens, none cut."""
        count = sum(map(len, groups))
        return cls(
            np.array([reward for group in groups for reward in group], np.float64),
            np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
            np.full(count, tokens),
            np.zeros(count, np.bool_),
            np.full(count, ""),
            {name: np.array(values, np.float64) for name, values in named.items()},
        )

    @classmethod
    def of_step(cls, groups: Sequence[GroupHeader]) -> Rewards:
        """Rewards of a step, from its header. An episode with branches counts once, with all its tokens."""
        each = [(n, group.source, rows) for n, group in enumerate(groups) for rows in group.episodes]
        first = [rows[0] for _, _, rows in each]
        names = sorted({name for sample in first for name in sample.named_rewards})
        return cls(
            np.array([sample.reward for sample in first], np.float64),
            np.array([number for number, _, _ in each], np.int64),
            np.array([sum(sample.trained_tokens for sample in rows) for _, _, rows in each], np.int64),
            np.array([any(sample.is_cut for sample in rows) for _, _, rows in each], np.bool_),
            np.array([source for _, source, _ in each], np.str_),
            {name: np.array([sample.named_rewards.get(name, 0.0) for sample in first]) for name in names},
        )

    def groups(self) -> Iterator[Rewards]:
        """The rewards of each group, in order."""
        bounds = np.flatnonzero(np.diff(self.group_N)) + 1
        for index in np.split(np.arange(len(self.reward_N)), bounds) if len(self.reward_N) else ():
            yield self._at(index)

    def _at(self, index: np.ndarray) -> Rewards:
        arrays = {name: value[index] for name, value in vars(self).items() if name != "named"}
        named = {name: value_N[index] for name, value_N in self.named.items()}
        return Rewards(**arrays, named=_AnyName(named) if isinstance(self.named, _AnyName) else named)


Advantage = Callable[[Rewards], np.ndarray]
"""An advantage: from the responses of a step to float values [N]."""


def each_group(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Decorator of an advantage that is computed group by group: ``function`` gets the ``Rewards`` of one."""

    @functools.wraps(function)
    def of_all(rewards: Rewards, **settings: Any) -> np.ndarray:
        parts = [np.asarray(function(group, **settings)) for group in rewards.groups()]
        return np.concatenate(parts) if parts else np.zeros(0)

    return of_all


# --- built-in advantages -----------------------------------------------------------------------------


@each_group
def grpo(group: Rewards) -> np.ndarray:
    """GRPO's advantage (arXiv 2402.03300): ``A_i = (R_i - mean(R)) / (std(R) + 1e-6)``.

    The standard deviation is that of a sample (over G - 1): GRPO's paper does not say which, and this is
    what torch.std, and with it verl, TRL and the published code of BAPO, compute.
    """
    return _normalized(group.reward_N)


@each_group
def dr_grpo(group: Rewards) -> np.ndarray:
    """Dr. GRPO's advantage (arXiv 2503.20783): ``A_i = R_i - mean(R)``."""
    return centered(group.reward_N)


@each_group
def rloo(group: Rewards) -> np.ndarray:
    """RLOO's advantage (arXiv 2402.14740): ``A_i = R_i - mean_{j != i} R_j``, which is
    ``(R_i - mean(R)) G / (G - 1)``."""
    count = len(group.reward_N)
    return centered(group.reward_N) * (count / max(1, count - 1))


@each_group
def grpo_leave_one_out(group: Rewards) -> np.ndarray:
    """GRPO with a response's own reward left out of the mean and the deviation (NeMo-RL's
    ``use_leave_one_out_baseline``): ``A_i = (R_i - mean_{j != i} R_j) / (std_{j != i} R_j + 1e-6)``.

    Where the others' rewards are equal, or there is only one, nothing is divided.
    """
    advantage_G = rloo(group)
    for index in range(len(advantage_G)):
        others = np.delete(group.reward_N, index)
        if not is_uniform(others):
            advantage_G[index] /= others.std(ddof=1) + STD_EPSILON
    return advantage_G


def reinforce_plus_plus(rewards: Rewards) -> np.ndarray:
    """REINFORCE++'s advantage (arXiv 2501.03262): the reward, normalized over all tokens of the step.

    A response counts once for each of its tokens, as in verl's ``reinforce_plus_plus`` without discount:
    ``A_i = (R_i - m) / sqrt(v + 1e-8)``, with the tokens' mean m and sample variance v.
    """
    return whitened(rewards.reward_N, rewards.tokens_N)


def reinforce_plus_plus_baseline(rewards: Rewards) -> np.ndarray:
    """REINFORCE++ with the group's mean as a baseline: ``R_i - mean(R)``, normalized over all tokens."""
    return whitened(dr_grpo(rewards), rewards.tokens_N)


def gdpo(rewards: Rewards, weights: dict[str, float] | None = None) -> np.ndarray:
    """GDPO's advantage (arXiv 2601.05242), of several rewards: each is normalized in its group, as ``grpo``
    does; their weighted sum over the step's responses: ``A_i = (S_i - mean(S)) / (std(S) + 1e-6)``.

    ``weights``: of the named rewards that count; None: all of them, alike. Penalties of the reward count
    nowhere.
    """
    weights = dict.fromkeys(rewards.named, 1.0) if weights is None else weights
    missing = sorted(weights.keys() - set(rewards.named))
    if missing or not weights:
        has = ", ".join(rewards.named) or "none"
        raise ConfigError(
            f"algorithm.advantage=gdpo needs named rewards{': ' * bool(missing)}{', '.join(missing)}; this "
            f"step has {has}: let the reward function return a dict of them (docs/rewards.md)"
        )
    each = (replace(rewards, reward_N=rewards.named[name]) for name in weights)
    total_N = sum(weight * grpo(of_reward) for weight, of_reward in zip(weights.values(), each, strict=True))
    return _normalized(np.asarray(total_N))


# --- parts of an advantage ---------------------------------------------------------------------------


def centered(value_N: np.ndarray) -> np.ndarray:
    """``x - mean(x)``; exactly 0 where all are equal, whose mean may differ from them in the last bit."""
    return np.zeros(value_N.shape) if is_uniform(value_N) else value_N - value_N.mean()


def whitened(value_N: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    """``(x - m) / sqrt(v + 1e-8)``, each value as often as it has tokens: verl's ``masked_whiten``."""
    tokens = tokens_N.sum()
    if not tokens or is_uniform(value_N):
        return np.zeros(value_N.shape)
    distance_N = value_N - (value_N * tokens_N).sum() / tokens
    variance = (distance_N**2 * tokens_N).sum() / max(1, tokens - 1)
    return np.asarray(distance_N / np.sqrt(variance + 1e-8))


def _normalized(value_N: np.ndarray) -> np.ndarray:
    """``(x - mean(x)) / (std(x) + 1e-6)``."""
    distance_N = centered(value_N)
    return distance_N / (value_N.std(ddof=1) + STD_EPSILON) if distance_N.any() else distance_N


def branch_advantages(
    groups: Sequence[GroupHeader], value_N: np.ndarray, branch_reward: BranchReward = "whole"
) -> list[float]:
    """Advantages of a step's responses, from those of its episodes, ``value_N``: an episode with branches has
    a response for each."""
    branches = [len(rows) for group in groups for rows in group.episodes]
    return [
        value / (count if branch_reward == "split" else 1)
        for value, count in zip(value_N.tolist(), branches, strict=True)
        for _ in range(count)
    ]


def is_uniform(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether all rewards of a group are equal, but for ``ROUNDING`` and ``SMALLEST_DIFFERENCE``: every
    advantage of a group is then zero, and so is its policy gradient.

    Dynamic sampling (DAPO): with ``rollout.drop_uniform_groups`` the sampler drops such groups.
    """
    if len(rewards) == 0:
        return True
    rewards_G = np.asarray(rewards, dtype=np.float64)
    return bool(np.ptp(rewards_G) <= max(SMALLEST_DIFFERENCE, ROUNDING * np.abs(rewards_G).max()))


# --- the advantage of a run --------------------------------------------------------------------------


def build_advantage(algorithm: Any) -> Advantage:
    """The advantage of an ``AlgorithmConfig``, with its settings; its values are float32 and finite.

    ConfigError for an unknown one or a setting that it does not take; at a call for a function that fails,
    or gives other than one finite number for each response. ValueError for rewards that are not finite.
    """
    name = algorithm.advantage
    function = load_part("algorithm.advantage", name, algorithm.advantage_settings, ADVANTAGES)

    def checked(rewards: Rewards) -> np.ndarray:
        _check_rewards(rewards.reward_N)
        try:
            with np.errstate(over="ignore"):
                value_N = np.asarray(np.asarray(function(rewards), np.float64), np.float32)
        except ConfigError:
            raise
        except Exception as error:  # a user's function raises what it likes
            raise ConfigError(f"algorithm.advantage={name} failed with {error!r}; mend it") from error
        is_what = "others" if value_N.shape != rewards.reward_N.shape else None
        if not is_what and not np.isfinite(value_N).all():
            is_what = "numbers that are not finite in float32"
        if is_what:
            raise ConfigError(
                f"algorithm.advantage={name} must return one finite number for each of the "
                f"{len(rewards.reward_N)} responses, not {is_what} (shape {list(value_N.shape)})"
            )
        return value_N

    return checked


class _AnyName(dict[str, np.ndarray]):
    """Named rewards of the responses of a trial, of some names; each other name has the same."""

    def __missing__(self, name: str) -> np.ndarray:
        return next(iter(self.values()))


def check_advantage(algorithm: Any) -> None:
    """Preflight of the advantage: ConfigError as of ``build_advantage``, also for what two groups show."""
    trial = Rewards.of([0.0, 1.0], [1.0, 1.0], tokens=2)
    advantage = build_advantage(algorithm)
    if ":" in algorithm.advantage:
        # The names that the rewards will have are those of its settings, such as weights, if any are known.
        of_settings = (
            setting for setting in algorithm.advantage_settings.values() if isinstance(setting, dict)
        )
        names = [name for setting in of_settings for name in setting] or ["reward"]
        advantage(replace(trial, named=_AnyName.fromkeys(names, np.array([0.0, 1.0, 1.0, 1.0]))))


def _check_rewards(reward_N: np.ndarray) -> None:
    if not np.isfinite(reward_N).all():
        raise ValueError(f"a group needs finite rewards, got {reward_N.tolist()}")
    if reward_N.size and np.abs(reward_N).max() > LARGEST_REWARD:
        raise ValueError(f"rewards may be as large as {LARGEST_REWARD:g}, got {reward_N.tolist()}")
