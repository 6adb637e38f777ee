"""An export: what it may replace, and the type that its config.json gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bapo_megatron.checkpoint.export import WRITER, export_hf
from bapo_megatron.config import ModelConfig, ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.runtime import written_folders
from bapo_megatron.runtime.written_folders import MARK, check_replaceable, move_foreign_aside
from bapo_megatron.trainer.preflight import check_model
from checkpoints_tools import to_hf, to_megatron
from tests.support.checkpoint_models import folder_bytes, load_tensors, save_random_model
from tests.support.fp8 import in_bfloat16
from tests.support.models import EXPERTS, HYBRID, HYBRIDS
from tests.unit.checkpoints_tools.test_fp8_hybrids import published
from tests.unit.checkpoints_tools.test_hybrid_folders import save_multimodal

pytestmark = pytest.mark.usefixtures("one_process_group")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "hf", files=2)


def export(model: Path, output: Path) -> None:
    export_hf(iter(load_tensors(model).items()), model, output)


def test_an_export_replaces_an_export(model: Path, tmp_path: Path) -> None:
    """And has every chat template, of which transformers keeps all but the first in a folder of their own."""
    output = tmp_path / "export"
    (model / MARK).write_text("{}")  # of the first model: it is not carried along
    export(model, output)
    export(model, output)
    assert json.loads((output / MARK).read_text())["written_by"] == "bapo"
    assert load_tensors(output).keys() == load_tensors(model).keys()
    assert (output / "additional_chat_templates/tools.jinja").read_text() == "{{ tools }}"
    (output / "notes.md").touch()
    with pytest.raises(ConfigError, match=r"holds notes\.md, which was put there by something else"):
        export(model, output)
    assert (output / "notes.md").exists()


@pytest.mark.parametrize("shard_bytes", [2**30, 20_000])
@pytest.mark.parametrize("tied", [False, True])
def test_an_export_is_the_folder_of_a_conversion(tied: bool, shard_bytes: int, tmp_path: Path) -> None:
    """Every byte, but for the mark of who wrote it."""
    model = save_random_model(tmp_path / "hf", EXPERTS, tie_word_embeddings=tied)
    to_megatron(model, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "converted", shard_bytes=shard_bytes)
    tensors = load_tensors(model)
    weights = ((name, tensors[name]) for name in hf_tensors(read_model_shape(model)))
    export_hf(weights, model, tmp_path / "exported", shard_bytes)
    expected = folder_bytes(tmp_path / "converted")
    assert folder_bytes(tmp_path / "exported") == expected
    assert ("model.safetensors" in expected) == (shard_bytes == 2**30)


def export_by_name(model: Path, output: Path) -> None:
    """Of the trained weights alone, as a run exports them."""
    reader = HfReader(model)
    export_hf(((name, reader.read(name)) for name in hf_tensors(read_model_shape(model))), model, output)


@pytest.mark.parametrize("family", HYBRIDS)
def test_an_export_of_a_multimodal_model_has_what_is_not_trained(family: str, tmp_path: Path) -> None:
    """And A_log and Gated DeltaNet's norm in float32, beside weights in bfloat16; experts fused."""
    model = save_multimodal(tmp_path / "hf", family=family)
    export_by_name(model, tmp_path / "exported")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "exported" / file).read_bytes() == (model / file).read_bytes(), file


def test_an_export_of_a_model_in_fp8_has_what_is_not_trained_in_bfloat16(tmp_path: Path) -> None:
    model = published(tmp_path / "hf", HYBRID)
    wanted = in_bfloat16(model)
    export_by_name(model, tmp_path / "exported")
    found = load_tensors(tmp_path / "exported")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert found["mtp.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16


def test_weights_that_are_not_all_of_the_model_are_no_export(model: Path, tmp_path: Path) -> None:
    weights = list(load_tensors(model).items())
    (name, first), half = weights[0], [(name, tensor.float()) for name, tensor in weights[:1]]
    for wrong, says in (
        (weights[1:], f"1 weights are missing: {name}"),
        ([*weights[1:], *half], rf"{name} has {first.numel() * 4} bytes, not {first.nbytes}"),
        ([*weights, ("lm", first)], "the model has no weight lm"),
    ):
        with pytest.raises(ValueError, match=says):
            export_hf(iter(wrong), model, tmp_path / "export")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def run_folder(path: Path) -> None:
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.json").write_text("{}")


def test_others_are_kept(model: Path, tmp_path: Path) -> None:
    """What they are: tests/unit/checkpoints_tools/test_replaced_output.py."""
    output = tmp_path / "output"
    run_folder(output)
    for refused in (lambda: check_replaceable(output, WRITER), lambda: export(model, output)):
        with pytest.raises(ConfigError, match=r"output .*has no .*an earlier version"):
            refused()
    # A run's own export never fails for it at the run's end.
    assert move_foreign_aside(output, WRITER) == tmp_path / "output.kept-1"
    assert (tmp_path / "output.kept-1/checkpoints").exists()
    export(model, output)
    assert move_foreign_aside(output, WRITER) is None


def test_a_kill_between_renames(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old export is beside its name then; a next one that fails brings it back."""
    output = tmp_path / "export"
    export(model, output)
    output.rename(tmp_path / ".export.bapo.replaced")

    def fails(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(written_folders, "sync_folder", fails)
    with pytest.raises(OSError, match="no"):
        export(model, output)
    assert load_tensors(output).keys() == load_tensors(model).keys()


def test_an_export_has_none_of_the_first_model_s_weights_in_any_format(model: Path, tmp_path: Path) -> None:
    """A reader that prefers another format would load the untrained model without a word."""
    others = ("model-q8.gguf", "tf_model.h5", "flax_model.msgpack", "pytorch_model.bin", "model.onnx")
    carried = {"LICENSE", "modeling_own.py", "preprocessor_config.json"}
    for name in (*others, "adapter_config.json", *carried):
        (model / name).write_text("{}")
    export(model, tmp_path / "export")
    to_megatron(model, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    for folder in (tmp_path / "export", tmp_path / "megatron/release/hf", tmp_path / "back"):
        found = {path.name for path in folder.iterdir()}
        assert found >= {*carried, "chat_template.jinja"}
        assert not found & {*others, "adapter_config.json"}


def test_a_malformed_generation_config(model: Path, tmp_path: Path) -> None:
    """It goes along with weights for hours of training, and no engine loads them."""
    good = '{"temperature": 1, "top_k": null, "eos_token_id": [1, 2], "do_sample": false}'
    (model / "generation_config.json").write_text(good)
    to_megatron(model, tmp_path / "megatron")
    for folder in (model, tmp_path / "megatron/release/hf"):
        (folder / "generation_config.json").write_text('{"temperature": 0.6')
    for work in (
        lambda: check_model(ModelConfig(model, "float32"), ParallelConfig()),
        lambda: to_megatron(model, tmp_path / "out"),
        lambda: to_hf(tmp_path / "megatron", tmp_path / "out"),
        lambda: export(model, tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read: Expecting ',' delim"):
            work()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_config_json_has_the_type_of_the_tensors(kind: str, model: Path, tmp_path: Path) -> None:
    """By both names that transformers has had for it."""
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    weights = {name: tensor.to(getattr(torch, kind)) for name, tensor in load_tensors(model).items()}
    export_hf(iter(weights.items()), model, tmp_path / "export")
    found = json.loads((tmp_path / "export/config.json").read_text())
    assert (found["torch_dtype"], found["dtype"]) == (kind, kind)
