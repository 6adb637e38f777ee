"""The writer of Megatron-LM's legacy checkpoints: plans the weights alone, in one file for each TP and PP
rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import Mapping as Parameter
from bapo_megatron.hf.parameter_map import checkpoint_key, mapping_table
from checkpoints_tools.archives.pickle_writer import Instance, Name
from checkpoints_tools.archives.state_archive import state_archive
from checkpoints_tools.archives.torch_archive import stored_tensor
from checkpoints_tools.core.blocks import ITEM_BYTES, Block, BlockTensor
from checkpoints_tools.core.output_plan import PARTIAL, OutputPlan
from checkpoints_tools.core.segments import cut_into_sources, shared_type
from checkpoints_tools.formats.mp_rank import STATE_FILE, shard_blocks
from checkpoints_tools.formats.torch_dist import VOCABULARY

_EMBEDDING, _OUTPUT = VOCABULARY
_FINAL_NORM = "decoder.final_layernorm.weight"
_WITH_STATE = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    *("q_layernorm", "k_layernorm", "final_layernorm"),
)
"""Modules that have a state of their own in Transformer Engine: none of its scales of fp8 is in use."""


@dataclass(frozen=True)
class Ranks:
    """The layout of a legacy checkpoint: how the model is cut, and the padding of its vocabulary."""

    tensor: int
    pipeline: int
    vocabulary_rows: int

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError if the model cannot be cut so."""
        cut_by_tensor = {"KV groups": shape.kv_heads, "MLP": shape.ffn, "vocabulary": self.vocabulary_rows}
        for what, size in cut_by_tensor.items():
            if size % self.tensor:
                raise ConfigError(f"--tp {self.tensor} does not divide the model's {what} of {size}")
        if shape.layers % self.pipeline:
            raise ConfigError(f"--pp {self.pipeline} does not divide the model's {shape.layers} layers")


def plan_mp_rank(
    tensors: Mapping[str, BlockTensor],
    shape: ModelShape,
    folder: Path,
    ranks: Ranks,
    arguments: Mapping[str, Any],
    iteration: int,
) -> OutputPlan:
    """The files of a legacy checkpoint in ``folder`` for all of a model's ``tensors``.

    Norms have Transformer Engine's names. ``arguments`` stand in it as those of the Megatron-LM run that
    would have written it. ConfigError if the model cannot be cut so.
    """
    ranks.check(shape)
    return _MpRankPlanner(tensors, shape, folder, ranks).plan(arguments, iteration)


@dataclass(frozen=True, slots=True)
class _RankShard:
    """The shard of a parameter on one rank."""

    key: str
    """Key in the rank's file, where layers count from 0."""
    parameter: Parameter
    layer: int
    dtype: str
    local: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.local) * ITEM_BYTES[self.dtype]


class _MpRankPlanner:
    def __init__(
        self, tensors: Mapping[str, BlockTensor], shape: ModelShape, folder: Path, ranks: Ranks
    ) -> None:
        self.source, self.shape, self.folder, self.ranks = tensors, shape, folder, ranks
        self.table = mapping_table(shape)
        self.blocks: dict[str, list[Block]] = {}
        self.output = OutputPlan()

    def plan(self, arguments: Mapping[str, Any], iteration: int) -> OutputPlan:
        sizes = {
            "tensor_model_parallel_size": self.ranks.tensor,
            "pipeline_model_parallel_size": self.ranks.pipeline,
            "padded_vocab_size": self.ranks.vocabulary_rows,
        }
        state = {
            "args": Instance(Name("argparse", "Namespace"), {**arguments, **sizes}),
            "checkpoint_version": 3.0,
            "iteration": iteration,
        }
        for tensor in range(self.ranks.tensor):
            for pipeline in range(self.ranks.pipeline):
                self._place(tensor, pipeline, state)
        for name, blocks in self.blocks.items():
            known = self.source[name]
            self.output.tensors[name] = BlockTensor(name, known.dtype, known.shape, tuple(blocks))
        return self.output

    def _place(self, tensor: int, pipeline: int, state: Mapping[str, Any]) -> None:
        """The file of one rank."""
        suffix = f"_{pipeline:03d}" if self.ranks.pipeline > 1 else ""
        file = self.folder / f"mp_rank_{tensor:02d}{suffix}" / (STATE_FILE + PARTIAL)
        shards = list(self._shards(pipeline))
        model: dict[str, Any] = {}
        for number, shard in enumerate(shards):
            model[shard.key] = stored_tensor(shard.dtype, shard.local, str(number))
            if shard.key.removesuffix(".weight").endswith(_WITH_STATE):
                model[shard.key.removesuffix("weight") + "_extra_state"] = None
        archive = state_archive({**state, "model": model}, [shard.nbytes for shard in shards])
        self.output.sizes[file] = archive.nbytes
        self.output.around += [(file, position, data) for position, data in archive.around]
        for shard, position in zip(shards, archive.payloads, strict=True):
            stored = shard_blocks(shard.parameter, shard.local, tensor, file, position, shard.dtype)
            parameter = shard.parameter
            parts = cut_into_sources(parameter.segments, len(parameter.hf_names), stored)
            for name, blocks in zip(parameter.hf_names, parts, strict=True):
                self.blocks.setdefault(name.format(layer=shard.layer), []).extend(blocks)

    def _shards(self, pipeline: int) -> Iterator[_RankShard]:
        """Shards of the parameters of a pipeline stage."""
        count = self.shape.layers // self.ranks.pipeline
        last = pipeline == self.ranks.pipeline - 1
        if pipeline == 0:
            yield self._shard(_EMBEDDING, _EMBEDDING)
        for name in self.table:
            if "{layer}" in name:
                key = checkpoint_key(name, stacked=False)
                for local in range(count):
                    yield self._shard(name, key.format(layer=local), pipeline * count + local)
        if last:
            yield self._shard(_FINAL_NORM, _FINAL_NORM)
            # A tied model's last stage has the embedding once more, where it is not the first.
            if not self.shape.tied:
                yield self._shard(_OUTPUT, _OUTPUT)
            elif pipeline > 0:
                yield self._shard(_EMBEDDING, _OUTPUT)

    def _shard(self, name: str, key: str, layer: int = 0) -> _RankShard:
        parameter = self.table[name]
        if name in VOCABULARY:
            padded = (self.ranks.vocabulary_rows, *parameter.shape[1:])
            parameter = replace(parameter, hf_shapes=(padded,))
        local = list(parameter.shape)
        if parameter.tp_dim is not None:
            local[parameter.tp_dim] //= self.ranks.tensor
        dtype = shared_type(self.source, [hf_name.format(layer=layer) for hf_name in parameter.hf_names])
        return _RankShard(key, parameter, layer, dtype, tuple(local))
