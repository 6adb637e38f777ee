"""Resume check: compares a resumed run's restored state with the fingerprint in its checkpoint.

``state_fingerprint`` measures the fingerprint, at a save and again before a resumed run's first step;
``fingerprint_differences`` returns a line per difference; for those that ``RunConfig.accept_resume_mismatch``
does not list, ``trainer/resume.py`` raises ResumeError. A fingerprint has:

- bit digests of weights and optimizer, which must be equal at every layout;
- log-probs of a canary, a few random sequences, which reveal other model code, temperature or kernels. They
  are compared with a tolerance for rounding, and at fixed routes in a mixture of experts, because rounding
  decides between nearly equal experts;
- policy version, learning rate and sampler position; the sampler may be ahead of the checkpoint.

Measuring it is collective, and costs a forward pass over 192 tokens and a digest of the whole state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bapo_megatron.checkpoint.run_directory import RATE_FIELDS, is_among
from bapo_megatron.config import RunConfig
from bapo_megatron.data.canary import (
    CanarySequence,
    CanarySpec,
    canary_sequences,
    with_random_routes,
    with_token_indices,
)
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.interfaces import Policy
from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats

_TOKENS, _LONGEST, _SEED = 192, 64, 20
_NOISE = {"float32": 1e-3, "bfloat16": 0.1}
"""Tolerance of the canary, by weight dtype: mean |log-prob now - log-prob then|, in nats. Another layout,
kernel or machine changes the order of sums, which moves each log-prob by noise with standard deviation s. The
mean of n normal |noise| values is sqrt(2 / pi) s = 0.80 s +- 0.60 s / sqrt(n). In bfloat16 s is 0.02 to 0.05,
so over the canary's 150 tokens or more the mean is at most 0.040 +- 0.003; the tolerance is 2.5 times that.
In float32 s is below 1e-4."""

_WHAT = {
    "version": "version of the policy",
    "weights": "bits of the weights",
    "optimizer": "bits of the optimizer",
    "canary": "log-probs of the canary",
    "learning_rate": "learning rate",
    "sampler": "the sampler",
}
"""Descriptions of the differences, by their names in ``accept_resume_mismatch``."""

Fingerprint = dict[str, Any]
"""Result of ``state_fingerprint``, as JSON values."""


def state_fingerprint(
    config: RunConfig,
    policy: Policy,
    sampler: dict[str, Any] | None,
) -> Fingerprint:
    """Return the fingerprint of the present state, equal on every rank. Collective. ``sampler``: its
    state."""
    model, samples = read_model_shape(config.model.hf_path), with_token_indices(_canary(config))
    if model.experts is not None:
        samples = with_random_routes(samples, _SEED, model)
    packs = pack_samples(samples, config.batch.pack_tokens, layout=policy.pack_layout)
    log_probs = policy.token_sums(packs, _by_number(sum(sample.response_tokens for sample in samples)))
    return {
        "dtype": config.model.dtype,
        "version": policy.version,
        "state": policy.state_digest(),
        "canary": {
            "log_probs": [round(value, 6) for value in log_probs.tolist()],
        },
        "learning_rate": policy.learning_rate,
        "sampler": {name: (sampler or {}).get(name, 0) for name in ("taken", "served", "next_number")},
    }


def fingerprint_differences(config: RunConfig, stored: Fingerprint, current: Fingerprint) -> dict[str, str]:
    """Return a line for each difference between the checkpoint's and the present fingerprint, by name in
    ``accept_resume_mismatch``. The learning rate may differ if ``allow_change`` has a field that determines
    it. Checkpoints of early versions have no bit digests: weights, optimizer and canary are not compared."""
    lines = {}
    if current["version"] != stored["version"]:
        lines["version"] = _line(stored["version"], current["version"])
    if "state" in stored:
        lines.update(_bit_differences(stored, current))
        lines.update(_canary_difference(config, stored["canary"], current["canary"]))
    may_change = any(is_among(name, RATE_FIELDS) for name in config.allow_change)
    if current["learning_rate"] != stored["learning_rate"] and not may_change:
        lines["learning_rate"] = _line(stored["learning_rate"], current["learning_rate"])
    behind = [
        f"{name} at least {_line(value, current['sampler'][name])}"
        for name, value in stored["sampler"].items()
        if current["sampler"][name] < value  # the journal may be ahead of the checkpoint
    ]
    if behind:
        lines["sampler"] = "; ".join(behind)
    return {name: f"{_WHAT[name]}: {line}" for name, line in lines.items()}


def _line(stored: object, current: object) -> str:
    return f"{stored} in the checkpoint, {current} now"


def _bit_differences(stored: Fingerprint, current: Fingerprint) -> dict[str, str]:
    """Return the differences of the bit digests. For a replicated tensor the checkpoint's first replica
    counts, and every present replica must equal it. Skips weights if their dtype was changed."""
    groups: dict[str, list[str]] = {"weights": [], "optimizer": []}
    for name, (first, *_) in stored["state"].items():
        now = current["state"].get(name, [])
        if now != [first] and not (name == "weights" and stored["dtype"] != current["dtype"]):
            group = "weights" if name == "weights" else "optimizer"
            groups[group].append(f"{name} {_line(first, ' and '.join(now) or 'absent')}")
    return {group: "; ".join(lines) for group, lines in groups.items() if lines}


def _canary_difference(
    config: RunConfig, stored: dict[str, list[float]], current: dict[str, list[float]]
) -> dict[str, str]:
    then, now = np.array(stored["log_probs"], float), np.array(current["log_probs"], float)
    if then.shape != now.shape:
        return {"canary": _line(f"{len(then)} tokens", len(now))}
    gap, limit = float(np.abs(now - then).mean()), _NOISE[config.model.dtype]
    if gap <= limit:  # False for nan
        return {}
    return {"canary": f"they differ by {gap:.3g} nats in the mean, {limit:g} is the most that noise explains"}


def _canary(config: RunConfig) -> list[CanarySequence]:
    """Return the canary's random sequences, equal in every run of a model."""
    vocabulary = read_model_shape(config.model.hf_path).vocab
    longest = min(_LONGEST, config.batch.pack_tokens)
    spec = CanarySpec(seed=_SEED, tokens=_TOKENS, longest=longest, vocab=vocabulary)
    return canary_sequences(spec, config.algorithm.bounds)


def _by_number(tokens: int) -> TokenFn:
    """Return a token function: a pack's log-probs, each at its index in the canary (``with_token_indices``).
    Every index occurs once in all packs, so the sum over ranks adds only zeros and is exact."""

    def place(stats: TokenStats, pack: MicroBatch) -> torch.Tensor:
        log_prob_T = stats.log_prob_T.double() * pack.mask_T
        return log_prob_T.new_zeros(tokens).index_add_(0, pack.rollout_log_prob_T.long(), log_prob_T)

    return place
