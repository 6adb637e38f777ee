"""A kind of layer that the package does not know, whole in one file: the mean of a document's tokens so far.

``y_t = W_down mean_{s <= t} W_up x_s`` in the place of attention. Models have it in every second layer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.families import FAMILIES, Family, dense_stack
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.layers import Block, Kind, Mapping, plain
from bapo_megatron.layers.costs import Cut, Flops, Place, Saved
from bapo_megatron.policy.layers import Builder, norm_class
from bapo_megatron.policy.positions import gathered_rows, positions

NAME = "running_mean"


@dataclass(frozen=True)
class RunningMean(Kind):
    """The mean of the tokens so far, ``width`` wide."""

    width: int

    builder = "tests.support.running_mean:MeanBuilder"
    norm_keys = ("input_layernorm.weight",)

    def parameters(self, hidden: int) -> dict[str, Mapping]:
        return {
            "input_layernorm.weight": plain("input_layernorm.weight", (hidden,)),
            "self_attention.up.weight": plain("mean.up.weight", (self.width, hidden), tp_dim=0),
            "self_attention.down.weight": plain("mean.down.weight", (hidden, self.width), tp_dim=1),
        }

    def cuts(self) -> tuple[Cut, ...]:
        return (Cut("tensor", "width of the mean", self.width),)

    def flops(self, hidden: int) -> Flops:
        return Flops(linear=4.0 * hidden * self.width)

    def saved(self, at: Place) -> Saved:
        """The norm's, its output, the mean. All tokens' means are gathered over CP."""
        own = at.element * self.width / at.parallel.tensor
        whole = at.norm + at.input + own
        return Saved(whole, whole, 0.0, buffers=2 * own * (at.parallel.context - 1))

    def sent(self, at: Place) -> dict[str, float]:
        own = at.element * self.width / at.parallel.tensor
        return {"TP": at.pair(False), "CP": own * (at.parallel.context - 1) * (2 + at.passes)}


class Mean(MegatronModule):  # type: ignore[misc]
    """The module: megatron's linear layers around the means."""

    def __init__(self, config: TransformerConfig, *, width: int, **_: Any) -> None:
        super().__init__(config=config)
        options = {"config": config, "init_method": config.init_method, "bias": False}
        self.up = ColumnParallelLinear(config.hidden_size, width, gather_output=False, **options)
        self.down = RowParallelLinear(
            width, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **options
        )

    def forward(self, hidden: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> tuple[Tensor, None]:
        bounds, size = packed_seq_params.bounds, self.config.context_parallel_size
        x = self.up(hidden)[0]
        if size > 1:  # all tokens' rows, in the pack's order
            group = parallel_state.get_context_parallel_group()
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
            x = x[gathered_rows(bounds, size).to(x.device)]
        parts = x.split([end - start for start, end in pairwise(bounds)])
        counts = [torch.arange(1, len(part) + 1, device=x.device)[:, None, None] for part in parts]
        whole = torch.cat([part.cumsum(0) / count for part, count in zip(parts, counts, strict=True)])
        whole = whole.to(x.dtype)
        if size > 1:
            whole = whole[positions(bounds, size, group.rank()).to(x.device)]
        return self.down(whole)[0], None


class MeanBuilder(Builder):
    """The builder: ``Mean`` in the place of attention."""

    def install(self, spec: ModuleSpec, config: TransformerConfig, longest: int) -> None:
        layer = spec.submodules
        layer.input_layernorm = norm_class(self.te)
        layer.self_attention = ModuleSpec(module=Mean, params={"width": self.kind.width})
        layer.sharded_state_dict_keys_map.pop("input_layernorm.", None)


def stack(config: dict[str, Any]) -> list[Block]:
    """Layers of attention, every second with the mean in its place."""
    layers = dense_stack(config)
    means = [Block(RunningMean(int(config["mean_width"])), block.mlp) for block in layers]
    return [own if layer % 2 else mean for layer, (own, mean) in enumerate(zip(layers, means, strict=True))]


FAMILY = Family("Running means", stack=stack)


def save_mean_model(folder: Path) -> Path:
    """A tiny model of four layers with random weights. The family must be in FAMILIES."""
    assert NAME in FAMILIES
    config = {
        "model_type": NAME,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "mean_width": 16,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in hf_tensors(read_model_shape(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
