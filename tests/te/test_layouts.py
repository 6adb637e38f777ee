"""Parity of Transformer Engine's layers at every parallel layout with torch's layers in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.data.samples import Sample
from bapo_megatron.hf import parameter_map
from tests.distributed.test_layouts import Answer, check_agreement
from tests.support.layouts import layout
from tests.support.models import save_tiny_model
from tests.support.te_process import TransformerEngineProcess
from tests.te.conftest import answers, at_versions

pytestmark = pytest.mark.distributed

QUICK = (
    *("one pack64", "one full", "tp2", "tp2-sp selective", "pp2 shuffled", "pp2-vpp2", "cp2 pack200"),
    *("cp2 full", "dp2", "tp2-sp-cp2"),
)
AS_ON_A_GPU = ("tp2-sp", "pp2", "dp2-cp2")
"""Not the interleaved schedule: gloo gives wrong results with its batched point-to-point calls."""


@pytest.fixture
def reference(te: TransformerEngineProcess, qwen2: Path, samples: list[Sample], reference_of: Any) -> Answer:
    found: Answer = reference_of(te, qwen2, samples)
    assert found.bounds.reached
    return found


LAYOUTS = (
    *QUICK,
    *("tp2-pp2", "pp2-vpp2-cp2 full shuffled", "pp3-cp2 selective", "tp2-sp-pp2-vpp2-cp2 full"),
)
"""Not those of torch's layers in which the optimizer alone, or the number of layers, differs."""
AT_NEWER = ("tp2-sp selective", "pp2 shuffled", "cp2 full")


@pytest.mark.parametrize(
    ("te", "text"),
    at_versions(
        [(text,) for text in LAYOUTS], *((text,) for text in QUICK), newer=[(text,) for text in AT_NEWER]
    ),
    indirect=["te"],
)
def test_a_layout_agrees_with_torch(
    text: str, te: TransformerEngineProcess, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    check_agreement(answers(te, text, qwen2, samples), reference, samples)
    assert te.calls.keys() >= {"generic_gemm", "rmsnorm_fwd", "fused_rope_forward", "fused_attn_bwd"}
    assert te.calls["multi_tensor_adam"]
    # Three passes without gradients and an update. "selective" recomputes no attention: it keeps no scores.
    passes = 5 if layout(text).recompute == "full" else 4
    assert te.calls["fused_attn_fwd"] == passes * te.calls["fused_attn_bwd"]
    assert ("thd_out_correction" in te.calls) == (layout(text).parallel.context > 1)


@pytest.mark.parametrize(("te", "text"), at_versions([("cp2",)], ("cp2",)), indirect=["te"])
def test_torch_attention_where_transformer_engine_has_no_kernel(
    text: str, te: TransformerEngineProcess, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    """On sm80 and sm89 without flash-attn. The rest of a layer is Transformer Engine's."""
    check_agreement(answers(te, text, qwen2, samples, architecture=(8, 0)), reference, samples)
    assert te.calls["generic_gemm"]
    assert te.calls["fused_rope_forward"]
    assert not te.calls["fused_attn_fwd"]


def norms_swapped() -> None:
    """The norm before the MLP in the place of the one before attention, and the other way."""
    norms = parameter_map._NORMS
    norms["self_attention"], norms["mlp"] = norms["mlp"], norms["self_attention"]


def test_swapped_norms_fail_the_comparison(
    te: TransformerEngineProcess, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    """That these tests can fail."""
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_agreement(answers(te, "one", qwen2, samples, change=norms_swapped), reference, samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("te", "text"),
    at_versions(((text,) for text in AS_ON_A_GPU), ("tp2-sp",)),
    indirect=["te"],
)
def test_gpu_settings_leave_the_results_unchanged(
    text: str, te: TransformerEngineProcess, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    """Fused SwiGLU, parameters that are made on the device, batched point-to-point calls."""
    check_agreement(answers(te, text, qwen2, samples, gpu_settings=True), reference, samples)


@pytest.mark.slow
@pytest.mark.parametrize(("te", "family"), at_versions([("qwen3",), ("llama",)], ("qwen3",)), indirect=["te"])
def test_every_family_agrees(
    family: str, te: TransformerEngineProcess, samples: list[Sample], tmp_path: Path
) -> None:
    folder = save_tiny_model(family, tmp_path)
    [alone] = answers(te, "one", folder, samples, layers=False, fused_adam=False)
    check_agreement(answers(te, "tp2-sp-cp2", folder, samples), alone, samples)
