"""Models with tensors as large or as many as those of 32B and 235B are converted in little memory."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.hf.config import model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.hf.safetensors_folder import read_safetensors_folder
from checkpoints_tools.formats.safetensors_folder import plan_safetensors
from tests.support.cluster_recipes import FOLDER

pytestmark = pytest.mark.slow

MIB = 1 << 20
LARGE = json.loads((FOLDER / "shapes/DeepSeek-R1-Distill-Qwen-32B/config.json").read_text()) | {
    "num_hidden_layers": 1,
    "vocab_size": 4096,
}
EXPERTS = json.loads((FOLDER / "shapes/Qwen3-235B-A22B/config.json").read_text()) | {
    "moe_intermediate_size": 4
}
"""With narrow experts: what grows with a model of many experts is the table of its tensors."""


def save_sparse_model(folder: Path, config: Mapping[str, Any], filled: str = "") -> int:
    """Holes, but for tensors that end in ``filled``. Returns the number of bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: ("BF16", size) for name, size in hf_tensors(model_shape(dict(config), "test")).items()}
    plan = plan_safetensors(tensors, folder, 4_000_000_000)
    plan.create()
    plan.complete()
    generator = random.Random(0)
    for name, tensor in read_safetensors_folder(folder).items():
        if filled and name.endswith(filled):
            with tensor.blocks[0].file.open("r+b") as file:
                file.seek(tensor.blocks[0].position)
                for _ in range(0, tensor.nbytes, MIB):
                    file.write(generator.randbytes(min(MIB, tensor.nbytes)))
    return sum(tensor.nbytes for tensor in plan.tensors.values())


# Of its own: what the system reports of a child includes the memory of the process that started it.
_PEAK = """
import re, sys
from checkpoints_tools.cli import run
code = run(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
sys.exit(code)
"""


def peak_mib(*arguments: object) -> float:
    """Of a ``bapo-ckpt`` process that succeeds."""
    command = [sys.executable, "-c", _PEAK, *map(str, arguments)]
    if "inspect" not in arguments:
        command += ["--threads", "8"]
    return int(subprocess.check_output(command, text=True).splitlines()[-1]) / 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: pytest would keep gigabytes until its third run from now."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_large_tensors_take_little_memory(disk: Path) -> None:
    """A layer of a 32B model: all files together are eight times the limit."""
    hf, megatron, back, stored = (disk / name for name in ("hf", "megatron", "back", "stored"))
    assert save_sparse_model(hf, LARGE, "proj.weight") > 8 * 128 * MIB * 0.98
    assert peak_mib("to-megatron", hf, megatron, "--grid", 4) < 128
    assert peak_mib("to-hf", megatron, back) < 128
    assert peak_mib("verify", hf, back) < 400  # and it succeeds: they are equal
    shutil.rmtree(back)
    assert peak_mib("reshard", megatron, stored, "--vocab-multiple", 1024) < 400
    assert peak_mib("inspect", stored, "--json") < 400


def test_a_mixture_of_128_experts_takes_little_memory(disk: Path) -> None:
    """Twelve layers of the 94: what is held grows with the number of tensors, not with their size."""
    hf, megatron, back = disk / "hf", disk / "megatron", disk / "back"
    small = {"num_hidden_layers": 12, "num_attention_heads": 8, "vocab_size": 1000}
    save_sparse_model(hf, {**EXPERTS, **small}, "77.up_proj.weight")
    assert len(read_safetensors_folder(hf)) == 12 * (3 * 128 + 9) + 3
    assert peak_mib("to-megatron", hf, megatron) < 128
    assert peak_mib("to-hf", megatron, back) < 128
    assert peak_mib("verify", hf, back) < 400
