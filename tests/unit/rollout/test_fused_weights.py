"""Digests of fused weights: names, fusion order and each rank's shard, written out by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bapo_megatron.hf.config import model_shape
from bapo_megatron.hf.parameter_map import hf_tensors, kept_in_float32
from bapo_megatron.layers.mlp import Experts
from bapo_megatron.rollout.engines.sent_weights import SentDigests
from bapo_megatron.rollout.engines.sglang import fused_weights
from bapo_megatron.rollout.engines.sglang.fused_weights import (
    HASHES,
    FusedDigests,
    FusedLayout,
    GpuHash,
    fused_digests,
    padded_vocabulary,
)
from tests.support.checkpoint_models import config_of
from tests.support.models import EXPERTS
from tests.support.shapes import resized, uniform

HEADS, KV_HEADS, HEAD, HIDDEN, INNER, TOKENS = 8, 2, 2, 6, 8, 70
LAYER = "model.layers.3."
SHAPE = uniform(
    family="qwen3",
    layers=4,
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD,
    ffn=INNER,
    vocab=TOKENS,
    max_positions=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tied=False,
    qkv_bias=True,
    qk_norm=True,
)


def numbered(rows: int, *columns: int) -> Tensor:
    return torch.arange(rows * torch.Size(columns).numel(), dtype=torch.float32).view(rows, *columns) + rows


WEIGHTS = {
    "model.embed_tokens.weight": numbered(TOKENS, HIDDEN),
    f"{LAYER}self_attn.q_proj.weight": numbered(HEADS * HEAD, HIDDEN),
    f"{LAYER}self_attn.k_proj.weight": numbered(KV_HEADS * HEAD, HIDDEN) + 0.25,
    f"{LAYER}self_attn.v_proj.weight": numbered(KV_HEADS * HEAD, HIDDEN) + 0.5,
    f"{LAYER}self_attn.q_proj.bias": numbered(HEADS * HEAD),
    f"{LAYER}self_attn.k_proj.bias": numbered(KV_HEADS * HEAD) + 0.25,
    f"{LAYER}self_attn.v_proj.bias": numbered(KV_HEADS * HEAD) + 0.5,
    f"{LAYER}self_attn.o_proj.weight": numbered(HIDDEN, HEADS * HEAD),
    f"{LAYER}self_attn.q_norm.weight": numbered(HEAD),
    f"{LAYER}self_attn.k_norm.weight": numbered(HEAD) + 1,
    f"{LAYER}mlp.gate_proj.weight": numbered(INNER, HIDDEN),
    f"{LAYER}mlp.up_proj.weight": numbered(INNER, HIDDEN) + 0.5,
    f"{LAYER}mlp.down_proj.weight": numbered(HIDDEN, INNER),
    f"{LAYER}input_layernorm.weight": numbered(HIDDEN),
    f"{LAYER}post_attention_layernorm.weight": numbered(HIDDEN) + 1,
    "model.norm.weight": numbered(HIDDEN) + 2,
    "lm_head.weight": numbered(TOKENS, HIDDEN) + 0.5,
}


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def digests(tensor: int = 1, names: Sequence[str] = tuple(WEIGHTS)) -> SentDigests:
    found = FusedDigests(FusedLayout(SHAPE, tensor), "cpu")
    for name in names:
        found.add(name, WEIGHTS[name])
    return found.result()


def attention(part: str) -> Tensor:
    return WEIGHTS[f"{LAYER}self_attn.{part}"]


@pytest.mark.parametrize("order", [reversed, sorted])
def test_the_order_of_tensors_does_not_matter(order: type) -> None:
    assert digests(names=list(order(list(WEIGHTS)))) == digests()


@pytest.mark.parametrize(
    ("ranks", "rank", "queries", "keys"),
    [
        (2, 0, slice(0, 8), slice(0, 2)),
        (2, 1, slice(8, 16), slice(2, 4)),
        (4, 0, slice(0, 4), slice(0, 2)),  # four ranks share two heads of keys
        (4, 1, slice(4, 8), slice(0, 2)),
        (4, 2, slice(8, 12), slice(2, 4)),
        (4, 3, slice(12, 16), slice(2, 4)),
    ],
)
def test_the_shard_of_each_rank(ranks: int, rank: int, queries: slice, keys: slice) -> None:
    """As the weight loaders of QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear and
    VocabParallelEmbedding of SGLang 0.5.23 cut them."""
    sent = digests(ranks)
    assert len(sent.ranks) == ranks
    found = sent.ranks[rank]
    for kind in ("weight", "bias"):
        parts = [
            attention(f"{one}_proj.{kind}")[rows]
            for one, rows in zip("qkv", (queries, keys, keys), strict=True)
        ]
        assert found[f"{LAYER}self_attn.qkv_proj.{kind}"] == sha(torch.cat(parts))
    inner = slice(rank * INNER // ranks, (rank + 1) * INNER // ranks)
    gate, up = (WEIGHTS[f"{LAYER}mlp.{one}_proj.weight"][inner] for one in ("gate", "up"))
    assert found[f"{LAYER}mlp.gate_up_proj.weight"] == sha(torch.cat([gate, up]))
    assert found[f"{LAYER}mlp.down_proj.weight"] == sha(WEIGHTS[f"{LAYER}mlp.down_proj.weight"][:, inner])
    assert found[f"{LAYER}self_attn.o_proj.weight"] == sha(attention("o_proj.weight")[:, queries])
    for name in ("self_attn.k_norm.weight", "self_attn.q_norm.weight", "input_layernorm.weight"):
        assert found[LAYER + name] == sha(WEIGHTS[LAYER + name])  # whole on every rank
    rows = 128 // ranks
    padded = torch.cat([WEIGHTS["lm_head.weight"], torch.zeros(58, HIDDEN)])
    assert found["lm_head.weight"] == sha(padded[rank * rows : (rank + 1) * rows])


@pytest.mark.parametrize("backwards", [False, True])
def test_the_experts_of_a_layer_are_two_tensors(backwards: bool) -> None:
    """As FusedMoE of SGLang 0.5.23: gate over up of each expert, rank 1 of 2 the lower half of both."""
    own = {
        f"{LAYER}mlp.experts.{expert}.{kind}_proj.weight": numbered(*size) + expert + place / 4
        for expert in range(3)
        for place, (kind, size) in enumerate(
            {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items()
        )
    }
    router = numbered(3, HIDDEN)
    found = FusedDigests(FusedLayout(resized(SHAPE, experts=Experts(3, 2, INNER, True)), 2), "cpu")
    for name in sorted(own, reverse=backwards):
        found.add(name, own[name])
    found.add(f"{LAYER}mlp.gate.weight", router)
    half = slice(INNER // 2, INNER)
    w13 = [
        own[f"{LAYER}mlp.experts.{e}.{kind}_proj.weight"][half] for e in range(3) for kind in ("gate", "up")
    ]
    w2 = [own[f"{LAYER}mlp.experts.{e}.down_proj.weight"][:, half].contiguous() for e in range(3)]
    assert found.result().ranks[1] == {
        f"{LAYER}mlp.experts.w13_weight": sha(torch.cat(w13)),
        f"{LAYER}mlp.experts.w2_weight": sha(torch.cat(w2)),
        f"{LAYER}mlp.gate.weight": sha(router),
    }


HYBRID_CONFIG = config_of(
    "qwen3",
    model_type="qwen3_5_text",
    architectures=["Qwen3_5ForCausalLM"],
    num_hidden_layers=4,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)


@pytest.mark.parametrize("body", ["model.", "model.language_model."])
def test_the_tensors_of_a_hybrid_on_the_second_of_two_ranks(body: str) -> None:
    """As MergedColumnParallelLinear, mamba_v2_sharded_weight_loader and QKVParallelLinear of SGLang 0.5.23
    cut them. Of bfloat16 models the decay stays float32; the norm, which a policy keeps in it, does not."""
    multimodal = {"model_type": "qwen3_5", "text_config": HYBRID_CONFIG}
    shape = model_shape(HYBRID_CONFIG if body == "model." else multimodal, "config.json")
    generator = torch.Generator().manual_seed(0)
    kept, weights = kept_in_float32(shape), {}
    for name, size in hf_tensors(shape).items():
        tensor = torch.randn(size, generator=generator)
        weights[name] = tensor if name in kept else tensor.bfloat16()
    digester = FusedDigests(FusedLayout(shape, 2), "cpu")
    for name in reversed(weights):
        digester.add(name, weights[name])
    found = digester.result().ranks[1]

    def own(layer: int, name: str, *rows: int, dim: int = 0) -> Tensor:
        parts = weights[f"{body}layers.{layer}.{name}.weight"].split(rows or 10**6, dim)
        return torch.cat([part.chunk(2, dim)[1] for part in parts], dim)

    delta, keys, values = "linear_attn.", 32, 64
    linear = "model.layers.0.linear_attn."
    qkvz = [own(0, f"{delta}in_proj_qkv", keys, keys, values), own(0, f"{delta}in_proj_z")]
    assert found[f"{linear}in_proj_qkvz.weight"] == sha(torch.cat(qkvz))
    ba = [own(0, f"{delta}in_proj_{x}") for x in "ba"]
    assert found[f"{linear}in_proj_ba.weight"] == sha(torch.cat(ba))
    assert found[f"{linear}conv1d.weight"] == sha(own(0, f"{delta}conv1d", keys, keys, values))
    assert found[f"{linear}conv1d.weight"] != sha(own(0, f"{delta}conv1d"))
    assert found[f"{linear}out_proj.weight"] == sha(own(0, f"{delta}out_proj", dim=1))
    decay = weights[f"{body}layers.0.{delta}A_log"]
    assert decay.dtype == torch.float32
    assert found[f"{linear}A_log"] == sha(decay[4:])
    assert found[f"{linear}norm.weight"] == sha(weights[f"{body}layers.0.{delta}norm.weight"].bfloat16())
    qkv = [own(3, f"self_attn.{x}_proj") for x in "qkv"]
    assert found["model.layers.3.qkv_proj.weight"] == sha(torch.cat(qkv))
    assert not any("self_attn" in name or "language_model" in name for name in found)


@pytest.mark.parametrize(
    ("tokens", "ranks", "rows"),
    [(48, 1, 64), (64, 2, 64), (65, 2, 128), (151_936, 8, 151_936), (48, 3, 192), (32_000, 6, 32_256)],
)
def test_the_padded_vocabulary(tokens: int, ranks: int, rows: int) -> None:
    assert padded_vocabulary(tokens, ranks) == rows


def test_unknown_or_incomplete_tensors_raise() -> None:
    found = FusedDigests(FusedLayout(SHAPE, 3), "cpu")
    with pytest.raises(ValueError, match=r"the layout of model\.layers\.0\.mlp\.shared_expert\.up_proj"):
        found.add("model.layers.0.mlp.shared_expert.up_proj.weight", torch.zeros(3))
    two = FusedLayout(resized(SHAPE, experts=Experts(2, 1, INNER, False)), 1)
    with pytest.raises(ValueError, match=r"the layout of model\.layers\.0\.mlp\.experts\.2\.up"):
        two.place("model.layers.0.mlp.experts.2.up_proj.weight")
    with pytest.raises(ValueError, match="8 rows or columns are not divided by 3 ranks"):
        found.add(f"{LAYER}mlp.down_proj.weight", WEIGHTS[f"{LAYER}mlp.down_proj.weight"])
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.gate_up_proj\.weight is incomplete"):
        digests(names=[f"{LAYER}mlp.gate_proj.weight"])


MOE = {
    **config_of(EXPERTS, moe_intermediate_size=128, num_experts=4),
    "architectures": ["Qwen3MoeForCausalLM"],
}


LAYOUT = "have another weight layout"


@pytest.mark.parametrize(
    ("config", "flag", "device", "reason"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "", "cpu", "layout of MixtralForCausalLM on servers"),
        ({"architectures": None}, "", "cpu", "layout of a model without a class"),
        ({"quantization_config": {"quant_method": "fp8"}}, "", "cpu", "the model is quantized"),
        ({}, "--quantization", "cpu", f"servers with --quantization {LAYOUT}"),
        ({}, "--ep-size=2", "cpu", f"servers with --ep-size {LAYOUT}"),
        ({}, "--disable-radix-cache", "cpu", None),
        ({}, "", "cuda", None),
        (MOE, "", "cpu", None),
        (MOE, "", "cuda", "experts on GPUs depends on the kernel"),  # some reorder rows
        ({**MOE, "moe_intermediate_size": 96}, "", "cpu", "pad experts to a multiple of 32 rows"),
        (HYBRID_CONFIG, "", "cpu", None),
    ],
)
def test_supported_models_and_server_flags(
    config: dict[str, object], flag: str, device: str, reason: str | None, tmp_path: Path
) -> None:
    whole = {**config_of("qwen2"), "architectures": ["Qwen2ForCausalLM"], **config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = fused_digests(tmp_path, 2, device, (flag,))
    if reason is None:
        assert isinstance(found, FusedDigests)
    else:
        assert reason in found.result().unknown


BY_TRITON = {
    (1, "uint8"): "3d93a6540b54ef2a",
    (3, "uint8"): "1d9f0dfb19964121",
    (5, "bfloat16"): "65af05f85dd8b2d6",
    (4096, "float32"): "55f557d10bd261c2",
    (8192, "float32"): "04fae94c7059ae5b",
    (8193, "float32"): "d05c31de9bce8210",
    (30001, "bfloat16"): "70eed263ad33c43c",
    (100000, "bfloat16"): "292edff613e43345",
    (60000, "float32"): "a9c2046a169d92b0",
}


def pattern(size: int, dtype: str) -> Tensor:
    values = torch.arange(size, dtype=torch.int64) * 2654435761 % 251
    return values.to(torch.float32).to(getattr(torch, dtype))


@pytest.mark.parametrize(("case", "expected"), BY_TRITON.items(), ids=str)
def test_the_gpu_hash_equals_sglangs_kernel(case: tuple[int, str], expected: str) -> None:
    tensor = pattern(*case)
    for cut in (0, len(tensor) // 3):
        found = GpuHash()
        found.add(tensor[:cut])
        found.add(tensor[cut:])
        assert found.digest() == expected


@pytest.mark.parametrize("device", HASHES)
def test_the_hash_does_not_depend_on_the_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(*pieces: Tensor) -> str:
        found = HASHES[device]()
        for piece in pieces:
            found.add(piece)
        return found.digest()

    whole = torch.randn(301, 203, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    left, odd = whole[:, :101], whole.view(-1)[1:]  # not contiguous; not at a multiple of four bytes
    at_once = [digest(one.clone(memory_format=torch.contiguous_format)) for one in (whole, left, odd)]
    monkeypatch.setattr(fused_weights, "_CHUNK", 40_000)  # more than a tile, and not whole tiles
    assert digest(whole[:1], whole[1:150], whole[150:]) == at_once[0]
    assert digest(*(one for row in whole[:3] for one in row.split(7)), whole[3:]) == at_once[0]
    assert [digest(left[:200], left[200:]), digest(odd)] == at_once[1:]
    assert digest(whole[:0]) == {"cuda": "0" * 16, "cpu": hashlib.sha256().hexdigest()[:16]}[device]


@pytest.mark.parametrize("device", HASHES)
def test_a_hashed_tensor_s_storage_can_still_be_resized(device: str) -> None:
    """The policy's offload resizes the storages that the tensors are views of."""
    weight = torch.zeros(20_000)
    found = HASHES[device]()
    found.add(weight[:9000])
    found.digest()
    weight.untyped_storage().resize_(0)
    assert weight.untyped_storage().nbytes() == 0
