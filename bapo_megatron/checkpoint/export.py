"""Export of a policy's streamed weights: ``export_hf`` writes them as a Hugging Face folder, blocking.

For the final policy of a run and of SFT; ``exports.py`` exports checkpoints. If other content is at the
output path, the preflight of SFT raises ConfigError; a run renames that content
(``move_foreign_aside``).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors, kept_in_float32
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.hf.weight_stream import SAFETENSORS_TYPES, checked_weights
from bapo_megatron.runtime.storage import writing
from bapo_megatron.runtime.written_folders import check_replaceable, new_folder, write_mark
from checkpoints_tools.core.atomic_output import OutputPlan
from checkpoints_tools.formats.safetensors_folder import untrained_tensors
from checkpoints_tools.megatron_to_hf import plan_hf_folder

WRITER = "bapo"
"""Name of a run in the mark of its exports."""

_SHARD_BYTES = 4 * 2**30


def export_hf(
    weights: Iterator[tuple[str, Tensor]], reference: Path, output: Path, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Export ``weights`` as a Hugging Face folder, with config, tokenizer and untrained tensors of
    ``reference``, the initial model's folder.

    Collective: every rank exhausts the iterator; rank 0 writes, holding one tensor in host memory. ``output``
    appears complete at the end and replaces an earlier export; any other content raises ConfigError. Raises
    ValueError if the weights are not the model's or have several dtypes, RunStopped if a write fails.
    """
    if dist.get_rank() == 0:
        check_replaceable(output, WRITER)
        with writing("the exported model", output), new_folder(output, WRITER) as folder:
            _write(weights, reference, folder, shard_bytes)
            write_mark(folder, WRITER)
    else:
        for _ in weights:
            pass
    dist.barrier()


def _write(weights: Iterator[tuple[str, Tensor]], reference: Path, folder: Path, shard_bytes: int) -> None:
    first, shape = next(weights), read_model_shape(reference)
    kind, shapes, kept = SAFETENSORS_TYPES[first[1].dtype], hf_tensors(shape), kept_in_float32(shape)
    wanted = {name: ("F32" if name in kept else kind, own) for name, own in shapes.items()}
    untrained = untrained_tensors(reference, shape)
    wanted |= {name: (tensor.weight_type, tensor.shape) for name, tensor in untrained.items()}
    plan = plan_hf_folder(reference, folder, wanted, {kind}, shard_bytes)
    plan.create()
    for name, tensor in checked_weights(chain([first], weights), shapes, {}):
        _write_tensor(plan, name, tensor)
    if untrained:
        reader = HfReader(reference)
        for name in untrained:
            _write_tensor(plan, name, reader.read(name))
    plan.complete()


def _write_tensor(plan: OutputPlan, name: str, tensor: Tensor) -> None:
    # A copy: torch resizes no storage that numpy has seen, and an offloaded policy resizes its own.
    plan.write(name, tensor.detach().to("cpu", copy=True).view(-1).view(torch.uint8).numpy().data)
