"""Checkpoints of Transformer Engine's layers and FusedAdam continue, on torch's layers and AdamW, too.

The functions that ranks run are those of tests/distributed/test_checkpoints.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bapo_megatron.config import ParallelConfig
from bapo_megatron.data.samples import Sample
from tests.distributed.test_checkpoints import save_and_go_on, save_before_any_update
from tests.support.layouts import layout
from tests.support.te_process import Choices, TransformerEngineProcess
from tests.te.conftest import at_versions

pytestmark = pytest.mark.distributed

TORCH = Choices(layers=False, fused_adam=False)
"""A machine without Transformer Engine."""
CLOSE = {"float32": 2e-4, "bfloat16": 0.15}
"""Of losses, gradient norms and learning rates, relative: in half precision the two kinds of layers round
in other places."""


@pytest.mark.parametrize(
    ("te", "dtype", "text"),
    at_versions(
        [("bfloat16", "one"), ("bfloat16", "dp2-tp2-sp"), ("float32", "pp2-cp2")],
        ("bfloat16", "one"),
    ),
    indirect=["te"],
)
def test_a_checkpoint_continues_bitwise(
    dtype: str,
    text: str,
    te: TransformerEngineProcess,
    qwen2: Path,
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    parallel = layout(text).parallel
    arguments = (save_and_go_on, parallel, qwen2, dtype, samples, parallel, tmp_path / "policy")
    [steps, weights], *_ = te.run(*arguments, False)
    [again, same], *_ = te.run(*arguments, True)
    assert te.calls["fused_attn_bwd"]
    assert again == steps
    assert all(torch.equal(same[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("te", "begun_with", "dtype", "text"),
    at_versions(
        [
            *(("torch", "float32", "one"), ("torch", "bfloat16", "tp2-pp2"), ("te", "float32", "tp2-pp2")),
        ],
        ("torch", "float32", "one"),
    ),
    indirect=["te"],
)
def test_layers_and_optimizer_may_change_within_a_run(
    begun_with: str,
    dtype: str,
    text: str,
    te: TransformerEngineProcess,
    qwen2: Path,
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    """Begun without Transformer Engine and continued with it, and the other way; also at another layout.

    A checkpoint of torch's layers has no states of Transformer Engine's modules.
    """
    first, second = (TORCH, Choices()) if begun_with == "torch" else (Choices(), TORCH)
    path, one, parallel = tmp_path / "policy", ParallelConfig(), layout(text).parallel
    [[steps, weights]] = te.run(save_and_go_on, one, qwen2, dtype, samples, one, path, False, choices=first)
    arguments = (qwen2, dtype, samples, parallel, path, True)
    [found, other], *_ = te.run(save_and_go_on, parallel, *arguments, choices=second)
    np.testing.assert_allclose(found, steps, rtol=CLOSE[dtype], atol=1e-6)
    if dtype == "float32":
        for name, tensor in weights.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=2e-4)


def test_a_checkpoint_before_any_update(
    te: TransformerEngineProcess, qwen2: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """FusedAdam has no moments yet, and no count of steps."""
    arguments = (save_before_any_update, ParallelConfig(), qwen2, samples, tmp_path / "policy")
    [(fresh, loaded)] = te.run(*arguments)
    assert fresh == loaded
