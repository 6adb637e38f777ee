"""Checkpoint opener: any format as tensors under Hugging Face names, as blocks of its files.

Verification, resharding and ``to_hf`` begin with it. No weight is read, but for an embedding that the folder
of a tied model holds twice. Used by ``checkpoints_tools/resharding.py``, ``checkpoints_tools/to_hf.py`` and
``checkpoints_tools/verification.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.hf.config import ModelShape, read_model_shape
from checkpoints_tools.core.blocks import BlockTensor
from checkpoints_tools.formats.locate import LATEST, Format, Location, hf_reference, locate
from checkpoints_tools.formats.mp_rank import MpRank
from checkpoints_tools.formats.safetensors_folder import read_safetensors_folder, without_tied_copy
from checkpoints_tools.formats.torch_dist import OPTIMIZER_STATES, RESHARDABLE, TorchDist


@dataclass(frozen=True)
class OpenedCheckpoint:
    """An opened checkpoint: its tensors under Hugging Face names, as places in files.

    No file is held open. Made by ``open_checkpoint``.
    """

    location: Location
    reference: Path
    """Folder of the model's config.json."""
    shape: ModelShape
    content: TorchDist | MpRank | None
    """The checkpoint as its format's reader has it; None for a Hugging Face folder."""
    tensors: dict[str, BlockTensor]
    """The weights. A tied model's output layer is not among them, even where a file holds a copy."""

    @property
    def has_whole_optimizer(self) -> bool:
        """Whether the checkpoint holds Adam's state as whole tensors."""
        return isinstance(self.content, TorchDist) and self.content.optimizer_format == RESHARDABLE

    def optimizer(self) -> dict[str, dict[str, BlockTensor]]:
        """Adam's fp32 weights and moments, by OPTIMIZER_STATES; empty without ``has_whole_optimizer``."""
        if not isinstance(self.content, TorchDist) or not self.has_whole_optimizer:
            return {}
        return {state: self.content.optimizer_tensors(state) for state in OPTIMIZER_STATES}


def open_checkpoint(path: Path, step: str = LATEST, reference: Path | None = None) -> OpenedCheckpoint:
    """The checkpoint that ``path`` names (``locate.py``), with a check that all of its tensors are there.

    ``reference`` names the folder of config.json for a checkpoint that carries none. CheckpointError names
    what is wrong with it.
    """
    location = locate(path, step)
    model = hf_reference(location, reference)
    shape = read_model_shape(model)
    content: TorchDist | MpRank | None = None
    match location.format:
        case Format.TORCH_DIST:
            content = TorchDist(location.folder, shape)
            tensors = content.tensors
        case Format.MP_RANK:
            content = MpRank(location.folder, shape)
            tensors = content.tensors
        case Format.HF:
            tensors = read_safetensors_folder(location.folder)
            if shape.tied:
                tensors = without_tied_copy(tensors, location.folder)
    return OpenedCheckpoint(location, model, shape, content, tensors)
