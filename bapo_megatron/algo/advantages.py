"""Advantages of a step's responses: built-in functions, and building blocks for custom ones.

``build_advantage`` returns a run's advantage: a function from ``Rewards`` (reward, group, token count of each
response) to one float32 value per response, [N]. A custom advantage is such a function, too; under
``each_group`` it sees one group, the responses to one prompt, at a time. Its further arguments are settings,
``algorithm.advantage_settings``. Rank 0 computes a step's values and broadcasts them; with a reference
penalty in the reward it does so again, from the penalized rewards, and these values replace the first ones.

Pure functions on numpy arrays. Legend: ``_N`` responses of a step (an episode of several branches is one),
``_G`` of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from bapo_megatron.algo.parts import ADVANTAGES, calling, load_part, returned, tried_on
from bapo_megatron.errors import ConfigError
from bapo_megatron.step_header import GroupHeader

BranchReward = Literal["whole", "split"]
"""Share of an episode's advantage for each of its branches; see ``AlgorithmConfig.branch_reward``."""

STD_EPSILON = 1e-6
"""Added to a standard deviation: nearly equal rewards give no huge advantages."""

ROUNDING = 2.0**-22
"""Relative difference below which rewards count as equal, two float32 roundings: 0.1 + 0.2 and 0.3, or a
model server's float32 score and its float64 value."""

SMALLEST_DIFFERENCE = 1e-12
"""Absolute difference below which rewards count as equal: 0.1 + 0.2 - 0.3 and 0."""

LARGEST_REWARD = 1e18
"""Largest absolute reward: its square, needed by standard deviation and losses, fits float32."""


@dataclass(frozen=True)
class Rewards:
    """Input of an advantage, one value per response, [N]: reward, group number, trained tokens, whether cut
    at the length limit, prompt source, named rewards. Responses of one group are contiguous."""

    reward_N: np.ndarray
    """float64, with penalties."""
    group_N: np.ndarray
    """Group number, equal for responses to one prompt."""
    tokens_N: np.ndarray
    """Number of trained tokens."""
    cut_N: np.ndarray
    """bool: cut at ``rollout.max_response_tokens``."""
    source_N: np.ndarray
    """Name of the source in ``data.sources``; empty in a single-file run."""
    named: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Named rewards of the reward function, float64 [N], 0 where missing; empty if it returns a number."""

    @classmethod
    def of(cls, *groups: Sequence[float], tokens: int = 1, **named: Sequence[float]) -> Rewards:
        """Rewards of ``groups``, each a list of numbers, for tests: all with ``tokens`` tokens, none cut."""
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
        """Rewards of a step from its header. An episode with branches counts once, with all its tokens."""
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
        """Yield the rewards of each group, in order."""
        bounds = np.flatnonzero(np.diff(self.group_N)) + 1
        for index in np.split(np.arange(len(self.reward_N)), bounds) if len(self.reward_N) else ():
            yield self._at(index)

    def _at(self, index: np.ndarray) -> Rewards:
        arrays = {name: value[index] for name, value in vars(self).items() if name != "named"}
        named = {name: value_N[index] for name, value_N in self.named.items()}
        return Rewards(**arrays, named=_AnyName(named) if isinstance(self.named, _AnyName) else named)


Advantage = Callable[[Rewards], np.ndarray]
"""Maps a step's responses to float values [N]."""


