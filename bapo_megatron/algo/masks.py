"""Masks: rules that exclude a response, or tokens of it, from an update before packing.

``build_masks`` returns a run's masks (``algorithm.masks``: built-in and custom functions); ``taken_out``
calls one. A mask maps a ``Response`` to True (excludes it), False, or a bool per trained
token, [N]; its further arguments are settings. It sees what earlier masks left. One replica evaluates the
masks of a response and shares the counts, and the rank that packs the response evaluates them again
(``trainer/masks.py``), so a mask must depend only on its argument.

Excluded tokens count nowhere in the update: in no search, no metric except ``masks/*`` and
``corrections/rejected_*``, and not in the loss's divisor. The advantages were computed with them.

Pure functions on numpy arrays. Legend: ``_N`` trained tokens of a response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Gt

from bapo_megatron.algo.parts import MASKS, calling, load_part, returned, tried_on
from bapo_megatron.errors import ConfigError


@dataclass(frozen=True)
class Response:
    """Input of a mask, one response: advantage, trained-token count, whether cut, source, and for its trained
    tokens the engine's log-probs and log(pi_old / pi_rollout), which are read from disk at first use."""

    advantage: float
    tokens: int
    """Number of trained tokens that earlier masks left."""
    is_cut: bool
    """Whether it was cut at ``rollout.max_response_tokens``."""
    source: int
    """Index of its source in ``data.sources``; -1 without sources."""
    read: Callable[[], tuple[np.ndarray, np.ndarray]]
    """Reads the log-probs of its trained tokens: the engine's and pi_old's."""

    @cached_property
    def _log_probs(self) -> tuple[np.ndarray, np.ndarray]:
        return self.read()

    @property
    def rollout_log_prob_N(self) -> np.ndarray:
        """log pi_rollout from the sampling engine, nats, float64."""
        return self._log_probs[0]

    @property
    def log_ratio_N(self) -> np.ndarray:
        """log(pi_old / pi_rollout), nats, float64; 0 with ``algorithm.old_log_probs=rollout``."""
        rollout_N, old_N = self._log_probs
        return np.asarray(old_N - rollout_N)


Mask = Callable[[Response], bool | np.ndarray]
"""A mask with its settings bound: maps a response to what it removes."""

CheckedMask = Callable[[Response], np.ndarray]
"""A mask whose answer is checked and expanded to bool [N], True where it removes the token."""


# --- built-in masks ----------------------------------------------------------------------------------


def cut_responses(response: Response) -> bool:
    """Overlong filtering (DAPO, arXiv 2503.14476): removes responses cut at the token limit. TRL's
    ``mask_truncated_completions``, NeMo-RL's ``overlong_filtering``."""
    return response.is_cut


def icepop(
    response: Response, low: Annotated[float, Gt(0)] = 0.5, high: Annotated[float, Gt(0)] = 5.0
) -> np.ndarray:
    """IcePop (arXiv 2510.18855): removes tokens with ``pi_old / pi_rollout`` outside ``low`` to ``high``.
    IcePop multiplies the other tokens by that ratio, as ``importance_cap`` = ``high`` does."""
    log_ratio_N = response.log_ratio_N
    return np.asarray(~((log_ratio_N >= math.log(low)) & (log_ratio_N <= math.log(high))))


def second_moment(response: Response, tau: Annotated[float, Gt(0)] = 0.04) -> np.ndarray:
    """M2PO's mask (arXiv 2510.01161, Algorithm 1) on trainer against engine, per response.

    Removes the tokens with the largest ``(log pi_old / pi_rollout)^2`` until the mean of the rest is at most
    ``tau``. The loss ``m2po`` masks by the ratio of the policy in training, over the whole update.
    """
    square_N = response.log_ratio_N**2
    order = np.argsort(square_N, kind="stable")
    means = np.cumsum(square_N[order]) / np.arange(1, len(order) + 1)  # they only grow
    out_N = np.zeros(len(order), np.bool_)
    out_N[order] = ~(means <= tau)
    return out_N


RolloutRs = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
"""Levels and estimators of ``rollout_rs``."""


def rollout_rs(
    response: Response,
    kind: RolloutRs,
    high: Annotated[float, Gt(0)],
    low: Annotated[float, Gt(0)] | None = None,
) -> bool | np.ndarray:
    """verl's ``rollout_rs``: removes tokens, or responses by sum, mean or maximum, by their KL estimate.

    With ``r = pi_old / pi_rollout``, its logarithm limited to 20: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1
    - log r. k2 and k3 may be up to ``high``; k1 from log(low) to log(high): limits of ``1 / r``, as in verl's
    code. Its ``rollout_rs_threshold`` is ``low_high`` or ``high``.
    """
    level, _, estimator = kind.rpartition("_")
    log_ratio_N = response.log_ratio_N.clip(-20.0, 20.0)
    estimates = {"k1": -log_ratio_N, "k2": log_ratio_N**2 / 2, "k3": np.expm1(log_ratio_N) - log_ratio_N}
    value_N = estimates[estimator]
    if estimator == "k1" and low is None:
        raise ConfigError(f"algorithm.masks: rollout_rs with kind={kind} needs low, the least of 1 / r")
    lowest, highest = (math.log(low or 1.0), math.log(high)) if estimator == "k1" else (-math.inf, high)
    if level == "token":
        return np.asarray(~((value_N >= lowest) & (value_N <= highest)))
    of_level: dict[str, Callable[[np.ndarray], float]] = {
        "seq_sum": np.sum,
        "seq_mean": np.mean,
        "seq_max": np.max,
    }
    return len(value_N) > 0 and not lowest <= float(of_level[level](value_N)) <= highest


# --- the masks of a run ------------------------------------------------------------------------------


def build_masks(algorithm: Any) -> list[CheckedMask]:
    """The masks of an ``AlgorithmConfig``. Raises ConfigError for an unknown one."""
    masks: list[CheckedMask] = []
    for number, part in enumerate(algorithm.masks):
        field = f"algorithm.masks[{number}]"
        mask = load_part(field, part.name, part.settings, MASKS)
        masks.append(partial(taken_out, f"{field}={part.name}", mask))
    return masks


def taken_out(owner: str, mask: Mask, response: Response) -> np.ndarray:
    """Call ``mask``; return what it removes from a response, bool [N]. Raises ConfigError if it fails."""
    with calling(owner):
        answer = mask(response)
        taken = np.asarray(answer)
    if taken.dtype != np.bool_ or taken.shape not in ((), (response.tokens,)):
        raise ConfigError(
            f"{owner} must return True or False, or one of them for each of the {response.tokens} trained "
            f"tokens, but {returned(taken if answer is not None else None)}"
        )
    return np.broadcast_to(taken, (response.tokens,))


def check_masks(algorithm: Any) -> None:
    """Preflight of the masks: call each on made-up responses. Raises ConfigError."""
    log_probs: Sequence[np.ndarray] = (np.array([-1.0, -2.0, -0.5]), np.array([-1.1, -1.9, -0.5]))
    for mask in build_masks(algorithm):
        for is_cut in (False, True):
            with tried_on("a made-up response of 3 tokens"):
                mask(Response(-1.0, 3, is_cut, -1, lambda: (log_probs[0], log_probs[1])))
