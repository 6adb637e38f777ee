"""A model folder that somebody else made: names and links lead nowhere else, no code of it runs, odd values
end in one line."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bapo_megatron.checkpoint.reader import manifest_of
from bapo_megatron.data.prompts import prompt_token_ids
from bapo_megatron.data.rows import RowError
from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.evaluation.run import _report, find_checkpoint, model_digest
from bapo_megatron.hf.config import carried_files, read_model_shape
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.rollout.engines.local_engine import _load
from bapo_megatron.rollout.engines.requests import stop_token_ids
from bapo_megatron.rollout.sampler.process import _record_event
from bapo_megatron.runtime.files import check_files_inside, file_below, file_inside
from checkpoints_tools import cli, to_hf, to_megatron
from checkpoints_tools.formats.locate import locate
from tests.support.checkpoint_models import folder_bytes, save_random_model

POLICY = Path(__file__).parents[2] / "fixtures/policy"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a small model, and a file outside of it."""
    (tmp_path / "secret").write_text("{}")
    return Path(shutil.copytree(POLICY, tmp_path / "model"))


NO_FILE = "which is not a file of the folder|is not a plain file|cannot be a file"


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
    with pytest.raises(ConfigError, match=f"{NO_FILE}|which names no file beside it|cannot be read: "):
        HfReader(model)


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """An attack that puts something else in the place of a file."""

    def attack(path: Path) -> None:
        path.unlink()
        make(path)

    return attack


_to_secret = instead(lambda path: path.symlink_to("../secret"))
_to_itself = instead(lambda path: path.symlink_to(path.name))
_fifo = instead(os.mkfifo)  # whoever opened it would wait for ever
_digits = instead(lambda path: path.write_text("9" * 5000))
_endless = instead(lambda path: path.symlink_to("/dev/zero"))


def _enormous(path: Path) -> None:
    os.truncate(path, 1 << 40)  # a hole


@pytest.mark.parametrize("attack", [_to_secret, _to_itself, _fifo])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_model_shape),
        ("model.safetensors", HfReader),
        ("tokenizer.json", load_tokenizer),
        ("chat_template.jinja", load_tokenizer),
        ("tokenizer_config.json", carried_files),
        ("generation_config.json", carried_files),
        ("config.json", lambda folder: _load(folder, "float32", "cpu")),
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


@pytest.mark.parametrize("attack", [_fifo, _endless, _digits, _enormous])
def test_a_manifest_is_a_plain_file_of_bounded_size_and_names_files_below_it(
    attack: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "step_000010/manifest.json"
    path.parent.mkdir()
    path.touch()
    attack(path)
    with pytest.raises(CheckpointError, match=path.name):
        locate(path.parent)
    assert "cannot be read" in str(manifest_of(path.parent)[1])
    for name in ("../secret", "/etc/passwd", "policy/../../secret"):
        with pytest.raises(CheckpointError, match="not a file below"):
            file_below(path.parent, name)


def test_a_folder_of_templates_is_no_way_out(model: Path) -> None:
    (model / "alias.json").symlink_to("config.json")
    check_files_inside(model)  # links within the folder are files
    (model / "additional_chat_templates").symlink_to("..")
    with pytest.raises(CheckpointError, match="is a link"):
        check_files_inside(model)


def test_a_snapshot_of_the_hubs_cache_is_a_model(tmp_path: Path) -> None:
    """As huggingface_hub lays it out, for what trains, converts and evaluates."""
    plain = save_random_model(tmp_path / "plain", files=2)
    cache = tmp_path / "hub/models--org--Model-1.5B"
    snapshot = cache / f"snapshots/{'0123456789' * 4}"
    (cache / "blobs").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(snapshot.name)
    for path in (path for path in plain.rglob("*") if path.is_file()):
        place = snapshot / path.relative_to(plain)
        place.parent.mkdir(parents=True, exist_ok=True)
        blob = cache / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        place.symlink_to(os.path.relpath(blob, place.parent))
    HfReader(snapshot).check(read_model_shape(snapshot))
    to_megatron(snapshot, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(plain)
    assert model_digest(find_checkpoint(snapshot, "latest").folder) == model_digest(plain)
    (tmp_path / "link").symlink_to(snapshot)
    assert read_model_shape(tmp_path / "link") == read_model_shape(plain)
    farm = tmp_path / "farm"
    farm.mkdir()
    for path in snapshot.glob("*.*"):
        (farm / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match=r"(?s)is a link to .*hf download MODEL --local-dir"):
        read_model_shape(farm)
    (snapshot / "README.md").symlink_to("../../refs/main")
    with pytest.raises(CheckpointError, match=r"README\.md is a link to"):
        read_model_shape(snapshot)


def test_a_pointer_of_git_lfs_names_the_command_that_fetches_the_file(model: Path) -> None:
    """A clone without git-lfs; the library's own message speaks of a header that is too large."""
    [weights] = model.glob("*.safetensors")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3945441312\n")
    with pytest.raises(ConfigError, match=rf"{weights} is a pointer of git-lfs.*`git lfs pull`"):
        HfReader(model)


@pytest.mark.parametrize(
    "text",
    [
        '{"num_hidden_layers": 1000000000000, ',  # a table of that many names
        '{"rms_norm_eps": NaN, ',
        '{"model_type": ["qwen2"], ',
        '{"model_type": "' + "x" * 10**5 + '", ',
        *("[" * 200_000, "\xff\xfe", "[]", " " * (1 << 25)),
    ],
)
def test_odd_values_of_a_config_are_one_line(text: str, model: Path) -> None:
    path = model / "config.json"
    rest = json.loads(path.read_text())
    if text.startswith("{"):
        text += json.dumps({name: rest[name] for name in rest if name not in text})[1:]
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=re.escape(str(path))) as caught:
        read_model_shape(model)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(model))


