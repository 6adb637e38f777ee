"""Every command of the table in docs/checkpoints.md, as it stands there, on checkpoints of the trainer."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from bapo_megatron.config import ParallelConfig
from bapo_megatron.runtime.files import sha256_of
from checkpoints_tools import cli, inspect_checkpoint, verify
from checkpoints_tools.commands import COMMANDS
from tests.support.legacy_checkpoints import save_legacy
from tests.support.models import VOCAB, random_samples, save_tiny_model
from tests.support.policies import small_policy, updates_of
from tests.support.saves import complete
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

TABLE = Path(__file__).parents[2] / "docs/checkpoints.md"


def rows() -> list[tuple[str, str]]:
    """What one has, and what one types."""
    return re.findall(r"^\| (.+?) \| .+? \| `bapo-ckpt (.+?)` \|$", TABLE.read_text(), re.MULTILINE)


def manifest(folder: Path) -> None:
    """What makes a folder a whole checkpoint of a run."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    entries = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in files
    }
    (folder / "manifest.json").write_text(json.dumps({"files": entries}))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that TP4 x PP2 can split."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    return save_tiny_model("qwen2", folder, num_key_value_heads=4)


def steps(folder: Path, dtype: str, first: Path, second: Path) -> None:
    """A checkpoint, another update, and another checkpoint."""
    policy = small_policy(folder, ParallelConfig(tensor=2), dtype)
    for path in (first, second):
        updates_of(policy, random_samples(6, seed=3))
        complete(policy.save(path))


@pytest.fixture(scope="module")
def run(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory, with checkpoints of steps 120 and 130."""
    run = tmp_path_factory.mktemp("run") / "run"
    folders = [run / f"checkpoints/step_{step:06d}" for step in (120, 130)]
    for folder in folders:
        folder.mkdir(parents=True)
    parallel = ParallelConfig(tensor=2)
    run_layout(steps, parallel, hf, "bfloat16", *(folder / "policy" for folder in folders))
    for folder in folders:
        manifest(folder)
    (run / "config.json").write_text(json.dumps({"format": 1, "config": {"model.hf_path": str(hf)}}))
    return run


@pytest.fixture(scope="module")
def checkpoints(hf: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What stands for CKPT, by what the row says that one has."""
    root = tmp_path_factory.mktemp("checkpoints")
    found = {"torch_dist": run / "checkpoints/step_000130/policy"}
    assert cli.run(["to-megatron", str(hf), str(root / "fp32")]) == 0
    assert cli.run(["to-hf", str(run), str(root / "hf")]) == 0
    save_legacy(root / "hf", root / "legacy", tensor=2)
    shutil.rmtree(root / "legacy/release/hf")  # Megatron-LM writes none
    assert cli.run(["reshard", str(run), str(root / "padded"), "--vocab-multiple", "96"]) == 0
    return found | {"fp32 weights": root / "fp32", "legacy": root / "legacy", "padded": root / "padded"}


def test_the_table_has_every_command() -> None:
    assert len(rows()) == 15
    assert {command.split()[0] for _, command in rows()} == COMMANDS.keys()


@pytest.mark.parametrize(("have", "command"), rows())
def test_a_row_does_what_it_says(
    have: str, command: str, hf: Path, run: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    kinds = ("legacy", "padded", "fp32 weights")
    source = checkpoints[next((kind for kind in kinds if kind in have), "torch_dist")]
    output = tmp_path / "out"
    places = {"HF": hf, "RUN": run, "CKPT": source, "PATH": source, "A": run, "B": source, "OUT": output}
    words = command.split()
    assert cli.run([str(places.get(word, word)) for word in words]) == 0
    if "OUT" not in words:
        return
    found = inspect_checkpoint(output)
    if "optimizer" in words:
        assert found.dtypes.keys() == {"F32"}
    elif "bf16" in words:
        assert found.dtypes.keys() == {"BF16"}
    elif "fp8-block" in words:
        assert found.dtypes.keys() == {"BF16", "F32", "F8_E4M3"}
    else:
        step = "120" if "--step" in words else "latest"
        assert verify(places[words[1]], output, hf, step, weights_only=True).equal
    if words[0] == "reshard":
        shapes = {group.key: group.shape for group in found.keys}
        rows = shapes["embedding.word_embeddings.weight"][0]
        assert rows == (1024 if "--vocab-multiple" in words else VOCAB)
        assert (found.optimizer is not None) == ("--weights-only" not in words and "legacy" not in have)


def test_the_steps_of_the_run_differ(run: Path) -> None:
    """Or the rows with and without a step would show nothing."""
    first, second = (run / f"checkpoints/step_{step:06d}" for step in (120, 130))
    assert not verify(first, second).equal
