"""One answer on Transformer Engine's layers, at every layout, and the answer of torch's layers: tests/distributed
compares these with one another, here they are the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.data.packing import Sample
from tests.distributed.test_layouts import LAYOUTS, Answer, answer, check_agreement, layout
from tests.support.models import FAMILIES, save_tiny_model
from tests.support.te_process import Choices, TransformerEngineProcess
from tests.support.tiers import slow_but

pytestmark = pytest.mark.distributed

QUICK = (
    *("one pack64", "one full", "tp2", "tp2-sp selective", "pp2 shuffled", "pp2-vpp2", "cp2", "cp4 selective"),
    *("dp2", "tp2-sp-cp2", "pp2-cp2", "dp2-cp2"),
)
AS_ON_A_GPU = ("one pack64", "tp2-sp", "pp2", "pp2-vpp2", "cp2")


def answers(
    te: TransformerEngineProcess, text: str, folder: Path, samples: list[Sample], **choices: Any
) -> list[Answer]:
    where = layout(text)
    return te.run(answer, where.parallel, folder, samples, where, 3, choices=Choices(**choices))


@pytest.fixture(scope="module")
def reference(te: TransformerEngineProcess, qwen2: Path, samples: list[Sample]) -> Answer:
    """On torch's layers and torch's AdamW, by one process."""
    [found] = answers(te, "one", qwen2, samples, layers=False, fused_adam=False)
    assert not te.calls
    assert found.bounds.reached
    return found


@pytest.mark.parametrize("text", slow_but(LAYOUTS, *QUICK))
def test_a_layout_agrees_with_torch(
    text: str, te: TransformerEngineProcess, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    check_agreement(answers(te, text, qwen2, samples), reference, samples)
    assert te.calls.keys() >= {"generic_gemm", "rmsnorm_fwd", "fused_rope_forward", "fused_attn_bwd"}
    assert te.calls["multi_tensor_adam"]
    assert ("thd_out_correction" in te.calls) == (layout(text).parallel.context > 1)


@pytest.mark.slow
@pytest.mark.parametrize("text", AS_ON_A_GPU)
def test_settings_of_a_gpu_change_nothing(
    text: str, te: TransformerEngineProcess, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    """Fused SwiGLU, parameters that are made on the device, batched point-to-point calls."""
    check_agreement(answers(te, text, qwen2, samples, gpu_settings=True), reference, samples)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen2"])
def test_every_family_agrees(
    family: str, te: TransformerEngineProcess, samples: list[Sample], tmp_path: Path
) -> None:
    folder = save_tiny_model(family, tmp_path)
    [alone] = answers(te, "one", folder, samples, layers=False, fused_adam=False)
    check_agreement(answers(te, "tp2-sp-cp2", folder, samples), alone, samples)
