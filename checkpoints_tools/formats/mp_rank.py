"""Reader of Megatron-LM's legacy checkpoints: a ``torch.save`` file for each TP and PP rank.

    mp_rank_00/model_optim_rng.pt  mp_rank_01/...            TP 2
    mp_rank_00_000/...  mp_rank_00_001/...  mp_rank_01_000/  TP 2 x PP 2

``MpRank(folder, shape).tensors`` has the weights as blocks of the files. Each file holds its stage's state
under ``model``, or its interleaved chunks under ``model0``, ``model1``, ...; layers are counted from 0 in
each chunk. Optimizer state is not converted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import ITEM_BYTES, WEIGHT_TYPES, Block, BlockTensor
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import canonical_name, mapping_table
from bapo_megatron.layers import Mapping
from bapo_megatron.runtime.files import file_inside
from checkpoints_tools.archives.torch_zip import StoredTensor, read_archive
from checkpoints_tools.core.blocks import check_cover, cut_into_sources
from checkpoints_tools.formats.torch_dist import VOCABULARY

STATE_FILE = "model_optim_rng.pt"
_OPTIMIZER_FILE = "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """Pipeline chunk of the model on one TP rank: the file, and its parameters by name, unread."""

    file: Path
    parameters: dict[str, StoredTensor]

    @property
    def layers(self) -> int:
        numbers = [int(match[1]) for name in self.parameters if (match := _LAYER.match(name))]
        return 1 + max(numbers, default=-1)


class RankFiles:
    """Rank files of a legacy checkpoint, for any model: ``chunk`` returns a rank's parameters, unread. The
    constructor reads tensor metadata. Raises CheckpointError for a missing rank or a damaged file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._folders = _rank_folders(folder)
        self.tensor = 1 + max(tp for tp, _ in self._folders)
        self.pipeline = 1 + max(pp for _, pp in self._folders)
        self._states = {rank: _read_state(path) for rank, path in self._folders.items()}
        first = self._states[0, 0]
        self.common: dict[str, Any] = {
            key: value for key, value in first.items() if not key.startswith("model") and key != "optimizer"
        }
        """Iteration, arguments and other state of the first rank."""
        self.virtual = len(_chunk_names(first, self.file(0, 0)))
        """Number of interleaved chunks on each rank."""

    @property
    def has_optimizer(self) -> bool:
        """Whether there is optimizer state, which these tools do not convert."""
        beside = any((path / _OPTIMIZER_FILE).exists() for path in self._folders.values())
        return beside or any("optimizer" in state for state in self._states.values())

    def file(self, tensor: int, pipeline: int) -> Path:
        """Return the file of a rank."""
        return self._folders[tensor, pipeline] / STATE_FILE

    def chunk(self, tensor: int, pipeline: int, virtual: int) -> ModelChunk:
        """Return one of the model's chunks on one rank."""
        file, state = self.file(tensor, pipeline), self._states[tensor, pipeline]
        names = _chunk_names(state, file)
        if len(names) != self.virtual:
            raise CheckpointError(
                f"{file} holds {len(names)} chunks of the model, other files {self.virtual}"
            )
        parameters = state[names[virtual]]
        if not isinstance(parameters, dict) or not all(isinstance(name, str) for name in parameters):
            raise CheckpointError(f"{file}: {names[virtual]} is not a state of a model")
        # Extra states of layers (None, or 8-bit format settings) are not weights.
        weights = {name: value for name, value in parameters.items() if not name.endswith("_extra_state")}
        for name, value in weights.items():
            if not isinstance(value, StoredTensor):
                raise CheckpointError(f"{file}: {name} is not a tensor")
        return ModelChunk(file, weights)


