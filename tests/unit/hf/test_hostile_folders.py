"""A model folder that somebody else made: names and links lead nowhere else, no code of it runs, odd values
end in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bapo_megatron.data.fields import RowError
from bapo_megatron.data.prompts import prompt_token_ids
from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.export import _copy_reference
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.rollout.engines.local.model import _load
from bapo_megatron.runtime.files import check_files_inside, file_below, file_inside
from checkpoints_tools.carried import carried_files
from checkpoints_tools.formats.safetensors_folder import read_safetensors, read_safetensors_folder

POLICY = Path(__file__).parents[2] / "fixtures/policy"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a small model, and a file outside of it."""
    (tmp_path / "secret").write_text("{}")
    return Path(shutil.copytree(POLICY, tmp_path / "model"))


NO_FILE = "which is no file of the folder|is no plain file|cannot be a file"
NO_INDEX = r"index\.json(: tensor lm_head| cannot be read: |: weight_map is no table| lists no tensors)"


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "x" * 5000, "\x1b[2J/../secret"]
)
def test_names_that_are_no_file_of_the_folder(name: str, model: Path) -> None:
    with pytest.raises(CheckpointError, match=NO_FILE) as caught:
        file_inside(model, name)
    assert str(caught.value).isprintable()  # one line, without a terminal's codes
    index = {"weight_map": {"lm_head.weight": name}}
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (HfReader, read_safetensors_folder):
        with pytest.raises(ConfigError, match=f"{NO_FILE}|which names no file beside it|cannot be read: "):
            read(model)


@pytest.mark.parametrize("entry", [None, 3, ["a"], {}])
@pytest.mark.parametrize("read", [HfReader, read_safetensors_folder])
def test_an_index_of_other_types(read: Callable[[Path], Any], entry: Any, model: Path) -> None:
    for content in ({"weight_map": {"lm_head.weight": entry}}, {"weight_map": entry}, entry):
        (model / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=NO_INDEX):
            read(model)


def _to_secret(path: Path) -> None:
    path.unlink()
    path.symlink_to("../secret")


