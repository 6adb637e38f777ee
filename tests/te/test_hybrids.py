"""A hybrid of Gated DeltaNet and gated attention on Transformer Engine's layers: the answer of torch's.

Its rule is torch's here. The kernels of flash-linear-attention have a test of their own: test_fla.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.data.samples import Sample
from tests.distributed.test_layouts import Answer, check_agreement
from tests.support.models import HYBRID, save_tiny_model
from tests.support.te_process import TransformerEngineProcess
from tests.te.conftest import answers, at_versions

pytestmark = pytest.mark.distributed

LAYOUTS = ("one full", "tp2-sp selective", "pp2-vpp2", "tp2-sp-cp2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(HYBRID, tmp_path_factory.mktemp("model"))


@pytest.fixture
def reference(te: TransformerEngineProcess, folder: Path, samples: list[Sample], reference_of: Any) -> Answer:
    return reference_of(te, folder, samples)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("te", "text"),
    at_versions(((text,) for text in LAYOUTS), ("tp2-sp selective",)),
    indirect=["te"],
)
def test_a_layout_agrees_with_torch(
    text: str, te: TransformerEngineProcess, folder: Path, samples: list[Sample], reference: Answer
) -> None:
    check_agreement(answers(te, text, folder, samples), reference, samples)
    assert te.calls.keys() >= {"generic_gemm", "rmsnorm_fwd", "rmsnorm_bwd", "fused_attn_bwd"}
