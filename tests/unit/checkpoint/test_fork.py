"""A fork is there whole or not at all, whatever happens to it, to the disk, and to the run that it leaves."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint import fork as forks
from bapo_megatron.checkpoint.fork import check_fork, make_fork
from bapo_megatron.checkpoint.fork_record import (
    ForkSource,
    changed_data,
    changes_algorithm,
    lineage_text,
    may_differ,
    read_fork,
)
from bapo_megatron.checkpoint.reader import latest_checkpoint
from bapo_megatron.checkpoint.run_directory import store_config
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, SourceConfig
from bapo_megatron.errors import CheckpointError, ConfigError, RunStopped
from bapo_megatron.runtime.run_paths import RunPaths
from tests.support.forked_commands import ROOT
from tests.support.saves import save, write_policy
from tests.support.small_disk import fill, small_disk

pytestmark = pytest.mark.usefixtures("one_process_group")
POLICY = ROOT / "recipes/demo/policy"


def config_of(directory: Path, steps: int = 40) -> RunConfig:
    return RunConfig("test", ModelConfig(POLICY), DataConfig(Path("d.jsonl")), steps=steps, run_dir=directory)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10 and 20, and of the middle of step 21."""
    run = tmp_path / "parent"
    run.mkdir()
    store_config(config_of(run))
    store = CheckpointStore(RunPaths(run), CheckpointConfig(keep_last=0))
    for step in (10, 20):
        save(store, step, write_policy(b"weights of %d" % step), {"version": step * 4})
    store.begin((20, 3), write_policy(b"half a step"), {})
    store.finalize(wait=True)
    return run


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of every file."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def fork(parent: Path, child: Path, step: int | None = None) -> None:
    """What ``bapo train --fork`` does, before and after the process group."""
    source = ForkSource(parent, step)
    check_fork(config_of(child), source)
    make_fork(config_of(child), source)


def weights(run: Path) -> bytes:
    latest = latest_checkpoint(RunPaths(run))
    assert latest is not None
    return (latest.policy / "deep/weights.bin").read_bytes()


