"""Weight files of a Hugging Face folder: which safetensors files and tensors form the model.

``read_weight_map`` returns the file of each tensor by the index, ``weight_files`` the paths. If there is an
index, it alone decides: transformers and SGLang skip a safetensors file missing from it (``mtp``,
``consolidated``, ``adapter_model``, another precision), and so does everything here. They would load a tensor
that a listed file holds and the index omits, so such an index is rejected. Without an index
``model.safetensors`` is the model, as for transformers. Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from bapo_megatron.errors import CheckpointError
from bapo_megatron.runtime.files import file_inside, read_file_inside

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor by the index; None if ``model.safetensors`` is the model. Raises
    CheckpointError if the folder has neither, or an index that is invalid or omits ``model.safetensors``."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.exists():
        if single.exists():
            return None
        raise CheckpointError(
            f"model folder {folder} holds neither {SINGLE} nor {INDEX}: "
            "it must be a Hugging Face folder in safetensors (docs/customize.md#files-of-verl-as-they-are)"
        )
    try:
        weight_map = json.loads(read_file_inside(folder, INDEX))["weight_map"]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r:.200}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is not a table of tensors")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name:
            raise CheckpointError(
                f"{index}: tensor {name} is placed in {file!r:.200}, which names no file beside it"
            )
    for file in {*weight_map.values()}:
        file_inside(folder, file)
    if single.exists() and SINGLE not in weight_map.values():
        raise CheckpointError(
            f"{folder} holds both {SINGLE}, which transformers would load, and {INDEX}, which does not list "
            "it: remove the one of the two that is not the model's"
        )
    return weight_map


def weight_files(folder: Path) -> list[Path]:
    """Paths of the model's weight files, sorted, existing or not. Raises as ``read_weight_map``."""
    weight_map = read_weight_map(folder)
    return [folder / name for name in sorted({SINGLE} if weight_map is None else {*weight_map.values()})]


def weight_bytes(folder: Path) -> int:
    """Bytes of the model's weight files; 0 without a model. Raises as ``read_weight_map``."""
    if not any((folder / name).exists() for name in (INDEX, SINGLE)):
        return 0
    return sum(path.stat().st_size for path in weight_files(folder) if path.exists())


def files_left_out(folder: Path) -> list[str]:
    """Names of the folder's safetensors files that are not the model's. Raises as ``read_weight_map``."""
    own = {path.name for path in weight_files(folder)}
    return sorted(path.name for path in folder.glob("*.safetensors") if path.name not in own)


def left_out_text(folder: Path) -> str | None:
    """Message for the user about the ``files_left_out``; None without any."""
    if not (names := files_left_out(folder)):
        return None
    listed = f"that {INDEX} names" if (folder / INDEX).exists() else f"of {SINGLE}"
    return f"model folder {folder}: the model is all {listed}; not part of it: {', '.join(names[:5])}"


def check_shard(path: Path, names: Iterable[str], weight_map: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the index places all tensors ``names`` in the file ``path``. Libraries
    load every tensor of a listed file, whatever the index says about it."""
    for name in names:
        if weight_map.get(name) != path.name:
            raise CheckpointError(
                f"{path} holds tensor {name}, which {INDEX} does not place there; engines would load it all "
                "the same: take the index that belongs to the files, or fetch the model again"
            )
