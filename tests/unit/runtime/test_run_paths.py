"""The names in a run directory: as they were in every version, spelled once in Python and once in shell."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_megatron.runtime.run_paths import (
    MANIFEST,
    Moment,
    RunPaths,
    moment_of,
    step_entries,
    step_leftovers,
    step_name,
)

ROOT = Path(__file__).parents[3]
RUN = RunPaths(Path("run"))


def test_the_names_on_disk_stay_as_they_are() -> None:
    assert str(RUN.checkpoint(120)) == "run/checkpoints/step_000120"
    assert str(RUN.checkpoint(120, 3)) == "run/checkpoints/step_000120_update_003"
    assert str(RUN.step_export(1234567)) == "run/exports/step_1234567"
    assert str(RUN.evaluation_responses(0)) == "run/evaluation/step_000000.jsonl"
    assert str(RUN.server_log(2)) == "run/logs/server-2.log"
    singles = [
        *(RUN.config, RUN.lock, RUN.metrics, RUN.updates, RUN.evaluations, RUN.events, RUN.tensorboard),
        *(RUN.wandb_id, RUN.journal, RUN.weights, RUN.export, RUN.report, RUN.engines, RUN.slurm_state),
        *(RUN.stop, RUN.api_key),
    ]
    names = (
        "config.json .lock metrics.jsonl updates.jsonl evaluations.jsonl events.jsonl tensorboard wandb_id "
        "journal weights export report engines slurm.state stop api_key"
    )
    assert [str(path.relative_to("run")) for path in singles] == names.split()


@pytest.mark.parametrize("moment", [(0, 0), (10, 0), (10, 3), (999999, 999), (1000000, 1000)])
def test_a_step_name_round_trips_to_its_moment(moment: Moment) -> None:
    assert moment_of(step_name(*moment)) == moment


@pytest.mark.parametrize(
    "name",
    ["step_00010", "step_000010.copy", ".step_000010", "step_000010_update_01", "iter_000010", "step_"],
)
def test_other_names_have_none(name: str) -> None:
    assert moment_of(name) is None


def test_entries_and_leftovers_of_a_folder(tmp_path: Path) -> None:
    for name in (
        "step_000002.npz",
        "step_000010.npz",
        "step_000003.lost",
        "step_x.npz",
        ".step_000004.a.tmp",
        ".step_000004_update_002.deleted",
        ".step_000004.mine",
        ".step_mine.tmp",
    ):
        (tmp_path / name).touch()
    assert sorted(moment for moment, _ in step_entries(tmp_path, ".npz")) == [(2, 0), (10, 0)]
    assert [path.name for _, path in step_entries(tmp_path, ".lost")] == ["step_000003.lost"]
    assert sorted(path.name for path in step_leftovers(tmp_path)) == [
        ".step_000004.a.tmp",
        ".step_000004_update_002.deleted",
    ]
    assert list(step_leftovers(tmp_path, ".b.tmp")) == []
    assert list(step_entries(tmp_path / "absent")) == []


def test_the_shell_has_the_same_names() -> None:
    script = f". {ROOT}/slurm/lib/run_paths.sh; (set -o posix; set)"
    lines = subprocess.check_output(["bash", "-c", script], text=True, env={}).splitlines()
    shell = {line.partition("=")[0]: line.partition("=")[2].strip("'") for line in lines}
    mirror = {
        "BAPO_EVENTS_FILE": RUN.events.name,
        "BAPO_STATE_FILE": RUN.slurm_state.name,
        "BAPO_STOP_FILE": RUN.stop.name,
        "BAPO_API_KEY_FILE": RUN.api_key.name,
        "BAPO_LOGS_FOLDER": RUN.logs.name,
        "BAPO_ENGINES_FOLDER": RUN.engines.name,
        "BAPO_CHECKPOINTS_FOLDER": RUN.checkpoints.name,
        "BAPO_MANIFEST_FILE": MANIFEST,
    }
    pattern = shell["BAPO_STEP_PATTERN"]
    assert {name: value for name, value in shell.items() if name.startswith("BAPO_")} == {
        **mirror,
        "BAPO_STEP_PATTERN": pattern,
    }
    for name in (
        step_name(10),
        step_name(10, 3),
        step_name(10**7, 10**4),
        "step_00010",
        "step_000010_update_1",
    ):
        match = re.search(pattern, name)
        assert (match and (int(match[1]), int(match[3] or 0))) == moment_of(name)


NAMES = {path.name for path in (RUN.metrics, RUN.updates, RUN.evaluations, RUN.events, RUN.slurm_state)} | {
    *("checkpoints", "journal", "exports", "manifest.json", "trainer.json", "wandb_id")
}


def _spelled(path: Path) -> Iterator[str]:
    """The strings of a file, without its docstrings, that spell a name of a run directory."""
    for node in ast.walk(ast.parse(path.read_text())):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str):
                is_name = child.value in NAMES or re.search(r"(^|/|\.)step_($|[*({\d\\])", child.value)
                if is_name and not isinstance(node, ast.Expr):
                    yield child.value


@pytest.mark.parametrize("folder", ["bapo_megatron", "checkpoints_tools", "benchmarks"])
def test_no_other_module_spells_them(folder: str) -> None:
    found = {path.relative_to(ROOT): list(_spelled(path)) for path in (ROOT / folder).rglob("*.py")}
    spelled = {str(path): strings for path, strings in found.items() if strings}
    spelled.pop("bapo_megatron/runtime/run_paths.py", None)
    assert not spelled


def test_no_other_script_spells_them() -> None:
    for path in [
        *(ROOT / "slurm/lib").glob("*.sh"),
        ROOT / "slurm/task.sh",
        *(ROOT / "slurm").glob("*.sbatch"),
    ]:
        if path.name != "run_paths.sh":
            code = re.sub(r"(?m)(^| )# .*", "", path.read_text()).replace("$BAPO_RUN/.$BAPO_", "")
            assert not re.search(r"BAPO_RUN\"?/[a-z.]|step_[*0-9\[\^]|manifest\.json", code), path
