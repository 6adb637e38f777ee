"""Choice of the attention backend, determinism, and environment switches of Transformer Engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapo_megatron.config import ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.errors import ConfigError
from bapo_megatron.policy.device import has_te_attention
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.tensor_types import MicroBatch
from tests.support.models import EXPERTS, save_tiny_model
from tests.support.policies import small_policy
from tests.support.te_process import Choices, TransformerEngineProcess

pytestmark = pytest.mark.distributed
ONE = ParallelConfig()


def ask(longest: int, context: int, deterministic: bool) -> bool | str:
    """Whether there is a kernel for a rank of Qwen2.5-32B at TP 8, or why the run is refused."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0" if deterministic else "1"
    config = SimpleNamespace(
        num_attention_heads=40,
        num_query_groups=8,
        kv_channels=128,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=8,
        context_parallel_size=context,
    )
    try:
        return has_te_attention(config, longest)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("architecture", "longest", "context", "deterministic", "found"),
    [
        ((9, 0), 65536, 8, False, True),
        ((10, 0), 65536, 8, False, True),
        ((8, 0), 65536, 8, False, False),
        ((8, 9), 4096, 1, False, False),
        ((8, 0), 4096, 1, True, "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"),
    ],
)
def test_the_choice_of_attention(
    te: TransformerEngineProcess,
    architecture: tuple[int, int],
    longest: int,
    context: int,
    deterministic: bool,
    found: bool | str,
) -> None:
    choices = Choices(architecture=architecture)
    [answer] = te.run(ask, ONE, longest, context, deterministic, choices=choices)
    assert answer is found if isinstance(found, bool) else found in answer


@pytest.mark.parametrize("longest", [4096, 65536])
@pytest.mark.parametrize(("architecture", "since"), [((9, 0), "2.11.0"), ((10, 0), "2.20.2")])
def test_deterministic_attention(
    architecture: tuple[int, int], since: str, longest: int, te: TransformerEngineProcess
) -> None:
    """2.11 has it on Hopper alone. 2.20 has it on Blackwell; on Hopper cuDNN would allocate too much."""
    [answer] = te.run(ask, ONE, longest, 8, True, choices=Choices(architecture=architecture))
    if te.version == since:
        assert answer is True
    else:
        assert f"no deterministic attention here for packs of {longest} tokens" in str(answer)


def policy_and_packs(folder: Path, samples: list[Sample]) -> tuple[MegatronPolicy, list[MicroBatch]]:
    policy = small_policy(folder, dtype="bfloat16")
    return policy, pack_samples(samples, 96, "token", policy.pack_layout)


def comparisons(folder: Path, samples: list[Sample]) -> int:
    """How often tensors are compared in a forward pass: each is a wait for the GPU."""
    policy, packs = policy_and_packs(folder, samples)
    counted, compare = 0, torch.equal

    def equal(*tensors: torch.Tensor) -> bool:
        nonlocal counted
        counted += 1
        return compare(*tensors)

    torch.equal = equal
    policy.log_probs(packs)
    return counted


def rows_of_rope(folder: Path, samples: list[Sample]) -> tuple[list[int], list[int]]:
    """The longest document of each pack, and the rows of RoPE's tables that the kernel gets, in order."""
    from bapo_rehearsal.transformer_engine import extension

    rows: list[int] = []
    extension.observers.append(
        lambda name, given, _: rows.append(len(given[1])) if "fused_rope" in name else None
    )
    policy, packs = policy_and_packs(folder, samples)
    policy.log_probs(packs)
    return [pack.max_seqlen for pack in packs], list(dict.fromkeys(rows))


def test_the_rope_kernel_gets_the_rows_that_a_pack_needs(
    te: TransformerEngineProcess, qwen2: Path, samples: list[Sample]
) -> None:
    """It starts a block of threads for each row and each document, whatever their lengths."""
    [(longest, rows)] = te.run(rows_of_rope, ONE, qwen2, samples)
    assert rows == list(dict.fromkeys(longest))
    assert max(rows) < 96


def test_attention_compares_no_tensors_on_the_gpu(
    te: TransformerEngineProcess, qwen2: Path, samples: list[Sample]
) -> None:
    assert te.run(comparisons, ONE, qwen2, samples) == [0]
    assert te.calls["fused_attn_fwd"]


Products = list[tuple[torch.dtype | None, bool]]


def products_of_weights(folder: Path, samples: list[Sample]) -> tuple[int, Products]:
    """The number of packs of an update; of each product for weights' gradients, the type of the tensor that
    it writes (None: one of its own), and whether it adds to it."""
    from bapo_rehearsal.transformer_engine import extension

    found: Products = []

    def see(name: str, given: tuple[Any, ...], _named: Any) -> None:
        if "gemm" in name and given[3]:
            out = given[4][0] if isinstance(given[4], list) else given[4]
            found.append((getattr(out, "dtype", None), given[14]))

    extension.observers.append(see)
    policy, packs = policy_and_packs(folder, samples)
    policy.update(packs, lambda stats, _: -stats.log_prob_T.sum()[None])
    return len(packs), found


@pytest.mark.parametrize("family", ["qwen2", EXPERTS])
def test_weight_gradients_are_added_up_in_float32(
    family: str, te: TransformerEngineProcess, samples: list[Sample], tmp_path: Path
) -> None:
    """By the products themselves, from the first pack on: no pack's is rounded to bfloat16 before.

    A router's gradient is a tensor of its own; from megatron-core 0.19 on Transformer Engine computes it.
    """
    folder = save_tiny_model(family, tmp_path)
    [(packs, found)] = te.run(products_of_weights, ONE, folder, samples)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert packs > 1
    routers = [one for one in found if one == (None, False)]
    assert len(routers) in (0, layers * packs if family == EXPERTS else 0)
    assert [one for one in found if one not in routers] == [(torch.float32, True)] * 4 * layers * packs
