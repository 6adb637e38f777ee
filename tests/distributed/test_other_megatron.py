"""The other megatron-core that is tested: suites under it, a run that changes to it and back, and memory.

The processes of the installed one are forked (fork_server.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.planning.job import shape_folder
from checkpoints_tools import reshard, verify
from checkpoints_tools.inspection import inspect_checkpoint
from tests.e2e.conftest import whole  # noqa: F401  # the run that was never stopped
from tests.support.cluster_recipes import cluster_recipe
from tests.support.forked_commands import ROOT, start_bapo
from tests.support.metrics import results
from tests.support.models import EXPERT_HYBRID, EXPERTS, HYBRID
from tests.support.other_megatron import OTHER, launcher, other_folder, run_tests
from tests.support.short_runs import Command, exported, finish, start, wait_for_steps

pytestmark = [pytest.mark.slow, pytest.mark.integration]

KINDS = "tests/distributed/test_kinds_of_layers.py::test_layout_agrees_with_one_process"
SUITES = {
    "layouts": [
        "tests/unit/policy/test_layers.py",
        "tests/unit/policy/test_delta_net.py",
        *(
            f"tests/distributed/test_layouts.py::test_layout_agrees_with_one_process[{text}]"
            for text in ("tp2-sp full", "pp2-vpp2", "dp2-cp2")
        ),
        *(
            f"{KINDS}[{EXPERTS}-{text}]"
            for text in ("tp2-sp", "tp2-sp-etp2", "dp2-tp2-sp-ep2-etp2", "dp2-pp2-vpp2-ep2")
        ),
        *(f"{KINDS}[{HYBRID}-{text}]" for text in ("tp2-sp-cp2", "pp2-vpp2 layers1+2+3+2 full")),
        f"{KINDS}[{EXPERT_HYBRID}-tp2-sp-ep2]",
        "tests/distributed/test_route_replay.py::test_layout_agrees_with_one_process[dp2-ep2 selective]",
    ],
    "checkpoints and rehearsals": [
        *("-m", "not slow", "tests/distributed/test_checkpoints.py"),
        *(
            f"tests/distributed/{name}"
            for name in (
                "test_checkpoints_of_kinds.py::test_every_layout_loads_weights_and_optimizer_bit_for_bit",
                "test_checkpoint_formats.py::test_what_the_trainer_saves_is_read_bitwise",
                "test_checkpoint_formats.py::test_what_megatron_saves_for_each_rank_is_read_bitwise",
                "test_rehearsal.py::test_peaks_and_collectives_are_those_of_real_ranks",
            )
        ),
    ],
}
"""Tests that run under the other megatron-core. It reduces the gradients of experts that TP repeats, or cuts,
in its own way: faults 6080 and 5916 of Megatron-LM."""


@pytest.mark.parametrize("name", SUITES)
def test_the_quick_tests_pass_under_the_other(name: str) -> None:
    assert " passed" in run_tests(other_folder(), *SUITES[name])


@pytest.fixture(params=["to the other", "back"])
def first_and_second(request: pytest.FixtureRequest) -> tuple[Path | None, Path | None]:
    other = other_folder()
    return (None, other) if request.param == "to the other" else (other, None)


def start_under(folder: Path | None, run: Path) -> Command:
    return start(run, launcher=() if folder is None else launcher(folder))


def test_a_run_killed_under_one_goes_on_under_the_other(
    whole: Path,  # noqa: F811
    tmp_path: Path,
    first_and_second: tuple[Path | None, Path | None],
) -> None:
    """Metrics and weights are those of a run that was never stopped; bapo-ckpt keeps both layouts."""
    first, second = first_and_second
    run = tmp_path / "run"
    process = start_under(first, run)
    wait_for_steps(process, run, 3)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    layouts = {None: "common.pt", OTHER: "common_state/shard_0_1"}
    found = inspect_checkpoint(run)
    assert found.common_state == layouts[first and OTHER]
    reshard(run, tmp_path / "resharded")
    assert inspect_checkpoint(tmp_path / "resharded").common_state == found.common_state
    assert not verify(run, tmp_path / "resharded").differences
    assert "resume" in finish(start_under(second, run))
    assert inspect_checkpoint(run).common_state == layouts[second and OTHER]
    for ours, theirs in zip(results(run), results(whole), strict=True):
        for name in ("policy/grad_norm", "policy/loss", "policy/entropy", "bapo/clip_low", "reward/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-6), name
    same = exported(whole)
    for name, tensor in exported(run).items():
        assert (tensor - same[name]).abs().max() <= 1e-6, name


RECIPE = cluster_recipe("bp_math_32b_64k")
LAYERS = 4
"""Of the model's 64, which are all alike."""


def peaks(folder: Path | None, model: Path, file: Path) -> dict[str, float]:
    """Peak memory of rank 0 of the 32B recipe by phase, on torch's layers, which both have."""
    words = ["rehearse", str(RECIPE), f"--model.hf-path={model}", "--layers=torch", f"--json={file}"]
    if folder is None:
        finish(start_bapo(*words))
    else:
        subprocess.run([*launcher(folder), "-m", "bapo_megatron.cli", *words], cwd=ROOT, check=True)
    return json.loads(file.read_text())["peak_gb"]  # type: ignore[no-any-return]


def test_a_rank_of_32b_takes_the_same_memory_under_both(tmp_path: Path) -> None:
    shape = shape_folder(RECIPE, load_recipe(RECIPE, RunConfig).model.hf_path) / "config.json"
    shorter = json.loads(shape.read_text()) | {"num_hidden_layers": LAYERS}
    (tmp_path / "config.json").write_text(json.dumps(shorter))
    ours, theirs = (peaks(folder, tmp_path, tmp_path / "found.json") for folder in (None, other_folder()))
    assert {"update 2", "save", "load"} <= ours.keys()
    assert theirs == pytest.approx(ours, rel=0.01)
