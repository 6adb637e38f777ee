"""A torch_dist checkpoint is whole, or it is named which tensor in which file is not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import Block, BlockTensor
from bapo_megatron.layers import RowSegment
from checkpoints_tools import verify
from checkpoints_tools.core.blocks import check_cover, cut_into_sources
from checkpoints_tools.formats.locate import open_checkpoint
from tests.support.checkpoint_models import edit_metadata, save_random_model

FC2 = "decoder.layers.mlp.linear_fc2.weight"


def file_of(folder: Path, key: str, offset: tuple[int, ...]) -> Path:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    return folder / metadata.storage_data[MetadataIndex(key, torch.Size(offset))].relative_path


def at(*offset: int) -> MetadataIndex:
    return MetadataIndex(FC2, torch.Size(offset))


def last_chunk(sizes: tuple[int, ...], before: int = 1) -> Callable[[Any], None]:
    """Instead of the last chunk one of ``sizes``, where the ``before``-th from the end lies."""

    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[FC2].chunks
        chunks[-1] = ChunkStorageMetadata(chunks[-before].offsets, torch.Size(sizes))

    return change


def retype(dtype: torch.dtype) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[FC2]
        entry.properties = replace(entry.properties, dtype=dtype)

    return change


def add_a_tensor(metadata: Any) -> None:
    metadata.state_dict_metadata["decoder.layers.mlp.router.weight"] = metadata.state_dict_metadata[FC2]
    for index, place in list(metadata.storage_data.items()):
        if index.fqn == FC2:
            router = MetadataIndex("decoder.layers.mlp.router.weight", index.offset)
            metadata.storage_data[router] = place


def place(**changes: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        metadata.storage_data[at(1, 0, 20)] = replace(metadata.storage_data[at(1, 0, 20)], **changes)

    return change


DOWN = r"layers\.2\.mlp\.down_proj\.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.state_dict_metadata.pop(FC2), rf"tensor {FC2} is missing"),
        (lambda found: found.state_dict_metadata[FC2].chunks.pop(), rf"{DOWN}: .* 960 of its 1920 elements"),
        (lambda found: found.storage_data.pop(at(1, 0, 20)), rf"which file holds {FC2} at \[1, 0, 20\]"),
        (last_chunk((1, 48, 20), 2), rf"{DOWN}: rows 0 to 48, columns 0 to 20 in .* overlap"),
        (last_chunk((1, 48, 21)), rf"chunk of {FC2} at \[2, 0, 20\], of shape \[1, 48, 21\], lies outside"),
        (last_chunk((1, 48, 19)), rf"{FC2} at \[2, 0, 20\] has shape \[1, 48, 20\] .* says \[1, 48, 19\]"),
        (
            lambda found: setattr(found.state_dict_metadata[FC2], "size", torch.Size((4, 48, 40))),
            rf"tensor {FC2} has shape \[4, 48, 40\], config.json asks for \[3, 48, 40\]",
        ),
        (retype(torch.float16), rf"{FC2} at .* has shape .* and type BF16; \.metadata says .* and F16"),
        (retype(torch.int32), rf"{FC2} has type I32; only BF16, F16, F32"),
        (add_a_tensor, r"router\.weight belongs to no model of family qwen2 with 3 layers"),
        (
            lambda found: found.state_dict_metadata.pop("embedding.word_embeddings.weight"),
            "it is not a checkpoint of a megatron-core GPT model",
        ),
        (place(relative_path="gone.distcp"), rf"gone\.distcp, which holds {FC2}, cannot be read"),
        (place(relative_path="../../hf/model.safetensors"), "which is not a file of the checkpoint"),
        (place(length=10**9), rf"distcp is truncated: it has \d+ bytes, and {FC2} should lie at"),
        (place(offset=-1), f"the place of {FC2} is damaged"),
        (place(offset=2**62), f"the place of {FC2} is damaged"),
        (place(offset=0), rf"distcp: {FC2} at \[1, 0, 20\] is not an archive of torch\.save"),
    ],
)
def test_what_is_wrong_with_the_metadata_is_named(
    change: Callable[[Any], object], message: str, stored: Path
) -> None:
    edit_metadata(stored, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(stored)
    assert str(stored) in str(caught.value)


def test_truncated_and_missing_files_are_named(stored: Path) -> None:
    file = file_of(stored, FC2, (1, 0, 20))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"{file.name} is truncated: it has {len(whole) - 1} bytes"):
        open_checkpoint(stored)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{file.name}, which holds .*, cannot be read"):
        open_checkpoint(stored)
    file.write_bytes(whole)
    for name in ("common.pt", ".metadata"):
        kept = (stored / name).read_bytes()
        (stored / name).write_bytes(kept[: len(kept) // 2])
        with pytest.raises(CheckpointError, match=rf"{name}"):
            open_checkpoint(stored)
        (stored / name).write_bytes(kept)
    (stored / "common.pt").unlink()
    with pytest.raises(CheckpointError, match=r"common\.pt is missing: the checkpoint is incomplete"):
        open_checkpoint(stored)


def test_a_chunk_that_was_stored_transposed_is_refused(stored: Path) -> None:
    torch.save(torch.zeros(1, 20, 48, dtype=torch.bfloat16).transpose(1, 2), stored / "__1_0.distcp")
    size = (stored / "__1_0.distcp").stat().st_size
    edit_metadata(stored, place(relative_path="__1_0.distcp", offset=0, length=size))
    with pytest.raises(CheckpointError, match=rf"__1_0\.distcp: {FC2} at \[1, 0, 20\] is not contiguous"):
        open_checkpoint(stored)


PLAIN_NORMS = {
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.input_layernorm.weight",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": "decoder.layers.pre_mlp_layernorm.weight",
}


@pytest.mark.parametrize(
    "renamed",
    ["model.{}".format, "module.{}".format, lambda name: PLAIN_NORMS.get(name, name)],
    ids=["model", "module", "norms that are not fused"],
)
def test_names_of_other_writers_are_known(
    renamed: Callable[[str], str], stored: Path, tmp_path: Path
) -> None:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata = {renamed(k): v for k, v in metadata.state_dict_metadata.items()}
        metadata.storage_data = {
            MetadataIndex(renamed(index.fqn), index.offset): info
            for index, info in metadata.storage_data.items()
        }

    edit_metadata(stored, change)
    assert verify(stored, tmp_path / "hf").equal


def test_one_chunk_may_hold_several_layers(stored: Path, tmp_path: Path) -> None:
    """As a stage of a pipeline may save them: here all three in one archive."""
    weight = torch.arange(3 * 48, dtype=torch.bfloat16).view(3, 48)
    key = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    torch.save(weight, stored / "__1_0.distcp")
    size = (stored / "__1_0.distcp").stat().st_size

    def change(metadata: Any) -> None:
        old = [index for index in metadata.storage_data if index.fqn == key]
        info = replace(metadata.storage_data[old[0]], relative_path="__1_0.distcp", offset=0, length=size)
        for index in old:
            del metadata.storage_data[index]
        metadata.storage_data[MetadataIndex(key, torch.Size((0, 0)))] = info
        entry = metadata.state_dict_metadata[key]
        entry.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((3, 48)))]

    edit_metadata(stored, change)
    tensors = open_checkpoint(stored).tensors
    for layer in range(3):
        [block] = tensors[f"model.layers.{layer}.post_attention_layernorm.weight"].blocks
        data = block.file.read_bytes()[block.position : block.position + 96]
        assert data == weight[layer].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 102}, r"word_embeddings\.weight has shape \[101, 48\], .* \[102, 48\]"),
        ({"num_hidden_layers": 4}, r"has shape \[3, .*, config.json asks for \[4, "),
        ({"tie_word_embeddings": True}, "output_layer.weight belongs to no model .* and tied embeddings"),
        ({"num_key_value_heads": 8}, r"linear_qkv\.weight has shape"),
    ],
)
def test_a_config_of_another_model_is_named(
    changes: dict[str, Any], message: str, stored: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(stored, reference=save_random_model(tmp_path / "other", **changes))


def test_blocks_that_do_not_cover_a_tensor_are_named() -> None:
    def tensor(*blocks: tuple[int, int, int, int]) -> BlockTensor:
        return BlockTensor("w", "F32", (4, 6), tuple(Block(*block, Path("f"), 0, 0) for block in blocks))

    check_cover(tensor((0, 4, 0, 6)))
    check_cover(tensor((2, 2, 0, 6), (0, 2, 3, 3), (0, 2, 0, 3)))
    check_cover(tensor((0, 1, 0, 6), (1, 3, 0, 2), (1, 3, 2, 4)))
    check_cover(tensor((0, 4, 2, 1), (0, 1, 0, 2), (1, 3, 0, 2), (0, 2, 3, 3), (2, 2, 3, 3)))
    for blocks, message in (
        ([(0, 4, 0, 5)], "holds 20 of its 24 elements"),
        ([(0, 4, 0, 6), (3, 1, 5, 1)], "overlap"),
        ([(0, 3, 0, 6), (2, 2, 0, 6)], "overlap"),
        ([(0, 4, 0, 4), (0, 2, 4, 2), (2, 2, 3, 3)], "overlap"),
        ([(0, 4, 4, 2), (0, 2, 0, 4), (2, 2, 0, 5)], "overlap"),
        ([(0, 5, 0, 6)], "lies outside"),
        ([(0, 4, 1, 6)], "lies outside"),
        ([], "holds 0 of its 24"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_cover(tensor(*blocks))


def test_blocks_are_cut_at_the_segments(stored: Path) -> None:
    """Rows 0-1, 5-6 of the second tensor and 3 of the first, as a parameter stacks them: cut by hand."""
    segments = (RowSegment(1, 0, 2), RowSegment(0, 3, 1), RowSegment(1, 5, 2))
    file = Path("f")
    first, second = cut_into_sources(
        segments, 2, [Block(1, 3, 0, 4, file, 100, 10), Block(4, 9, 0, 4, file, 500, 10)]
    )
    assert first == [Block(3, 1, 0, 4, file, 110, 10)]
    assert second == [
        Block(1, 1, 0, 4, file, 100, 10),
        Block(5, 1, 0, 4, file, 120, 10),
        Block(6, 1, 0, 4, file, 500, 10),  # the rest of that block is padding
    ]
