"""Algorithm 1, its sums and its loss, written down from the paper: float64, loops over tokens, no tricks.

The reference for the tests of ``bapo_megatron.algo``. It shares no code with them but the config, and
finds the candidates of a bound in decimal arithmetic, where 0.6 + 15 * 0.02 is 0.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import NamedTuple

from bapo_megatron.algo.bounds import BoundsConfig


class Token(NamedTuple):
    log_ratio: float
    advantage: float
    rollout_log_prob: float
    mask: float


class Found(NamedTuple):
    low: float
    high: float
    contribution: float
    rounds: int
    reached: bool


def ratio(token: Token) -> float:
    return math.exp(min(max(token.log_ratio, -20.0), 20.0))


def weight(token: Token, config: BoundsConfig) -> float:
    if config.weight == "rollout_probability":
        return token.mask * math.exp(token.rollout_log_prob)
    return token.mask


def positive_sum(tokens: Sequence[Token], c_high: float, config: BoundsConfig) -> float:
    """The numerator of Eq. 8, or the first sum of Eq. 5."""
    total = 0.0
    for token in tokens:
        if token.mask == 0 or not token.advantage > 0:
            continue
        r, a = ratio(token), token.advantage
        if config.measure == "surrogate":
            total += weight(token, config) * min(r * a, min(r, c_high) * a)
        elif token.log_ratio < math.log(c_high):
            total += weight(token, config) * r * a
    return total


def negative_sum(tokens: Sequence[Token], c_low: float, config: BoundsConfig) -> float:
    """The magnitude of what negative tokens add to the denominator of Eq. 8, or the second sum of Eq. 5."""
    total = 0.0
    for token in tokens:
        if token.mask == 0 or not token.advantage < 0:
            continue
        r, a = ratio(token), token.advantage
        if config.measure == "surrogate":
            total += weight(token, config) * min(r * a, max(r, c_low) * a)
        elif token.log_ratio > math.log(c_low):
            total += weight(token, config) * r * a
    return -total


def contribution(positive: float, negative: float, share: str) -> float:
    if share == "ratio":
        numerator, denominator = positive, negative
    elif share == "signed":
        numerator, denominator = abs(positive), abs(positive + -negative)
    else:
        numerator, denominator = positive, positive + negative
    if denominator != 0:
        return numerator / denominator
    return math.inf if numerator > 0 else 0.0


def search(
    positive: Callable[[float], float],
    negative: Callable[[float], float],
    config: BoundsConfig,
) -> Found:
    """The while loop of Algorithm 1 for P(c_high) and N(c_low), either order, empty ranges allowed."""
    low, low_end, low_step = decimals(config.low_start, config.low_end, config.low_step)
    high, high_end, high_step = decimals(config.high_start, config.high_end, config.high_step)
    rounds = 0

    def rho() -> float:
        return contribution(positive(float(high)), negative(float(low)), config.share)

    while rho() < config.target:
        low_can_move = low_end > low and low + low_step <= low_end
        high_can_move = high_end > high and high + high_step <= high_end
        if not low_can_move and not high_can_move:
            break
        if high_can_move and (config.order == "high_first" or not low_can_move):
            high += high_step
        else:
            low += low_step
        rounds += 1
    return Found(float(low), float(high), rho(), rounds, rho() >= config.target)


def search_tokens(tokens: Sequence[Token], config: BoundsConfig) -> Found:
    """``search`` for the tokens of an update, which starts only if there is something to balance."""
    start = Found(config.low_start, config.high_start, 0.0, 0, False)
    weighty = [t for t in tokens if t.mask != 0 and t.advantage != 0 and weight(t, config) != 0]
    if not any(counts_somewhere(token, config) for token in weighty):
        return start
    return search(
        lambda c_high: positive_sum(tokens, c_high, config),
        lambda c_low: negative_sum(tokens, c_low, config),
        config,
    )


def counts_somewhere(token: Token, config: BoundsConfig) -> bool:
    """Whether a token adds to the sum at any candidate."""
    highs = candidates(config.high_start, config.high_end, config.high_step)
    lows = candidates(config.low_start, config.low_end, config.low_step)
    return any(positive_sum([token], c, config) > 0 for c in highs) or any(
        negative_sum([token], c, config) > 0 for c in lows
    )


def candidates(start: float, end: float, step: float) -> list[float]:
    return [float(value) for value in steps(*decimals(start, end, step))]


def steps(value: Decimal, end: Decimal, step: Decimal) -> Iterator[Decimal]:
    yield value
    while end > value and value + step <= end:
        value += step
        yield value


def decimals(*values: float) -> tuple[Decimal, ...]:
    return tuple(Decimal(repr(value)) for value in values)


def token_loss(token: Token, low: float, high: float, dual_clip: float | None) -> float:
    """Minus the summand of Eq. 4."""
    if token.mask == 0:
        return 0.0
    r, a = ratio(token), token.advantage
    surrogate = min(r * a, min(max(r, low), high) * a)
    if dual_clip is not None and a < 0:
        surrogate = max(surrogate, dual_clip * a)
    return -token.mask * surrogate


def token_gradient(token: Token, low: float, high: float, dual_clip: float | None) -> float:
    """d token_loss / d log r = -mask * A * r where the gradient is alive (Eq. 5), else 0."""
    if token.mask == 0 or token.advantage == 0 or abs(token.log_ratio) > 20.0:
        return 0.0
    if token.advantage > 0 and token.log_ratio >= math.log(high):
        return 0.0
    if token.advantage < 0 and token.log_ratio <= math.log(low):
        return 0.0
    if token.advantage < 0 and dual_clip is not None and token.log_ratio > math.log(dual_clip):
        return 0.0
    return -token.mask * token.advantage * ratio(token)
