"""Parity of Transformer Engine's grouped expert layer with torch's experts, at layouts with EP and ETP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron.config import ParallelConfig
from bapo_megatron.data.packing import Sample
from bapo_rehearsal.transformer_engine import layers
from checkpoints_tools import to_hf, to_megatron
from tests.distributed.test_checkpoints_of_kinds import load_and_look
from tests.distributed.test_converted_checkpoints import train_and_save
from tests.distributed.test_layouts import Answer, check_agreement
from tests.distributed.test_route_replay import to_the_first_two
from tests.support.models import EXPERTS, save_tiny_model
from tests.support.te_process import Choices, TransformerEngineProcess
from tests.te.conftest import answers, at_versions
from tests.te.test_conversions import assert_equal, load_checkpoint

pytestmark = pytest.mark.distributed

ONE, EP = ParallelConfig(), ParallelConfig(data=2, expert=2)
LAYOUTS = [
    *("one selective", "dp2-ep2 full", "tp2-sp-etp2", "dp2-tp2-sp-ep2-etp2 full", "dp2-pp2-vpp2-ep2"),
    "tp2-sp-cp2-ep4",
]
QUICK = ("one selective", "dp2-ep2 full", "tp2-sp-etp2")
_MERGING = "unpermute_with_mask_map_bwd_with_merging_probs"
KERNELS = {"te_general_grouped_gemm", *layers.PERMUTATION} - {_MERGING}
"""Megatron multiplies with the router's weights within the experts, so nothing is merged with them."""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(EXPERTS, tmp_path_factory.mktemp("moe"))


@pytest.fixture
def reference(te: TransformerEngineProcess, moe: Path, samples: list[Sample], reference_of: Any) -> Answer:
    """On torch's experts, one after the other."""
    return reference_of(te, moe, samples)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("te", "text"),
    at_versions(((text,) for text in LAYOUTS), *((text,) for text in QUICK)),
    indirect=["te"],
)
def test_the_grouped_layer_agrees_with_torch(
    text: str, te: TransformerEngineProcess, moe: Path, samples: list[Sample], reference: Answer
) -> None:
    check_agreement(answers(te, text, moe, samples), reference, samples)
    assert te.calls.keys() >= KERNELS


@pytest.mark.parametrize(
    ("te", "text"),
    at_versions([("dp2-ep2",), ("tp2-sp-ep2 full",)], ("dp2-ep2",)),
    indirect=["te"],
)
def test_ranks_without_a_token_take_part(
    text: str, te: TransformerEngineProcess, moe: Path, samples: list[Sample]
) -> None:
    crowded = to_the_first_two(samples)
    [alone] = answers(te, "one", moe, crowded, layers=False, fused_adam=False)
    check_agreement(answers(te, text, moe, crowded), alone, crowded)


def experts_in_turn() -> None:
    """Every expert's rows to its neighbour, in the forward pass."""
    from transformer_engine.pytorch.module import grouped_linear

    product = grouped_linear.general_grouped_gemm

    def shifted(weights: list[torch.Tensor], *others: object, **named: object) -> object:
        if named.get("layout", "TN") == "TN":
            weights = [*weights[1:], weights[0]]
        return product(weights, *others, **named)

    grouped_linear.general_grouped_gemm = shifted


def rows_unsorted() -> None:
    """The messages of several ranks left in the order in which they came."""
    from transformer_engine.pytorch import permutation

    permutation.triton_permutation.make_chunk_sort_map = lambda _sizes, _order, tokens, _chunks: torch.arange(
        tokens, dtype=torch.int32
    )


@pytest.mark.parametrize(
    ("te", "mistake", "text"),
    at_versions([(experts_in_turn, "one"), (rows_unsorted, "dp2-ep2")], (rows_unsorted, "dp2-ep2")),
    indirect=["te"],
)
def test_a_broken_expert_layer_fails_the_comparison(
    mistake: Callable[[], None],
    text: str,
    te: TransformerEngineProcess,
    moe: Path,
    samples: list[Sample],
    reference: Answer,
) -> None:
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_agreement(answers(te, text, moe, samples, change=mistake), reference, samples)


@pytest.mark.parametrize(("te", "begun_with"), at_versions([("te",), ("torch",)], ("te",)), indirect=["te"])
def test_a_checkpoint_of_the_grouped_layer_is_one_of_torchs_experts(
    begun_with: str, te: TransformerEngineProcess, moe: Path, tmp_path: Path
) -> None:
    """Weights and optimizer to the bit, at another layout; and as a folder of transformers."""
    grouped, torchs = Choices(fused_adam=False), Choices(layers=False, fused_adam=False)
    first, second = (grouped, torchs) if begun_with == "te" else (torchs, grouped)
    path = tmp_path / "policy"
    arguments = (train_and_save, EP, moe, EP, path, "bfloat16")
    [(_, weights), *_] = te.run(*arguments, choices=first)
    [(_, same)] = te.run(load_and_look, ONE, moe, ONE, path, choices=second)
    assert all(torch.equal(same[name].bfloat16(), tensor) for name, tensor in weights.items())
    to_hf(path, tmp_path / "hf", reference=moe)
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(("te", "parallel"), at_versions([(EP,)], (EP,)), indirect=["te"])
def test_a_converted_checkpoint_loads_strictly_into_the_grouped_layer(
    parallel: ParallelConfig, te: TransformerEngineProcess, moe: Path, tmp_path: Path
) -> None:
    """bapo-ckpt writes every extra state that the grouped layer asks for."""
    other = save_tiny_model(EXPERTS, tmp_path / "other", seed=2)
    to_megatron(moe, tmp_path / "megatron")
    for found in te.run(load_checkpoint, parallel, other, tmp_path / "megatron/release", parallel):
        assert_equal(found, moe)
