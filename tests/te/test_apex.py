"""apex without Transformer Engine: the kernels that a policy uses, and optimizer checkpoints.

apex is played (``tests/support/played_apex``): it has no wheel, and its kernels need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.config import ParallelConfig
from bapo_megatron.data.samples import Sample
from bapo_rehearsal.te_sources import te_version
from tests.distributed.test_checkpoints import save_and_go_on
from tests.support.models import save_tiny_model
from tests.support.policies import small_policy
from tests.support.te_process import APEX, Choices, TransformerEngineProcess

pytestmark = pytest.mark.distributed
ONE = ParallelConfig()
FUSED, TORCH = Choices(layers=False), Choices(layers=False, fused_adam=False)
"""Torch's layers in all, so that only the optimizers differ."""


@pytest.fixture
def apex(processes: Callable[[str], TransformerEngineProcess]) -> TransformerEngineProcess:
    return processes(APEX)


@pytest.fixture
def engine(processes: Callable[[str], TransformerEngineProcess]) -> TransformerEngineProcess:
    return processes(te_version())


def what_is_taken(folder: Path) -> dict[str, Any]:
    """The optimizer, megatron's kernels over lists, and the classes of all norms."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer

    policy = small_policy(folder, dtype="bfloat16")
    modules = [one for chunk in policy._model for one in chunk.modules()]
    kind = type(policy._optimizer.chained_optimizers[0].optimizer)
    return {
        "optimizer": (kind.__module__.split(".")[0], kind.__name__),
        "norm of gradients": clip_grads.l2_norm_impl.__module__,
        "step in the groups": distrib_optimizer.HAVE_APEX_OR_TE,
        "norms": {
            f"{type(one).__module__}.{type(one).__name__}" for one in modules if "Norm" in type(one).__name__
        },
    }


def test_apex_gives_adam_and_list_kernels_only(apex: TransformerEngineProcess, tmp_path: Path) -> None:
    """Its Adam and its kernels over lists; none of its norms, which are LayerNorms. qwen3 has four kinds."""
    folder = save_tiny_model("qwen3", tmp_path)
    [found] = apex.run(what_is_taken, ONE, folder, choices=FUSED)
    assert found["optimizer"] == ("apex", "FusedAdam")
    assert found["step in the groups"]
    assert found["norm of gradients"].endswith("transformer_engine.layers")  # where amp_C has it from
    assert found["norms"] == {"bapo_megatron.policy.layers.RMSNorm"}
    [without] = apex.run(what_is_taken, ONE, folder, choices=TORCH)
    assert without["optimizer"] == ("torch", "AdamW")
    assert not without["step in the groups"]
    assert without["norm of gradients"] == "bapo_megatron.policy.device"


CHANGES = [(a, b) for a, b in product(("apex", "te", "torch"), repeat=2) if "apex" in (a, b)]


@pytest.mark.parametrize(("begun", "continued"), CHANGES)
def test_a_run_goes_on_with_another_optimizer(
    begun: str,
    continued: str,
    apex: TransformerEngineProcess,
    engine: TransformerEngineProcess,
    qwen2: Path,
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    """Moments and the count of steps go with it: the warmup ends after the save, and a bias correction of
    step 1 in place of 3 would double a step."""
    ways = {"apex": (apex, FUSED), "te": (engine, FUSED), "torch": (apex, TORCH)}
    found = []
    for name, load in ((begun, False), (continued, True)):
        process, choices = ways[name]
        arguments = (qwen2, "float32", samples, ONE, tmp_path / "policy", load)
        [answer] = process.run(save_and_go_on, ONE, *arguments, choices=choices)
        assert bool(process.calls["multi_tensor_adam"]) == (name != "torch")
        found.append(answer)
    [steps, weights], [again, other] = found
    if begun == continued:
        assert again == steps
        assert all(torch.equal(other[name], tensor) for name, tensor in weights.items())
        return
    np.testing.assert_allclose(again, steps, rtol=1e-5, atol=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=2e-4)
