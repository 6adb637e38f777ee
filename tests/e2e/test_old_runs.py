"""Runs, checkpoints and recipes of an earlier commit: they continue as they would have there, bit for bit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.run_directory import (
    check_same_run,
    store_config,
)
from bapo_megatron.checkpoint.store import digest
from bapo_megatron.commands.train_flags import train_flags
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.written_folders import MARK
from checkpoints_tools import cli as checkpoints
from tests.fixtures.make_run import (
    HERE,
    LOGS,
    RECIPES,
    ROOT,
    STOPPED_WITHIN,
    file_digests,
    machine,
    rows,
    train,
    unpack,
    weights_digest,
)
from tests.support.forked_commands import start_bapo

pytestmark = pytest.mark.e2e

EXPECTED = json.loads((ROOT / HERE / "expected.json").read_text())
SAME_BITS = machine() == EXPECTED["machine"]
"""Whether this machine adds in the order of the one that made the fixtures."""


Continued = tuple[Path, dict[str, list[dict[str, Any]]], int, str]
"""A run's directory, its rows before, and how its continuation has ended."""


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Continued]:
    """The stored runs, continued."""
    folder = tmp_path_factory.mktemp("old")
    found = {}
    for kind in RECIPES:
        run_dir = unpack(HERE / kind / "run.tar.xz", folder / kind)
        before = {log: rows(run_dir / log) for log in LOGS}
        command = start_bapo(*train(kind, run_dir)[1:])
        output = command.communicate(timeout=900)[0].decode()
        found[kind] = run_dir, before, command.wait(), output
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECIPES)
def test_a_run_that_was_stopped_within_a_step_goes_on(kind: str, continued: dict[str, Continued]) -> None:
    run_dir, before, code, output = continued[kind]
    assert code == 0, output[-3000:]
    assert f"resume at step {STOPPED_WITHIN}" in output, output
    for log in LOGS:
        theirs = [_kept(row) for row in before[log] + rows(ROOT / HERE / kind / log)]
        ours = [_former(row, theirs[-1]) for row in rows(run_dir / log)]
        done = len(before[log])
        if SAME_BITS:
            assert ours[:done] == theirs[:done], log
        _assert_alike(ours, theirs)
    if SAME_BITS:
        assert weights_digest(run_dir / "export") == EXPECTED["weights"][kind]


@pytest.mark.slow
def test_a_run_whose_checkpoint_names_code_ends_in_one_line(tmp_path: Path) -> None:
    """Its manifest fits the changed file: whoever can write the one can write the other."""
    run_dir, proof = unpack(HERE / "bapo/run.tar.xz", tmp_path / "run"), tmp_path / "PROOF"
    [path] = run_dir.glob("checkpoints/*/policy/.metadata")
    path.write_bytes(f"cposix\nsystem\n(X{chr(len(bytes(proof)) + 6)}\0\0\0touch {proof}tR.".encode("latin1"))
    manifest = path.parents[1] / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["policy/.metadata"] = digest(path)
    manifest.write_text(json.dumps(content))
    refused = start_bapo(*train("bapo", run_dir)[1:])
    output = refused.communicate(timeout=400)[0].decode()
    assert refused.returncode == 2, output[-3000:]
    assert f"error: {path} names posix.system, which no checkpoint needs; nothing was run" in output
    assert "Traceback" not in output
    assert not proof.exists()
    pickle.loads(path.read_bytes())
    assert proof.exists()  # the attack would have worked


@pytest.mark.parametrize("allowed", [False, True])
def test_a_run_goes_on_with_the_defaults_that_it_began_with(
    allowed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--allow-change`` changes over. A run of today's is not touched."""
    run_dir, recipe = unpack(HERE / "bapo/run.tar.xz", tmp_path / "run"), ROOT / RECIPES["bapo"]
    names = ("reward.on_failure", "optimizer.fused")
    flags = ["--allow-change", *names] if allowed else []
    config = train_flags("train", [str(recipe), f"--run-dir={run_dir}", *flags]).run
    said = capsys.readouterr().err
    check_same_run(config)
    assert config.optimizer.fused == allowed  # last bits of a step on a CPU depend on it
    if allowed:
        assert (said, config.reward.on_failure) == ("", "leave_out")
        return
    assert "had the reward reward.failed=0, and continues so" in said
    assert config.reward.on_failure == "value"

    store_config(config)  # as its continuation does: it is still an old run
    assert train_flags("train", [str(recipe), f"--run-dir={run_dir}"]).run == config
    (run_dir / "config.json").unlink()
    store_config(config)  # as of a run that begins today with the former values
    with pytest.raises(ConfigError, match="reward.on_failure: 'value' in the run, 'leave_out' now"):
        check_same_run(train_flags("train", [str(recipe), f"--run-dir={run_dir}"]).run)


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    """``row`` without the readings of the bounds search that are gone."""
    return {name: value for name, value in row.items() if not name.startswith("contribution/")}


def _former(row: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """``row`` without the metrics that were added since, which rows ``like`` those of the time lack.

    What was sampled, trained on or not, had the names that are the batch's today.
    """
    then = {name: row.get(f"sampled/{name}", value) for name, value in row.items()}
    return {name: then[name] for name in (*like, *row) if name in then and ("/" not in name or name in like)}


def _assert_alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """To rounding; the same fields have no value."""
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for our_row, their_row in zip(ours, theirs, strict=True):
        for name, value in their_row.items():
            if isinstance(value, float):
                expected = pytest.approx(_conditioned(name, value), rel=5e-3, abs=1e-5)
                assert _conditioned(name, our_row[name]) == expected, name
            else:
                assert our_row[name] == value, name


def _conditioned(name: str, value: float) -> float:
    """A signed share's inverse, else the value: such a share has a sum below it that may all but cancel."""
    return 1 / value if "_signed" in name and value else value


def test_an_old_checkpoint_becomes_the_same_hugging_face_folder(tmp_path: Path) -> None:
    """Rounding has no part in it: on every machine."""
    megatron = unpack(HERE / "checkpoint.tar.xz", tmp_path / "megatron")
    assert checkpoints.run(["to-hf", str(megatron), str(tmp_path / "hf")]) == 0
    assert {**file_digests(tmp_path / "hf"), MARK: None} == {**EXPECTED["converted"], MARK: None}
    assert (tmp_path / "hf" / MARK).is_file()
    assert weights_digest(tmp_path / "hf") == weights_digest(ROOT / HERE / "policy")
