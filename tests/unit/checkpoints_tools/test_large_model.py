"""Models of 32B and 235B are converted both ways in little memory: sparse files, few tensors with data."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.config import model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.hf.safetensors_folder import read_safetensors_folder
from checkpoints_tools import to_megatron
from checkpoints_tools.formats.safetensors_folder import plan_safetensors
from tests.support.cluster_recipes import FOLDER

pytestmark = pytest.mark.slow

MIB = 1 << 20
CONFIG = json.loads((FOLDER / "shapes/DeepSeek-R1-Distill-Qwen-32B/config.json").read_text())
FILLED = [
    "model.layers.7.mlp.down_proj.weight",
    "model.layers.7.self_attn.k_proj.weight",
    "model.layers.63.mlp.gate_proj.weight",
    "model.layers.63.self_attn.q_proj.bias",
    "model.norm.weight",
]
EXPERTS = json.loads((FOLDER / "shapes/Qwen3-235B-A22B/config.json").read_text()) | {
    "moe_intermediate_size": 4
}
"""With narrow experts: what grows with a model of many experts is the table of its tensors."""
FILLED_EXPERTS = [
    "model.layers.0.mlp.experts.0.gate_proj.weight",
    "model.layers.7.mlp.experts.127.down_proj.weight",
    "model.layers.6.mlp.gate.weight",
    "model.layers.5.self_attn.v_proj.weight",
    "model.layers.11.mlp.experts.77.up_proj.weight",
    "model.layers.11.self_attn.q_norm.weight",
]


def save_sparse_model(folder: Path, config: Mapping[str, Any], filled: Sequence[str] = FILLED) -> int:
    """Holes, 65 GB for ``CONFIG``, but for tensors ``filled``. Returns the number of parameters."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: ("BF16", size) for name, size in hf_tensors(model_shape(dict(config), "test")).items()}
    plan = plan_safetensors(tensors, folder, 4_000_000_000)
    plan.create()
    plan.complete()
    generator = random.Random(0)
    for name, tensor in read_safetensors_folder(folder).items():
        if name in filled:
            with tensor.blocks[0].file.open("r+b") as file:
                file.seek(tensor.blocks[0].position)
                for _ in range(0, tensor.nbytes, MIB):
                    file.write(generator.randbytes(min(MIB, tensor.nbytes)))
    return sum(tensor.nbytes for tensor in plan.tensors.values()) // 2


# Of its own: what the system reports of a child includes the memory of the process that started it.
_PEAK = """
import re, sys
from checkpoints_tools.cli import run
code = run(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
sys.exit(code)
"""


def peak_mib(arguments: Sequence[object]) -> float:
    """Of a ``bapo-ckpt`` process that succeeds."""
    command = [sys.executable, "-c", _PEAK, *map(str, arguments)]
    if "inspect" not in arguments:
        command += ["--threads", "8"]
    return int(subprocess.check_output(command, text=True).splitlines()[-1]) / 1024


def content(folder: Path, name: str) -> bytes:
    tensor = read_safetensors_folder(folder)[name]
    with tensor.blocks[0].file.open("rb") as file:
        file.seek(tensor.blocks[0].position)
        return file.read(tensor.nbytes)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: pytest would keep gigabytes until its third run from now."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_a_32b_model_takes_less_than_128_mib(disk: Path) -> None:
    parameters = save_sparse_model(disk / "hf", CONFIG)
    assert 32.7e9 < parameters < 32.8e9
    grid = ["--grid", "1"]  # with more, more bands of the way back hold an edge between chunks, and so data
    assert peak_mib(["to-megatron", disk / "hf", disk / "megatron", *grid]) < 128
    assert peak_mib(["to-hf", disk / "megatron", disk / "back"]) < 128
    apparent = sum(path.stat().st_size for path in (disk / "back").iterdir())
    assert apparent > 65e9
    for name in FILLED:
        assert content(disk / "back", name) == content(disk / "hf", name), name
    assert content(disk / "back", "model.layers.9.input_layernorm.weight") == bytes(2 * 5120)
    on_disk = sum(path.stat().st_blocks * 512 for path in (disk / "back").iterdir())
    assert on_disk < 6e9, "most holes stay holes"


def test_a_large_model_is_resharded_and_compared_in_less_than_400_mib(disk: Path) -> None:
    """A quarter of a 32B model's layers: tensors are as large, all files together 40 times the limit."""
    hf, megatron, stored = disk / "hf", disk / "megatron", disk / "stored"
    assert save_sparse_model(hf, {**CONFIG, "num_hidden_layers": 16}) * 2 > 18e9
    assert peak_mib(["to-megatron", hf, megatron, "--grid", 4]) < 400
    assert peak_mib(["reshard", megatron, stored, "--vocab-multiple", 1024]) < 400
    assert peak_mib(["inspect", stored, "--json"]) < 400
    assert peak_mib(["verify", hf, stored]) < 400


def test_a_mixture_of_128_experts_takes_little_memory(disk: Path) -> None:
    """Twelve layers of the 94: what is held grows with the number of tensors, not with their size."""
    hf, megatron, back = disk / "hf", disk / "megatron", disk / "back"
    save_sparse_model(hf, {**EXPERTS, "num_hidden_layers": 12}, FILLED_EXPERTS)
    assert peak_mib(["to-megatron", hf, megatron]) < 128
    assert peak_mib(["to-hf", megatron, back]) < 128
    found, before = read_safetensors_folder(back), read_safetensors_folder(hf)
    assert len(before) == 12 * (3 * 128 + 9) + 3
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    for name in FILLED_EXPERTS:
        assert content(back, name) == content(hf, name), name
        assert any(content(back, name)), name
    for name in ("model.layers.11.mlp.experts.76.up_proj.weight", "model.layers.8.mlp.gate.weight"):
        assert not any(content(back, name)), name


def test_one_expert_or_layer_too_many_or_too_few_is_refused(disk: Path) -> None:
    save_sparse_model(disk / "hf", EXPERTS, ())
    for change, message in (
        ({"num_experts": 127}, r"experts\.127\.\w+\.weight is not of this model(.*\n)+.* and 368 more"),
        ({"num_experts": 129}, r"experts\.128\.\w+\.weight is missing\n(.*\n)+.* and 368 more"),
        ({"num_hidden_layers": 95}, r"layers\.94\.[\w.]+\.weight is missing\n(.*\n)+.* and 385 more"),
    ):
        (disk / "hf/config.json").write_text(json.dumps({**EXPERTS, **change}))
        with pytest.raises(CheckpointError, match=message):
            to_megatron(disk / "hf", disk / "megatron")
        assert not (disk / "megatron").exists()
