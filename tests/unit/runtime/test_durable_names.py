"""What gets its final name is whole and on disk: a power failure leaves all of it, or no such name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config import CheckpointConfig
from bapo_megatron.hf.weight_files import INDEX
from bapo_megatron.rollout.engines.sent_weights import FILE_NAME, SentDigests
from bapo_megatron.rollout.weight_sync.disk import WeightStaging
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_paths import RunPaths
from checkpoints_tools.core.atomic_output import PARTIAL, OutputPlan, atomic_output
from tests.support.models import save_tiny_model
from tests.support.saves import save, write_policy

pytestmark = pytest.mark.usefixtures("one_process_group")


class Renames:
    """The renames of a test, by the new name: the files, and those whose content was not synced before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.files: dict[str, set[str]] = {}
        self.unsynced: dict[str, set[str]] = {}
        self._synced: set[tuple[int, int, int]] = set()
        self._fsync = os.fsync
        patch.setattr(os, "fsync", self._sync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._noting(getattr(os, name)))

    def _sync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self._synced.add(_content(os.fstat(descriptor)))

    def _noting(self, move: Callable[..., None]) -> Callable[..., None]:
        def noted(source: Any, target: Any) -> None:
            top = Path(source)
            files = [path for path in top.rglob("*") if path.is_file()] if top.is_dir() else [top]
            name = Path(target).name
            self.files[name] = {path.relative_to(top).as_posix() for path in files}
            lost = {path.name for path in files if _content(path.stat()) not in self._synced}
            self.unsynced |= {name: lost} if lost else {}
            move(source, target)

        return noted


def _content(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def a_file(folder: Path) -> None:
    write_atomically(folder / "kept.json", "{}")


def a_checkpoint(folder: Path) -> None:
    save(CheckpointStore(RunPaths(folder), CheckpointConfig()), 20, write_policy(b"x"), {})


def an_output_of_the_tools(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with atomic_output(folder / "output") as made:
        data = made / f"model.safetensors{PARTIAL}"
        plan = OutputPlan(sizes={data: 4}, last={made / "config.json": b"{}"})
        plan.around[data].append((0, b"data"))
        plan.copied[made / "tokenizer.json"] = folder / "tokenizer.json"
        plan.create()
        plan.complete()


def weights_for_engines(folder: Path) -> None:
    staging = WeightStaging(folder / "weights", save_tiny_model("qwen2", folder / "model"))
    staging.prepare(3)
    staging.publish(3, {}, SentDigests(({"norm": "1"},)))


DURABLE: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "kept.json": (a_file, {"."}),
    "step_000020": (a_checkpoint, {"manifest.json", "trainer.json", "policy/deep/weights.bin"}),
    "output": (an_output_of_the_tools, {"config.json", "model.safetensors", "tokenizer.json"}),
}


@pytest.mark.parametrize("name", DURABLE)
def test_what_gets_its_name_is_whole_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, files = DURABLE[name]
    renames = Renames(monkeypatch)
    make(tmp_path)
    assert files <= renames.files[name]
    assert renames.unsynced == {}


def test_weights_get_their_name_with_the_digests_that_engines_must_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may load a folder as soon as it has its name: without digests nothing is compared."""
    renames = Renames(monkeypatch)
    weights_for_engines(tmp_path)
    assert renames.files["v3"] == {"config.json", INDEX, FILE_NAME}
