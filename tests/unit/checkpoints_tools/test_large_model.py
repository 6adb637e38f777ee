"""A 32B model is converted both ways in little memory: sparse files, in which only some tensors have data."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bapo_megatron.hf.config import model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from checkpoints_tools.formats.safetensors_folder import read_safetensors_folder
from checkpoints_tools.formats.safetensors_writer import Sharding, plan_safetensors
from tests.support.checkpoint_models import config_of

pytestmark = pytest.mark.slow

MIB = 1 << 20
# Qwen2.5-32B.
CONFIG = config_of(
    "qwen2",
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
)
FILLED = [
    "model.layers.7.mlp.down_proj.weight",
    "model.layers.7.self_attn.k_proj.weight",
    "model.layers.63.mlp.gate_proj.weight",
    "model.layers.63.self_attn.q_proj.bias",
    "model.norm.weight",
]


def save_sparse_model(folder: Path, layers: int = 64) -> int:
    """65 GB of holes, but for ``FILLED``. Returns the number of parameters."""
    folder.mkdir()
    config = {**CONFIG, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: ("BF16", size) for name, size in hf_tensors(model_shape(config, "test")).items()}
    plan = plan_safetensors(tensors, folder, Sharding(4_000_000_000))
    plan.create()
    plan.complete()
    generator = random.Random(0)
    for name, tensor in read_safetensors_folder(folder).items():
        if name in FILLED:
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
    parameters = save_sparse_model(disk / "hf")
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
    assert save_sparse_model(hf, layers=16) * 2 > 18e9
    assert peak_mib(["to-megatron", hf, megatron, "--grid", 4]) < 400
    assert peak_mib(["reshard", megatron, stored, "--vocab-multiple", 1024]) < 400
    assert peak_mib(["inspect", stored, "--json"]) < 400
    assert peak_mib(["verify", hf, stored]) < 400
