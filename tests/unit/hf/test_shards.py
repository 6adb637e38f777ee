"""Shards of tensor-parallel ranks: whole again to the bit, with one copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bapo_megatron.hf.config import model_shape
from bapo_megatron.hf.parameter_map import mapping_table
from bapo_megatron.hf.shards import shard, unshard

SHAPE = model_shape(
    {
        "model_type": "qwen2",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 12,
        "vocab_size": 8,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-6,
    },
    "test",
)


class NewBytes(TorchDispatchMode):
    """Bytes of the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.total += out.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name",
    ["mlp.linear_fc1.weight", "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"],
)
def test_a_parameter_is_made_whole_with_one_copy(name: str, size: int) -> None:
    """Gate over up on each rank (fc1), rows (qkv), columns (proj): a rank holds the shards and the whole."""
    mapping = mapping_table(SHAPE)[f"decoder.layers.{{layer}}.{name}"]
    whole = torch.randn(mapping.shape)
    pieces = [shard(mapping, whole, rank, size).contiguous() for rank in range(size)]
    with NewBytes() as made:
        again = unshard(mapping, pieces)
    assert torch.equal(again, whole)
    assert made.total == whole.nbytes
