"""Common state (``common.pt``) of a resharded torch_dist checkpoint: the source's, for stacked keys.

Stacked: all layers of a parameter are under one key. ``resharding.py`` writes it.
"""

from __future__ import annotations

from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.runtime.files import read_file_inside
from checkpoints_tools.archives.pickle_allow_list import PickledObject
from checkpoints_tools.archives.pickle_writer import Call, Instance, Name
from checkpoints_tools.archives.torch_archive import object_archive
from checkpoints_tools.archives.torch_dist_metadata import CONTENT
from checkpoints_tools.archives.torch_zip import StoredTensor
from checkpoints_tools.formats.torch_dist import TorchDist

_COMMON = "common.pt"
_CONTENT = "content_metadata"


def common_for_stacked(source: TorchDist) -> bytes:
    """``common.pt`` of the resharded checkpoint; the source's bytes, if its keys are stacked already.

    CheckpointError for an object that the pickle writer cannot write.
    """
    path = source.folder / _COMMON
    if source.layout == "stacked":
        return read_file_inside(source.folder, _COMMON)
    content = source.common.get(_CONTENT)
    kept = content if isinstance(content, dict) else {}
    changed = {**kept, **CONTENT}
    changed.pop("non_homogeneous_layers", None)
    try:
        return object_archive(_as_written({**source.common, _CONTENT: changed}))
    except (TypeError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} cannot be written anew ({error}); --weights-only leaves it behind"
        ) from None


def _as_written(value: Any) -> Any:
    """A value of the pickle reader as objects of the pickle writer. CheckpointError if there are none."""
    if isinstance(value, dict):
        return {key: _as_written(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_as_written(inner) for inner in value)
    if isinstance(value, StoredTensor):
        raise CheckpointError("it holds a tensor")
    if not isinstance(value, PickledObject):
        return value
    module, _, name = value.class_name.rpartition(".")
    if not value.arguments:
        return Instance(Name(module, name), _as_written(value.state))
    if value.state is not None:
        raise CheckpointError(f"it holds an object of {value.class_name}")
    return Call(Name(module, name), _as_written(value.arguments))