CODE = "from pathlib import Path\nPath(__file__).with_name('PROOF').touch()\nclass Evil: ...\n"


@pytest.mark.parametrize("read", [load_tokenizer, lambda folder: _load(folder, "float32", "cpu")])
def test_no_code_of_a_folder_runs(
    read: Callable[[Path], Any], model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without ``trust_remote_code=False`` transformers asks at the terminal; here the answer would be yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (model / "evil.py").write_text(CODE.replace("__file__", repr(str(model / "x"))))
    auto = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    auto |= {"AutoTokenizer": ["evil.Evil", None]}
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
    for read in (HfReader, lambda folder: _load(folder, "float32", "cpu")):
        with pytest.raises(ConfigError, match="holds neither model.safetensors|no file named model"):
            read(model)
    assert not (model / "PROOF").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_a_chat_template_stays_in_its_sandbox(template: str, model: Path) -> None:
    (model / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(model)
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(RowError, match="refused by the tokenizer's chat template"):
        prompt_token_ids(messages, tokenizer)
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "generation_config.json cannot be read"),
        ('{"eos_token_id": ["x"]}', r"eos_token_id=\['x'\]: it must be a token id or several"),
    ],
)
def test_stop_tokens_that_are_none_are_one_line(model: Path, text: str, says: str) -> None:
    (model / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        stop_token_ids(model, SimpleNamespace(eos_token_id=1))


def test_no_name_of_a_folder_reaches_the_terminal_raw(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A tensor's name that sets the window's title, by each command of bapo-ckpt that would show it."""
    name = "a\x1b]0;title\x07\x1b[2J"
    save_file({name: torch.zeros(1)}, model / "model.safetensors")
    commands = (["inspect"], ["verify", str(POLICY)], ["to-megatron", str(tmp_path / "out")], ["no\x1b[2J"])
    codes = [cli.run([command[0], str(model), *command[1:]]) for command in commands]
    said = capfd.readouterr()
    assert codes == [0, 1, 2, 2]
    assert r"a\x1b]0;title\x07\x1b[2J  F32 [1]" in said.out
    assert r"a\x1b]0;title\x07\x1b[2J is missing in the second" in said.out
    assert said.err.count("error: ") == 2
    assert "\x1b" not in said.out + said.err


def test_texts_of_servers_reach_no_terminal_raw(capfd: pytest.CaptureFixture[str]) -> None:
    """An answer of a server is part of the events that a run and an evaluation print."""
    for show in (partial(_record_event, []), _report):
        show("engine_lost", reason="status 500: \x1b]0;title\x07")
    assert capfd.readouterr().out.count(r"engine lost: reason=status 500: \x1b]0;title\x07") == 2
