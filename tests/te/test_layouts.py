"""Parity of Transformer Engine's layers at every parallel layout with torch's layers in one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.data.samples import Sample
from bapo_megatron.hf import parameter_map
from bapo_megatron.policy import attention, positions
from tests.distributed.test_layouts import LAYOUTS, Answer, answer, check_agreement, layout
from tests.support.models import EXPERTS, save_tiny_model
from tests.support.te_process import Choices, TransformerEngineProcess
from tests.te.conftest import at_versions

pytestmark = pytest.mark.distributed

QUICK = (
    *("one pack64", "one full", "one shuffled", "tp2", "tp2-sp selective", "pp2 shuffled", "pp2-vpp2"),
    *("cp2", "cp2 pack200", "cp2 full", "dp2", "tp2-sp-cp2"),
)
AS_ON_A_GPU = ("one pack64", "tp2-sp", "pp2", "cp2", "dp2-cp2")
"""Not the interleaved schedule: gloo gives wrong results with its batched point-to-point calls."""


def answers(
    te: TransformerEngineProcess, text: str, folder: Path, samples: list[Sample], **choices: Any
) -> list[Answer]:
    where = layout(text)
    return te.run(answer, where.parallel, folder, samples, where, 1, choices=Choices(**choices))


@pytest.fixture
def reference(
    te: TransformerEngineProcess, qwen2: Path, samples: list[Sample], references: dict[str, Answer]
) -> Answer:
    """On torch's layers and torch's AdamW, by one process."""
    if te.version not in references:
        [found] = answers(te, "one", qwen2, samples, layers=False, fused_adam=False)
        assert found.bounds.reached
        references[te.version] = found
    return references[te.version]


MORE_REPLICAS = ("dp4 shuffled", "dp2-pp2", "dp2-pp3", "dp2-tp2-pp2", "dp2-pp2-cp2", "dp2-tp2-sp-cp2")
"""Left out here: others of the list with more replicas. The optimizer alone sees them, here at DP 2 and 3."""
LEFT_OUT = (
    *MORE_REPLICAS,
    *("one pack4096", "one selective", "tp2-sp", "tp2-sp full", "pp2", "pp3", "pp2-vpp2 full", "pp2-cp2"),
    *("tp2-sp-pp2", "tp2-sp-pp2-vpp2", "tp2-sp-pp2-cp2"),
)
"""Any two of their ways to spread an update stand together in another layout."""
KEPT = [text for text in LAYOUTS if text not in LEFT_OUT]


@pytest.mark.parametrize(
    ("te", "text"),
    at_versions(((text,) for text in KEPT), *((text,) for text in QUICK)),
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


def pairs_in(text: str) -> set[tuple[str, str]]:
    """Any two of its ways to spread an update, and each alone."""
    ways = [way for way in sorted(re.split("[ -]", text)) if way != "one"]
    return set(combinations_with_replacement(ways, 2))


def test_what_is_left_out_is_there_in_pairs() -> None:
    assert "dp3" in KEPT, "an uneven share of the optimizer's state"
    kept = set[tuple[str, str]]().union(*map(pairs_in, KEPT))
    for text in LEFT_OUT:
        assert text in LAYOUTS
        one_replica = re.sub(r"^dp\d[ -]?", "", text) if text in MORE_REPLICAS else text
        assert pairs_in(one_replica) <= kept, text


@pytest.mark.parametrize(("te", "kind"), at_versions([("qwen2",), (EXPERTS,)], (EXPERTS,)), indirect=["te"])
def test_without_a_gpu_no_transformer_engine_kernel_is_called(
    kind: str, te: TransformerEngineProcess, samples: list[Sample], tmp_path: Path
) -> None:
    """On a login node, where it is installed and its kernels would end the process."""
    answers(te, "one", save_tiny_model(kind, tmp_path), samples, layers=False, fused_adam=False)
    assert not te.calls


@pytest.mark.parametrize(("te", "text"), at_versions([("one",), ("cp2",)], ("cp2",)), indirect=["te"])
def test_torch_attention_where_transformer_engine_has_no_kernel(
    text: str, te: TransformerEngineProcess, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    """On sm80 and sm89 without flash-attn. The rest of a layer is Transformer Engine's."""
    check_agreement(answers(te, text, qwen2, samples, architecture=(8, 0)), reference, samples)
    assert te.calls["generic_gemm"]
    assert te.calls["fused_rope_forward"]
    assert not te.calls["fused_attn_fwd"]


def chunks_in_order() -> None:
    """Chunks 2r and 2r + 1 of each document for rank r, instead of r and 2 x size - 1 - r."""

    def chunks(bounds: tuple[int, ...], size: int, rank: int) -> Iterator[positions.DocumentChunk]:
        for start, end in pairwise(bounds):
            length = (end - start) // (2 * size)
            for number in (2 * rank, 2 * rank + 1):
                yield positions.DocumentChunk(length, start, start + (number + 1) * length)

    positions.document_chunks = chunks


def change_packs(bounds_of: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    made = attention.DocumentPack.of.__func__

    def of(cls: Any, bounds: tuple[int, ...], _longest: int, *others: Any) -> attention.DocumentPack:
        changed = bounds_of(bounds)
        return made(cls, changed, max(end - start for start, end in pairwise(changed)), *others)

    attention.DocumentPack.of = classmethod(of)


def bounds_of_the_rank() -> None:
    """``cu_seqlens`` of the rank's tokens instead of the whole pack's."""
    change_packs(lambda bounds: tuple(bound // 2 for bound in bounds))


def one_document() -> None:
    """All documents of a pack as one."""
    change_packs(lambda bounds: (0, bounds[-1]))


def norms_swapped() -> None:
    """The norm before the MLP in the place of the one before attention, and the other way."""
    norms = parameter_map._NORMS
    norms["self_attention"], norms["mlp"] = norms["mlp"], norms["self_attention"]


OTHER_LOG_PROBS = AssertionError, "Tensor-likes are not close"
REFUSED_BY_ROPE = RuntimeError, "cu_seqlens give this rank 20 tokens, and it has 44"
"""The traceback of a rank."""


@pytest.mark.parametrize(
    ("te", "mistake", "text", "noticed"),
    at_versions(
        [
            (chunks_in_order, "cp2", OTHER_LOG_PROBS),
            (bounds_of_the_rank, "cp2", REFUSED_BY_ROPE),
            (one_document, "one", OTHER_LOG_PROBS),
            (norms_swapped, "one", OTHER_LOG_PROBS),
        ],
        (norms_swapped, "one", OTHER_LOG_PROBS),
    ),
    indirect=["te"],
)
def test_a_broken_layer_fails_the_comparison(
    mistake: Callable[[], None],
    text: str,
    noticed: tuple[type[Exception], str],
    te: TransformerEngineProcess,
    qwen2: Path,
    samples: list[Sample],
    reference: Answer,
) -> None:
    """That these tests can fail, each for the mistake and not for an error of the plant."""
    error, message = noticed
    with pytest.raises(error, match=message):
        check_agreement(answers(te, text, qwen2, samples, change=mistake), reference, samples)


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
