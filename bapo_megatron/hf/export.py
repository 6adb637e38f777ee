"""Hugging Face export: sharded safetensors of streamed weights, with a reference's config and tokenizer.

For the final policy of a run and of SFT.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.hf.config import ModelShape, carried_files, read_model_shape, with_dtype
from bapo_megatron.hf.parameter_map import kept_in_float32
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.storage import writing
from bapo_megatron.runtime.written_folders import (
    check_aside,
    check_replaceable,
    foreign_content,
    move_foreign_aside,
    new_folder,
    replaced_folder,
    write_mark,
)

_WRITER = "bapo"  # of an export, in its mark

_SHARD_BYTES = 4 * 2**30


def export_hf(
    weights: Iterator[tuple[str, Tensor]], reference: Path, output: Path, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Export ``weights`` as a Hugging Face folder, with copies of ``reference``'s config and tokenizer.

    Collective: every rank runs the iterator, rank 0 writes, and holds one shard in host memory. ``output``
    appears whole at the end; an earlier export is replaced, anything else there is refused (ConfigError).
    RunStopped if the disk does not take it.
    """
    if dist.get_rank() == 0:
        check_export_output(output)
        with writing("the exported model", output), new_folder(output, _WRITER, foreign) as folder:
            for name, path in carried_files(reference).items():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, folder / name)
            shape = read_model_shape(reference)
            written = _write_shards(chain(weights, _untrained(reference, shape)), folder, shard_bytes)
            kept = kept_in_float32(shape)
            dtypes = {
                dtype
                for name, dtype in written.items()
                if name not in kept and not name.startswith(shape.untrained)
            }
            config = folder / "config.json"
            write_atomically(config, with_dtype(config.read_bytes(), dtypes))
            write_mark(folder, _WRITER)
    else:
        for _ in weights:
            pass
    dist.barrier()


def _untrained(reference: Path, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder that are not trained, as they are."""
    if shape.untrained:
        reader = HfReader(reference)
        names = (name for name in reader.names if name.startswith(shape.untrained))
        yield from ((name, reader.read(name)) for name in names)


def _write_shards(weights: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int) -> dict[str, str]:
    """Write the shards of ``weights``; the dtype of each tensor."""
    dtypes = {}
    shards: list[list[str]] = []
    total = filled = 0
    held: dict[str, Tensor] = {}

    def flush() -> None:
        path = folder / f"shard-{len(shards)}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        path.chmod((folder / "config.json").stat().st_mode)  # safetensors writes for its owner alone
        shards.append(list(held))
        held.clear()

    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        if held and filled + size > shard_bytes:
            flush()
            filled = 0
        held[name] = tensor.detach().cpu().clone()
        filled, total = filled + size, total + size
    flush()
    _name_shards(folder, shards, total)
    return dtypes


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """Rename the shards as loaders expect: one file, or numbered ones with an index."""
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        filename = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}.safetensors").rename(folder / filename)
        weight_map.update(dict.fromkeys(names, filename))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_atomically(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def check_export_output(output: Path) -> None:
    """Preflight of an export's folder: ConfigError if ``output`` exists and is no earlier export."""
    check_replaceable(output, _WRITER, foreign)
    check_aside(output, replaced_folder(output), _WRITER, foreign)


def keep_others(output: Path) -> list[Path]:
    """Rename foreign content at the place of an export, so that it is kept; the new names."""
    places = [output, *([replaced_folder(output)] if os.path.lexists(output) else [])]
    return [kept for place in places if (kept := move_foreign_aside(place, foreign)) is not None]


def foreign(folder: Path) -> str | None:
    """Foreign content of ``folder``, in words; None if an export wrote all of it."""
    return foreign_content(folder, _WRITER)