class MpRank:
    """Legacy checkpoint of a known model: ``tensors`` has its weights by Hugging Face name as blocks of the
    rank files. Raises CheckpointError for experts, mixed layer kinds, unknown or misshapen parameters."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        if shape.experts is not None or not shape.is_uniform:
            what = "experts" if shape.experts is not None else "layers of several kinds"
            raise CheckpointError(
                f"{folder} is a legacy mp_rank folder of a model with {what}, which is not read: load it "
                "with Megatron-LM and save it as torch_dist"
            )
        self.files = RankFiles(folder)
        self.folder = folder
        self.shape = shape

    @cached_property
    def tensors(self) -> dict[str, BlockTensor]:
        """The model's weights by Hugging Face name."""
        tensors: dict[str, BlockTensor] = {}
        table = mapping_table(self.shape)
        for (name, layer), shards in self._parameters(table).items():
            mapping = table[name]
            key = name.format(layer=layer)
            blocks = list(self._blocks(key, name in VOCABULARY, mapping, shards))
            cut = cut_into_sources(mapping.segments, len(mapping.hf_names), blocks)
            for hf_name, shape, own in zip(mapping.hf_names, mapping.hf_shapes, cut, strict=True):
                tensor = BlockTensor(hf_name.format(layer=layer), shards[0].dtype, shape, tuple(own))
                check_cover(tensor)
                tensors[tensor.name] = tensor
        for name, mapping in table.items():
            for layer in mapping.places:
                if mapping.hf_names[0].format(layer=layer) not in tensors:
                    raise CheckpointError(f"{self.folder}: {name.format(layer=layer)} is in no file")
        return tensors

    def _parameters(self, table: dict[str, Mapping]) -> dict[tuple[str, int | None], list[StoredTensor]]:
        """Return each parameter's shards in order of the tensor-parallel ranks."""
        shards: dict[tuple[str, int | None], list[StoredTensor]] = {}
        first_layer = 0
        files = self.files
        for virtual in range(files.virtual):
            for pipeline in range(files.pipeline):
                chunks = [files.chunk(tensor, pipeline, virtual) for tensor in range(files.tensor)]
                for chunk in chunks:
                    if chunk.parameters.keys() != chunks[0].parameters.keys():
                        raise CheckpointError(f"{chunk.file} and {chunks[0].file} hold different parameters")
                for name in chunks[0].parameters:
                    key = canonical_name(name, first_layer)
                    if key == (VOCABULARY[1], None) and self.shape.tied:
                        continue  # the last stage's copy of the embedding
                    if key[0] not in table or (key[1] or 0) >= self.shape.layers or key in shards:
                        raise CheckpointError(
                            f"{chunks[0].file}: {name} belongs to no model of family {self.shape.family} "
                            f"with {self.shape.layers} layers; is config.json that of this model?"
                        )
                    shards[key] = [chunk.parameters[name] for chunk in chunks]
                first_layer += chunks[0].layers
        return shards

    def _blocks(
        self, key: str, vocabulary: bool, mapping: Mapping, shards: list[StoredTensor]
    ) -> Iterator[Block]:
        """Yield the shards as blocks of the whole parameter; a replicated one from rank 0 only."""
        rows, *rest = mapping.shape
        ranks = self.files.tensor
        dim = mapping.tp_dim
        for rank, shard in enumerate(shards[: 1 if dim is None else None]):
            if shard.dtype not in WEIGHT_TYPES or shard.dtype != shards[0].dtype or not shard.contiguous:
                raise CheckpointError(
                    f"{shard.file}: {key} has type {shard.dtype} and strides {list(shard.stride)}; only "
                    f"contiguous {', '.join(WEIGHT_TYPES)} can be read, of one type on all ranks"
                )
            local = list(mapping.shape)
            if dim is not None:
                local[dim] //= ranks
            if vocabulary and len(shard.shape) == 2:
                local[0] = max(-(-rows // ranks), shard.shape[0])
            if list(shard.shape) != local or shard.shape != shards[0].shape:
                raise CheckpointError(
                    f"{shard.file}: {key} has shape {list(shard.shape)}; of {[rows, *rest]} in config.json, "
                    f"rank {rank} of {ranks} holds {local}"
                )
            yield from shard_blocks(mapping, shard.shape, rank, shard.file, shard.position, shard.dtype)


def shard_blocks(
    mapping: Mapping, local: tuple[int, ...], rank: int, file: Path, position: int, dtype: str
) -> Iterator[Block]:
    """Yield a parameter's blocks in a tensor rank's shard, contiguous from ``position`` on. ``local``: the
    shard's shape. Gate and up projection, one above the other, are two blocks."""
    rows, columns = local[0], prod(local[1:])
    stride = columns * ITEM_BYTES[dtype]
    for first, whole in mapping.spans:
        height = whole * rows // mapping.shape[0]
        row = first + (rank * height if mapping.tp_dim == 0 else 0)
        column = rank * columns if mapping.tp_dim == 1 else 0
        yield Block(row, height, column, columns, file, position, stride)
        position += height * stride


def _rank_folders(folder: Path) -> dict[tuple[int, int], Path]:
    """Return folders by tensor- and pipeline-parallel rank; every pair must exist."""
    folders: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _FOLDER.fullmatch(path.name)
        if match is None:
            raise CheckpointError(
                f"{path}: expected mp_rank_TP or mp_rank_TP_PPP; models with experts are not supported"
            )
        rank = int(match[1]), int(match[2] or 0)
        if rank in folders:
            raise CheckpointError(f"{folders[rank]} and {path} are both of rank {rank}")
        folders[rank] = path
    for tensor in range(1 + max(tp for tp, _ in folders)):
        for pipeline in range(1 + max(pp for _, pp in folders)):
            if (tensor, pipeline) not in folders:
                raise CheckpointError(
                    f"{folder} has no folder of tensor rank {tensor} and pipeline rank {pipeline}: incomplete"
                )
    return folders


def _read_state(folder: Path) -> dict[str, Any]:
    path = file_inside(folder, STATE_FILE)
    with path.open("rb") as stream:
        state = read_archive(stream, path, "the rank's state")
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f"{path} holds no dictionary of states")
    return state


def _chunk_names(state: dict[str, Any], file: Path) -> list[str]:
    if "model" in state:
        return ["model"]
    names = [f"model{number}" for number in range(len(state)) if f"model{number}" in state]
    if not names:
        raise CheckpointError(f"{file} holds no model")
    return names
