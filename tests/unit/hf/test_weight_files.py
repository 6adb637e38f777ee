"""Which files and tensors of a folder are the model: one answer for all that read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bapo_megatron.commands.verify import model_digests
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.hf.weight_files import INDEX, left_out_text, weight_files
from bapo_megatron.rollout.engines.local_engine import LocalModel, _weights_in
from bapo_megatron.rollout.engines.sglang.backend import SglangBackend
from tests.support.checkpoint_models import save_random_model
from tests.support.models import SingleWriter

READERS: dict[str, Callable[[Path], Any]] = {
    "reader": lambda folder: {name: list(HfReader(folder).shape(name)) for name in HfReader(folder).names},
    "hand-over": lambda folder: {
        name: list(shape) for name, shape in SingleWriter(folder / "w", folder)._shapes.items()
    },
    "engine": lambda folder: {name: list(tensor.shape) for name, tensor in _weights_in(folder)},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in three files with an index, beside which lie files that are not the model's."""
    model = save_random_model(tmp_path / "model", files=3)
    index = json.loads((model / INDEX).read_text())
    (model / INDEX).write_text(json.dumps({"metadata": {}, **index}))
    return model


def add_others(folder: Path) -> None:
    """As published folders have them: other names, the model's own names in another precision, no tensors."""
    own = load_file(weight_files(folder)[0])
    save_file({"mtp.layers.0.weight": torch.zeros(3)}, folder / "mtp.safetensors")
    save_file({name: tensor.float() for name, tensor in own.items()}, folder / "model.fp32.safetensors")
    (folder / "consolidated.safetensors").write_bytes(b"of another program")


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_a_file_that_the_index_does_not_name_is_not_the_model(
    read: Callable[[Path], Any], folder: Path
) -> None:
    before, digests = read(folder), model_digests(folder)
    add_others(folder)
    assert read(folder) == before
    assert model_digests(folder) == digests
    HfReader(folder).check(read_model_shape(folder))
    SglangBackend().check_weights(folder)
    assert str(left_out_text(folder)).endswith(
        "not part of it: consolidated.safetensors, model.fp32.safetensors, mtp.safetensors"
    )


@pytest.mark.parametrize("read", [*READERS.values(), lambda folder: LocalModel(folder, 1), "check"])
def test_a_tensor_that_the_index_leaves_out_is_refused_by_all(read: Any, folder: Path) -> None:
    """Libraries would load it: transformers does not tie an output layer that a file holds."""
    index = json.loads((folder / INDEX).read_text())
    shard = folder / index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        ConfigError, match=rf"{shard.name} holds tensor model.norm.weight, which {INDEX} does not"
    ):
        HfReader(folder).check(read_model_shape(folder)) if read == "check" else read(folder)


def test_one_file_without_an_index_is_the_model_and_engines_that_read_more_are_refused(
    tmp_path: Path,
) -> None:
    folder = save_random_model(tmp_path / "model")
    whole = {name: read(folder) for name, read in READERS.items()}
    assert left_out_text(folder) is None
    add_others(folder)
    assert {name: read(folder) for name, read in READERS.items()} == whole
    assert "the model is all of model.safetensors; not part" in str(left_out_text(folder))
    with pytest.raises(ConfigError, match=r"holds model.safetensors and consolidated.*SGLang would load all"):
        SglangBackend().check_weights(folder)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_files_of_other_names_without_an_index_are_no_model(
    read: Callable[[Path], Any], folder: Path
) -> None:
    (folder / INDEX).unlink()
    with pytest.raises(OSError, match="no file named model.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    with pytest.raises(ConfigError, match="holds neither model.safetensors nor"):
        read(folder)
