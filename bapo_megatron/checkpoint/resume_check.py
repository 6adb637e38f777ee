"""The resume check: a run that continues must restore exactly the state that its checkpoint was taken of.

Every checkpoint carries a fingerprint of that state: sums of the policy's log-probs over a canary (a few
random sequences), a digest of the optimizer, the learning rate, the sampler's position. The run that
continues measures it again before its first step.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bapo_megatron.config import ModelConfig, ParallelConfig, RunConfig
from bapo_megatron.data.canary import CanarySpec, canary_sequences, unscored
from bapo_megatron.data.packing import Sample, pack_samples
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.interfaces import Policy
from bapo_megatron.types import MicroBatch, TokenStats

_TOKENS, _LONGEST = 192, 64
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3}
"""Relative tolerance of the canary's sums where the layout differs, or kernels may add in another order."""

Fingerprint = dict[str, Any]
"""What ``state_fingerprint`` measures; plain JSON."""


def state_fingerprint(config: RunConfig, policy: Policy, sampler: dict[str, Any] | None) -> Fingerprint:
    """Fingerprint of the present state, equal on every rank. ``sampler``: the sampler's state. Collective."""
    packs = pack_samples(_canary(config), config.batch.pack_tokens, layout=policy.pack_layout)
    return {
        "layout": _layout(config.parallel, config.model),
        "version": policy.version,
        "canary": policy.token_sums(packs, _canary_sums).tolist(),
        "optimizer": policy.optimizer_digest(),
        "learning_rate": policy.learning_rate,
        "sampler": {name: (sampler or {}).get(name, 0) for name in ("taken", "served", "next_number")},
    }


def fingerprint_differences(config: RunConfig, stored: Fingerprint, found: Fingerprint) -> list[str]:
    """Differences between the checkpoint's fingerprint and the one measured now, one line for each.

    The comparison is exact at the same layout on a CPU, and up to rounding elsewhere. The learning rate may
    differ if a field of the optimizer was allowed to change.
    """
    same_layout = stored["layout"] == found["layout"]
    exact = same_layout and not torch.cuda.is_available()
    tolerance = 0.0 if exact else _TOLERANCE[config.model.dtype]
    optimizer_changed = any(name.startswith("optimizer.") for name in config.allow_change)
    lines = []
    if found["version"] != stored["version"]:
        lines.append(_line("version of the policy", stored["version"], found["version"]))
    if not np.allclose(found["canary"], stored["canary"], rtol=tolerance, atol=0.0):
        lines.append(_line("log-probs of the canary", stored["canary"], found["canary"]))
    if same_layout and found["optimizer"] != stored["optimizer"]:
        lines.append(_line("digest of the optimizer", stored["optimizer"], found["optimizer"]))
    if found["learning_rate"] != stored["learning_rate"] and not optimizer_changed:
        lines.append(_line("learning rate", stored["learning_rate"], found["learning_rate"]))
    for name, value in stored["sampler"].items():
        if found["sampler"][name] < value:  # the journal may be ahead of the checkpoint
            lines.append(_line(f"the sampler's {name}, at least", value, found["sampler"][name]))
    return lines


def _line(what: str, stored: object, found: object) -> str:
    return f"{what}: {stored} in the checkpoint, {found} now"


def _layout(parallel: ParallelConfig, model: ModelConfig) -> dict[str, Any]:
    """Parallel layout, dtype and number of processes: where they are equal, results are equal bit for bit."""
    layout = asdict(parallel)
    del layout["timeout_minutes"]
    return {**layout, "dtype": model.dtype, "processes": dist.get_world_size()}


def _canary(config: RunConfig) -> list[Sample]:
    """The canary: random sequences, the same in every run of a model."""
    vocabulary = read_model_shape(config.model.hf_path).vocab
    longest = min(_LONGEST, config.batch.pack_tokens)
    spec = CanarySpec(seed=20, tokens=_TOKENS, longest=longest, vocab=vocabulary)
    return unscored(canary_sequences(spec, config.algorithm.bounds))


def _canary_sums(stats: TokenStats, pack: MicroBatch) -> torch.Tensor:
    """Sums over the canary's tokens: log-prob, its square, log-prob times advantage, entropy.

    The canary's advantages are random, one for each sequence: they tell the sequences apart.
    """
    log_prob_T, mask_T = stats.log_prob_T.double(), pack.mask_T.double()
    terms = (log_prob_T, log_prob_T**2, log_prob_T * pack.advantage_T, stats.entropy_T)
    return torch.stack([(term_T * mask_T).sum() for term_T in terms])
