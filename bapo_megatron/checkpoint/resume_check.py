"""The resume certificate: what a continuation must find before it makes its first step.

With every checkpoint goes what the policy says of a canary (a few random sequences), a digest of the
optimizer's state, the learning rate, and the sampler's place. The run that continues measures them again.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bapo_megatron.config import RunConfig
from bapo_megatron.data.canary import CanarySpec, canary_sequences, unscored
from bapo_megatron.data.packing import Sample, pack_samples
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.interfaces import Policy
from bapo_megatron.types import MicroBatch, TokenStats

_TOKENS, _LONGEST = 192, 64
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3}
"""Of sums of log-probs, relative, where the layout differs, or kernels need not add in the same order."""

LEARNING_RATE = "learning rate"
"""Begins the line that tells of another one."""

Certificate = dict[str, Any]


def certificate(config: RunConfig, policy: Policy, sampler: dict[str, Any] | None) -> Certificate:
    """Of this moment; ``sampler`` is the sampler's state. Collective, equal on every rank."""
    packs = pack_samples(_canary(config), config.batch.pack_tokens, layout=policy.pack_layout)
    return {
        "layout": {**_layout(config), "processes": dist.get_world_size()},
        "version": policy.version,
        "canary": policy.token_sums(packs, _sums).tolist(),
        "optimizer": policy.optimizer_digest(),
        "learning_rate": policy.learning_rate,
        "sampler": {name: (sampler or {}).get(name, 0) for name in ("taken", "served", "next_number")},
    }


def differences(config: RunConfig, stored: Certificate, found: Certificate) -> list[str]:
    """What is not as the checkpoint says, a line each."""
    same_layout = stored["layout"] == found["layout"]
    exact = same_layout and not torch.cuda.is_available()
    tolerance = 0.0 if exact else _TOLERANCE[config.model.dtype]
    lines = []
    if found["version"] != stored["version"]:
        lines.append(_line("version of the policy", stored["version"], found["version"]))
    if not np.allclose(found["canary"], stored["canary"], rtol=tolerance, atol=0.0):
        lines.append(_line("log-probs of the canary", stored["canary"], found["canary"]))
    if same_layout and found["optimizer"] != stored["optimizer"]:
        lines.append(_line("digest of the optimizer", stored["optimizer"], found["optimizer"]))
    if found["learning_rate"] != stored["learning_rate"]:
        lines.append(_line(LEARNING_RATE, stored["learning_rate"], found["learning_rate"]))
    for name, value in stored["sampler"].items():
        if found["sampler"][name] < value:  # the journal goes on behind the checkpoint
            lines.append(_line(f"the sampler's {name}, at least", value, found["sampler"][name]))
    return lines


def _line(what: str, stored: object, found: object) -> str:
    return f"{what}: {stored} in the checkpoint, {found} now"


def _layout(config: RunConfig) -> dict[str, Any]:
    layout = asdict(config.parallel)
    del layout["timeout_minutes"]
    return {**layout, "dtype": config.model.dtype}


def _canary(config: RunConfig) -> list[Sample]:
    """Random sequences, always the same."""
    vocabulary = read_model_shape(config.model.hf_path).vocab
    longest = min(_LONGEST, config.batch.pack_tokens)
    spec = CanarySpec(seed=20, tokens=_TOKENS, longest=longest, vocab=vocabulary)
    return unscored(canary_sequences(spec, config.algorithm.bounds))


def _sums(stats: TokenStats, pack: MicroBatch) -> torch.Tensor:
    """Over the tokens: log-probs, their squares, log-probs times a number of the sequence, entropies."""
    log_prob_T, mask_T = stats.log_prob_T.double(), pack.mask_T.double()
    terms = (log_prob_T, log_prob_T**2, log_prob_T * pack.advantage_T, stats.entropy_T)
    return torch.stack([(term_T * mask_T).sum() for term_T in terms])