def each_group(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Decorate a group-wise advantage: return a function of a step's ``Rewards`` that calls ``function`` with
    each group's and concatenates the values. Raises ConfigError unless there is one per response."""

    owner = f"algorithm.advantage={function.__module__}:{function.__qualname__}"

    @functools.wraps(function)
    def of_all(rewards: Rewards, **settings: Any) -> np.ndarray:
        groups = list(rewards.groups())
        parts = [
            _one_each(owner, function(group, **settings), group, f" of group {number} of {len(groups)}")
            for number, group in enumerate(groups, 1)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    return of_all


def _one_each(owner: str, answer: Any, rewards: Rewards, group: str = "") -> np.ndarray:
    """What an advantage returned, float64 [N]. Raises ConfigError for another shape."""
    value_N = np.asarray(answer, np.float64)
    if value_N.shape != rewards.reward_N.shape:
        raise ConfigError(
            f"{owner} must return one finite number for each of the {len(rewards.reward_N)} "
            f"responses{group}, but {returned(value_N if answer is not None else None)}"
        )
    return value_N


# --- built-in advantages -----------------------------------------------------------------------------


@each_group
def grpo(group: Rewards) -> np.ndarray:
    """GRPO's advantage (arXiv 2402.03300): ``A_i = (R_i - mean(R)) / (std(R) + 1e-6)``.

    The paper does not define the standard deviation; this is the sample one (over G - 1), as in torch.std and
    therefore verl, TRL and BAPO's published code.
    """
    return _normalized(group.reward_N)


@each_group
def dr_grpo(group: Rewards) -> np.ndarray:
    """Dr. GRPO's advantage (arXiv 2503.20783): ``A_i = R_i - mean(R)``."""
    return centered(group.reward_N)


@each_group
def rloo(group: Rewards) -> np.ndarray:
    """RLOO's advantage (arXiv 2402.14740), ``R_i - mean_{j != i} R_j = (R_i - mean(R)) G / (G - 1)``."""
    count = len(group.reward_N)
    return centered(group.reward_N) * (count / max(1, count - 1))


@each_group
def grpo_leave_one_out(group: Rewards) -> np.ndarray:
    """GRPO without a response's own reward in mean and deviation (NeMo-RL's ``use_leave_one_out_baseline``).

    ``A_i = (R_i - mean_{j != i} R_j) / (std_{j != i} R_j + 1e-6)``; without the division if the other rewards
    are equal, or there is only one.
    """
    advantage_G = rloo(group)
    for index in range(len(advantage_G)):
        others = np.delete(group.reward_N, index)
        if not is_uniform(others):
            advantage_G[index] /= others.std(ddof=1) + STD_EPSILON
    return advantage_G


def reinforce_plus_plus(rewards: Rewards) -> np.ndarray:
    """REINFORCE++'s advantage (arXiv 2501.03262): the reward, normalized over all tokens of the step.

    ``A_i = (R_i - m) / sqrt(v + 1e-8)``, with the tokens' mean m and sample variance v: a response counts
    once per token, as in verl's ``reinforce_plus_plus`` without discount.
    """
    return whitened(rewards.reward_N, rewards.tokens_N)


def reinforce_plus_plus_baseline(rewards: Rewards) -> np.ndarray:
    """REINFORCE++ with the group mean as baseline: ``R_i - mean(R)``, normalized over all tokens."""
    return whitened(dr_grpo(rewards), rewards.tokens_N)


def gdpo(rewards: Rewards, weights: dict[str, float] | None = None) -> np.ndarray:
    """GDPO's advantage (arXiv 2601.05242) of several rewards, each normalized in its group as in ``grpo``.

    Their weighted sum S is normalized over the step's responses: ``A_i = (S_i - mean(S)) / (std(S) + 1e-6)``.
    ``weights``: of the named rewards that count; None: all, equally. Reward penalties have no effect.
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
    """``x - mean(x)``; exactly 0 if all are equal, where the mean may differ in the last bit."""
    return np.zeros(value_N.shape) if is_uniform(value_N) else value_N - value_N.mean()


def whitened(value_N: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    """``(x - m) / sqrt(v + 1e-8)``, each value weighted by its tokens: verl's ``masked_whiten``."""
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
    """Advantages of a step's responses, one per branch, from those of its episodes, ``value_N``."""
    branches = [len(rows) for group in groups for rows in group.episodes]
    return [
        value / (count if branch_reward == "split" else 1)
        for value, count in zip(value_N.tolist(), branches, strict=True)
        for _ in range(count)
    ]


def is_uniform(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether all rewards of a group are equal up to ``ROUNDING`` and ``SMALLEST_DIFFERENCE``.

    A group-wise advantage is then 0, and so is its gradient (not REINFORCE++'s, or GDPO's with other named
    rewards). With ``rollout.drop_uniform_groups`` the sampler drops the group (DAPO's dynamic sampling).
    """
    if len(rewards) == 0:
        return True
    rewards_G = np.asarray(rewards, dtype=np.float64)
    return bool(np.ptp(rewards_G) <= max(SMALLEST_DIFFERENCE, ROUNDING * np.abs(rewards_G).max()))


# --- the advantage of a run --------------------------------------------------------------------------


def build_advantage(algorithm: Any) -> Advantage:
    """The advantage of an ``AlgorithmConfig``, with its settings; returns finite float32 values.

    Raises ConfigError for an unknown name or setting; a call raises ConfigError if the function fails or does
    not return one finite number per response, ValueError for rewards that are not finite or too large.
    """
    owner = f"algorithm.advantage={algorithm.advantage}"
    settings = algorithm.advantage_settings
    function = load_part("algorithm.advantage", algorithm.advantage, settings, ADVANTAGES)

    def checked(rewards: Rewards) -> np.ndarray:
        _check_rewards(rewards.reward_N)
        with calling(owner), np.errstate(over="ignore"):
            value_N = _one_each(owner, function(rewards), rewards).astype(np.float32)
        if not np.isfinite(value_N).all():
            raise ConfigError(
                f"{owner} must return one finite number for each of the {len(value_N)} responses, but "
                "returned numbers that are not finite in float32"
            )
        return value_N

    return checked


class _AnyName(dict[str, np.ndarray]):
    """Named rewards for a trial call of an advantage: a name not in the dict gets the same values."""

    def __missing__(self, name: str) -> np.ndarray:
        return next(iter(self.values()))


def check_advantage(algorithm: Any, group_size: int) -> None:
    """Preflight of the advantage: also calls a custom one, on two made-up groups. Raises ConfigError."""
    advantage = build_advantage(algorithm)
    if ":" in algorithm.advantage:
        # Infer the reward names from the settings, such as weights, if possible.
        of_settings = (
            setting for setting in algorithm.advantage_settings.values() if isinstance(setting, dict)
        )
        names = [name for setting in of_settings for name in setting] or ["reward"]
        trial = Rewards.of([number % 2 for number in range(group_size)], [1.0] * group_size, tokens=2)
        with tried_on(f"2 made-up groups of {group_size} responses"):
            advantage(replace(trial, named=_AnyName.fromkeys(names, trial.reward_N)))


def _check_rewards(reward_N: np.ndarray) -> None:
    if not np.isfinite(reward_N).all():
        raise ValueError(f"a group needs finite rewards, got {reward_N.tolist()}")
    if reward_N.size and np.abs(reward_N).max() > LARGEST_REWARD:
        raise ValueError(f"rewards may be as large as {LARGEST_REWARD:g}, got {reward_N.tolist()}")