def _to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _fifo(path: Path) -> None:
    """Whoever opened it would wait for ever."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("attack", [_to_secret, _to_itself, _fifo])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_model_shape),
        ("model.safetensors", HfReader),
        ("model.safetensors", read_safetensors_folder),
        ("tokenizer.json", load_tokenizer),
        ("chat_template.jinja", load_tokenizer),
        ("tokenizer_config.json", carried_files),
        ("generation_config.json", lambda folder: _copy_reference(folder, folder.parent)),
        ("config.json", lambda folder: _load(str(folder), "float32", "cpu")),
    ],
)
def test_links_outside_and_what_is_no_file(
    name: str, read: Callable[[Path], Any], attack: Callable[[Path], None], model: Path
) -> None:
    path = model / name
    path.touch()
    attack(path)
    with pytest.raises(CheckpointError, match=name):
        read(model)


def test_a_folder_of_templates_is_no_way_out(model: Path) -> None:
    (model / "additional_chat_templates").symlink_to("..")
    with pytest.raises(CheckpointError, match="is a link"):
        check_files_inside(model)


def test_the_hubs_cache_may_link_to_its_blobs_and_no_further(tmp_path: Path) -> None:
    """models--O--N/{blobs/DIGEST, snapshots/REVISION/NAME -> ../../blobs/DIGEST}; the cache is a link."""
    cache = tmp_path / "disk/models--O--N"
    snapshot = cache / "snapshots/0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(POLICY.iterdir())):
        shutil.copy(path, cache / f"blobs/{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "hub").symlink_to("disk")
    found = tmp_path / "hub/models--O--N/snapshots/0123"
    assert read_model_shape(found).layers > 0
    assert read_safetensors_folder(found)
    assert load_tokenizer(found).chat_template
    (snapshot / "README.md").symlink_to("../../refs")
    with pytest.raises(CheckpointError, match=r"README\.md is a link to"):
        read_model_shape(found)


def test_links_within_a_folder_are_files(model: Path) -> None:
    (model / "alias.json").symlink_to("config.json")
    check_files_inside(model)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "policy/../../secret"])
def test_a_manifest_names_files_below_it(name: str, model: Path) -> None:
    with pytest.raises(CheckpointError, match="no file below"):
        file_below(model, name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**12),  # a table of that many names
        ("num_hidden_layers", float("inf")),
        ("num_hidden_layers", float("nan")),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", {}),
        ("num_hidden_layers", int("9" * 4000)),
        ("vocab_size", 2**40),
        ("num_attention_heads", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_parameters", [1]),
        ("rope_parameters", {"rope_theta": -1.0}),
        ("model_type", ["qwen2"]),
        ("model_type", "x" * 10**5),
        ("hidden_act", {"a": 1}),
    ],
)
def test_odd_values_of_a_config_are_one_line(field: str, value: Any, model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=re.escape(f"{path}: ")) as caught:
        read_model_shape(model)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(model))


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b"\xff\xfe", b"{", b"[]", b'{"a": ' + b"9" * 5000 + b"}", b" " * (1 << 25)]
)
def test_a_config_that_is_no_json_object_is_one_line(text: bytes, model: Path) -> None:
    (model / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_shape(model)


CODE = "from pathlib import Path\nPath(__file__).with_name('PROOF').touch()\nclass Evil: ...\n"


@pytest.mark.parametrize("read", [load_tokenizer, lambda folder: _load(str(folder), "float32", "cpu")])
def test_no_code_of_a_folder_runs(
    read: Callable[[Path], Any], model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without ``trust_remote_code=False`` transformers asks at the terminal; here the answer would be yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (model / "evil.py").write_text(CODE.replace("__file__", repr(str(model / "x"))))
    auto = {
        "AutoConfig": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", None],
        "AutoModelForCausalLM": "evil.Evil",
    }
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((model / name).read_text()) if (model / name).exists() else {}
        content |= {"auto_map": auto, "model_type": "evil", "tokenizer_class": "Evil"}
        (model / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="custom code"):
        read(model)
    assert not (model / "PROOF").exists()


class Attack:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


def test_weights_in_a_pickle_are_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Attack(model / "PROOF")}, model / "pytorch_model.bin")
    for read in (HfReader, read_safetensors_folder, lambda folder: _load(str(folder), "float32", "cpu")):
        with pytest.raises(
            ConfigError, match="holds neither model.safetensors|no file named model.safetensors"
        ):
            read(model)
    assert not (model / "PROOF").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% set _ = messages.append(1) %}",
        "{{ self.__init__.__globals__ }}",
        "{{ '%s' | format(messages.__class__) | attr('__len__') }}{{ ''|attr('__class__') | attr('mro') }}",
    ],
)
def test_a_chat_template_stays_in_its_sandbox(template: str, model: Path) -> None:
    (model / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(model)
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(RowError, match="refused by the tokenizer's chat template"):
        prompt_token_ids(messages, tokenizer)
    assert messages == [{"role": "user", "content": "a"}]


def _file(header: dict[str, Any] | bytes, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _tensor(begin: int, end: int, shape: tuple[int, ...] = (2, 2)) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        _file({"a": _tensor(0, 16)}, bytes(16), length=2**63),
        _file({"a": _tensor(0, 16)}, bytes(16), length=2**64 - 1),
        _file({"a": _tensor(0, 16)}, bytes(15)),
        _file({"a": _tensor(0, 16), "b": _tensor(8, 24)}, bytes(24)),
        _file({"a": _tensor(16, 0)}, bytes(16)),
        _file({"a": _tensor(0, 2**62, (2**30, 2**30))}, bytes(16)),
        _file({"a": _tensor(-16, 0)}, bytes(16)),
        _file({"a": _tensor(0, 16, (-2, -2))}, bytes(16)),
        _file({"a": _tensor(0, 16, (2**63, 2))}, bytes(16)),
        _file(b"[" * 100_000, bytes(16)),
        _file({"a": _tensor(0, 16)}, bytes(32)),
        b"",
        b"\xff" * 7,
    ],
)
def test_safetensors_whose_header_lies(content: bytes, model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(content)
    for read in (lambda: read_safetensors(path), lambda: HfReader(model)):
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            read()


def test_a_whole_file_is_read(model: Path) -> None:
    save_file({"a": torch.ones(2, 2)}, model / "model.safetensors")
    assert [tensor.name for tensor in read_safetensors(model / "model.safetensors")] == ["a"]
