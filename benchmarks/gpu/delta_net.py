"""GPU check of Gated DeltaNet kernels, with the heads of Qwen3.5, against the rule in float64."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from bapo_megatron.layers.delta_net import DeltaNet
from bapo_megatron.trainer.kernel_check import FLA, LIMITS, rule_errors, versions
from benchmarks.gpu.rows import Row, Size

KIND = DeltaNet(key_heads=4, value_heads=12, key_dim=128, value_dim=128, kernel=4)
"""Heads per rank of the dense model with 27 billion parameters at TP 4."""


def rows(size: Size, _folder: Path) -> Iterator[Row]:
    if not size.cuda:
        yield Row("the kernels", "not run: they need a GPU")
        return
    if find_spec("fla") is None:
        yield Row("the kernels", f"not run: {FLA} is not installed")
        return
    from bapo_megatron.policy.delta_net import kernel_rule

    device = torch.device("cuda")
    yield Row("made by", versions(device))
    for name, error in rule_errors(kernel_rule, KIND, torch.bfloat16, device).items():
        yield Row(name, f"{error:.1e} in the worst document", f"{LIMITS[name]}", error <= LIMITS[name])