@pytest.mark.parametrize(("step", "found"), [(10, 10), (20, 20), (None, 20)])
def test_it_begins_at_the_checkpoint_and_leaves_the_other_run_alone(
    step: int | None, found: int, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, child = content(parent), tmp_path / "child"
    fork(parent, child, step)
    assert weights(child) == b"weights of %d" % found
    assert content(parent) == before
    assert f"{child}: forked from {parent} at step {found}" in capsys.readouterr().out
    file = f"checkpoints/step_0000{found}/policy/deep/weights.bin"
    assert os.path.samefile(child / file, parent / file)  # no second copy on one disk
    shutil.rmtree(parent)
    fork(parent, child, step)  # the same command continues it
    assert weights(child) == b"weights of %d" % found


def test_one_within_a_step_is_no_beginning(parent: Path, tmp_path: Path) -> None:
    for step in (10, 20):
        shutil.rmtree(parent / f"checkpoints/step_0000{step}")
    with pytest.raises(
        ConfigError, match=r"no checkpoint between two steps can be taken; .* of the steps \[\]"
    ):
        fork(parent, tmp_path / "child")


class Death(BaseException):
    """The process has ended, and cleans nothing up."""


PARTS = {"sync": "sync_folder", "record": "write_fork"}


@pytest.mark.parametrize("moment", ["link 1", "link 3", *PARTS, "name", "named"])
def test_a_kill_leaves_no_run(
    moment: str, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, links, link, rename = tmp_path / "child", [], forks._link, Path.rename

    def die(*_: Any, **__: Any) -> Any:
        raise Death

    def link_or_die(source: Path, target: Path) -> None:
        links.append(target)
        if moment == f"link {len(links)}":
            raise Death
        link(source, target)

    def rename_and_die(path: Path, target: Path) -> None:
        if moment == "named":
            rename(path, target)
        raise Death

    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(forks, "remove_folder", lambda *_, **__: None)
        patch.setattr(forks, "READERS", 1)
        patch.setattr(forks, "_link", link_or_die)
        if moment in PARTS:
            patch.setattr(forks, PARTS[moment], die)
        if moment.startswith("name"):
            patch.setattr(Path, "rename", rename_and_die)
        fork(parent, child, 10)
    if moment == "named":
        check_fork(config_of(child), None)  # it is whole: it continues without the flag
    else:
        assert latest_checkpoint(RunPaths(child)) is None
        assert not (child / "config.json").exists()
    if moment == "name":
        with pytest.raises(ConfigError, match=rf"give --fork {parent}:10 to make it"):
            check_fork(config_of(child), None)
    fork(parent, child, 10)
    assert weights(child) == b"weights of 10"
    assert [path.name for path in (child / "checkpoints").iterdir()] == ["step_000010"]
    made = read_fork(child)
    assert made is not None
    assert (made.origin.run, made.origin.step) == (str(parent), 10)


def go_on(parent: Path, content: bytes, **config: int) -> None:
    """The other run makes the checkpoint of step 30."""
    store = CheckpointStore(RunPaths(parent), CheckpointConfig(**{"keep_last": 0, **config}), (20, 3))
    save(store, 30, write_policy(content), {})


def test_it_stays_where_it_has_begun(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is queued again says the same, and there is a newer checkpoint by then."""
    child = tmp_path / "child"
    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(Death))
        fork(parent, child)
    go_on(parent, b"later")
    fork(parent, child)
    assert weights(child) == b"weights of 20"
    fork(parent, child)
    with pytest.raises(ConfigError, match=f"is a fork of {parent} at step 20; leave --fork out"):
        fork(parent, child, 30)
    with pytest.raises(ConfigError, match="leave --fork out to continue it, or give another --run-dir"):
        fork(tmp_path / "elsewhere", child)


def test_a_full_disk_is_one_message_and_leaves_its_room(parent: Path, tmp_path: Path) -> None:
    go_on(parent, os.urandom(200_000))
    with small_disk(tmp_path / "disk", 400) as disk:
        child = disk / "child"
        child.mkdir()
        ballast = fill(disk, 100)
        with pytest.raises(RunStopped, match="the checkpoint of a fork could not be written .*No space left"):
            fork(parent, child)
        assert not [path for path in child.rglob("*") if path.is_file()]
        ballast.unlink()
        fork(parent, child)
        assert len(weights(child)) == 200_000


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("policy/deep/weights.bin", "weights.bin is missing, or its run has deleted it"),
        ("manifest.json", "manifest.json cannot be read"),
        ("trainer.json", "trainer.json is missing, or its run has deleted it"),
    ],
)
def test_a_checkpoint_that_lacks_a_file_is_not_taken(
    file: str, why: str, parent: Path, tmp_path: Path
) -> None:
    (parent / "checkpoints/step_000020" / file).unlink()
    with pytest.raises(ConfigError, match=rf"checkpoint of step 20 cannot be taken: .*{why}"):
        fork(parent, tmp_path / "a")
    assert not (tmp_path / "a/fork.json").exists()
    assert not list((tmp_path / "a").glob("checkpoints/*"))
    fork(parent, tmp_path / "a", 10)
    assert weights(tmp_path / "a") == b"weights of 10"


def test_a_changed_bit_ends_the_start_of_the_fork(parent: Path, tmp_path: Path) -> None:
    (path := parent / "checkpoints/step_000020/policy/deep/weights.bin").unlink()
    path.write_bytes(b"Weights of 20")
    fork(parent, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"policy/deep/weights\.bin differs from the manifest"):
        weights(tmp_path / "a")


def test_it_may_be_deleted_meanwhile(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Path) -> None:
        shutil.rmtree(parent / "checkpoints/step_000020")
        raise FileNotFoundError

    monkeypatch.setattr(forks, "_link", late)
    with pytest.raises(ConfigError, match="step 20 cannot be taken: .* its run has deleted it"):
        fork(parent, tmp_path / "child")


def test_a_link_out_of_the_checkpoint_is_not_followed(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"weights of 20")
    file = parent / "checkpoints/step_000020/policy/deep/weights.bin"
    file.unlink()
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"is a link to .*secret"):
        fork(parent, tmp_path / "child", 20)


@pytest.mark.parametrize(
    ("run", "step", "steps", "child", "says"),
    [
        ("parent", 15, 40, "new", r"no checkpoint .* can be taken; .* of the steps \[10, 20\]"),
        ("nothing", None, 40, "new", r"no checkpoint .* can be taken; .*nothing has those of the steps \[\]"),
        ("parent", None, 40, "parent", "is a run already, which is not a fork of it"),
        ("parent", None, 20, "new", "that of step 20, and steps=20: nothing would be left"),
        *(
            ("parent", None, 40, trace, "is a run already, which is not a fork of it")
            for trace in ("config.json", "checkpoints/step_000003")
        ),
    ],
)
def test_invalid_forks_are_refused_before_the_start(
    run: str, step: int | None, steps: int, child: str, says: str, parent: Path, tmp_path: Path
) -> None:
    directory = tmp_path / child.replace("/", "-")
    if child not in ("new", "parent"):
        (directory / child).mkdir(parents=True)
    with pytest.raises(ConfigError, match=says):
        check_fork(config_of(directory, steps), ForkSource(tmp_path / run, step))
    assert not (tmp_path / "new").exists()


def test_run_and_step_are_told_apart() -> None:
    assert ForkSource.of("runs/a") == ForkSource(Path("runs/a"), None)
    assert ForkSource.of("runs/a:120") == ForkSource(Path("runs/a"), 120)
    assert ForkSource.of("a:b") == ForkSource(Path("a:b"), None)
    assert str(ForkSource.of("runs/a:120")) == "runs/a:120"


def test_the_lineage_outlives_the_ancestors(parent: Path, tmp_path: Path) -> None:
    child, grandchild = tmp_path / "child", tmp_path / "grandchild"
    fork(parent, child, 10)
    assert lineage_text(child) == f"{parent} at step 10"
    ours = config_of(child)
    store_config(replace(ours, optimizer=replace(ours.optimizer, lr=3e-7), name="b", allow_change=("seed",)))
    fork(child, grandchild)
    shutil.rmtree(parent)
    store_config(config_of(grandchild, steps=50))
    assert lineage_text(grandchild) == (
        f"{child} at step 10, which was forked from {parent} at step 10; here optimizer.lr "
        f"{ours.optimizer.lr:g} (there 3e-07), steps 50 (there 40)"
    )
    shutil.rmtree(child)
    assert str(parent) in str(lineage_text(grandchild))
    assert lineage_text(tmp_path) is None


def test_settings_decide_which_state_a_fork_may_differ_in(parent: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    fork(parent, child)
    made, same = read_fork(child), config_of(child)
    assert made is not None
    assert (may_differ(same, made), changed_data(same, made)) == ({"sampler"}, None)
    assert may_differ(replace(same, steps=50), made) == {"sampler", "learning_rate"}
    cooler = replace(same, rollout=replace(same.rollout, temperature=0.5))
    assert may_differ(cooler, made) == {"sampler", "canary"}
    for changes in ({"route_mismatch_limit": 0.5}, {"reuse_epochs": 7}):
        other = replace(same, algorithm=replace(same.algorithm, **changes))
        assert changes_algorithm(other, made) is ("reuse_epochs" in changes)
    found = changed_data(replace(same, data=DataConfig(Path("e.jsonl"))), made)
    assert found == "data.path is e.jsonl, and was d.jsonl"
    for data in (DataConfig(Path("d.jsonl").absolute()), DataConfig(Path("d.jsonl"), max_prompt_tokens=7)):
        assert changed_data(replace(same, data=data), made) is None


def test_sources_may_differ_in_rewards_and_spelling(parent: Path, tmp_path: Path) -> None:
    """Neither decides which prompt comes when; a weight and another file do."""

    def with_sources(*sources: SourceConfig) -> RunConfig:
        return replace(config_of(tmp_path / "child"), data=DataConfig(sources=sources))

    store_config(replace(with_sources(SourceConfig(Path("d.jsonl"), 2.0)), run_dir=parent))
    fork(parent, tmp_path / "child")
    made = read_fork(tmp_path / "child")
    assert made is not None
    same = SourceConfig(Path("d.jsonl").absolute(), 2.0, "math_or_code")
    assert changed_data(with_sources(same), made) is None
    for other in (replace(same, weight=3.0), replace(same, path=Path("e.jsonl"))):
        assert "data.sources is" in str(changed_data(with_sources(other), made))
