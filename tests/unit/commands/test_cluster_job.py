"""A recipe on a cluster: nodes, refusals, and the words of the submission."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.commands.cluster.cluster_file import ClusterFile, load_cluster
from bapo_megatron.commands.cluster.job import ClusterJob, check_job
from bapo_megatron.commands.cluster.submit import SubmitCommand, nemo_run_python
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.rehearsal.records import Peak, RankResult

ROOT = Path(__file__).parents[3]
LARGE = ROOT / "recipes/bp_math_32b_64k.py"


def job(cluster: ClusterFile | None = None, **parallel: object) -> ClusterJob:
    config = load_recipe(LARGE, RunConfig)
    config = replace(config, parallel=replace(config.parallel, **parallel))
    cluster = cluster or load_cluster(ROOT / "slurm/clusters/h100_pyxis.toml")
    return ClusterJob(config, cluster, LARGE, ("--steps", "3"), ROOT, ROOT / "slurm")


def test_nodes_follow_from_the_layout() -> None:
    large = job()
    assert (large.trainer_nodes, large.processes, large.servers_per_node) == (8, 64, 2)
    assert check_job(large, force=False) == []
    assert [(group["role"], group["nodes"], group["tasks"]) for group in large.groups()] == [
        ("trainer", 8, 8),
        ("rollout", 8, 1),
    ]


def test_a_recipe_that_does_not_fit_is_refused_unless_forced() -> None:
    cluster = replace(load_cluster(ROOT / "slurm/clusters/h100_pyxis.toml"), trainer_nodes=1)
    small = job(cluster, context=1, data=None)
    with pytest.raises(ConfigError, match=r"does not fit h100-80gb:\nstage 0 needs .*\n(?s:.*)--force"):
        check_job(small, force=False)
    assert any("stage 0 needs" in line for line in check_job(small, force=True))


def test_a_rehearsal_refuses_a_recipe_that_fails_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal itself is stood in for: a rank that fails, and one that needs 75 GB of 72."""
    error = "update 1: bapo_megatron/policy/passes.py:155: RuntimeError: tensors on cpu and cuda:0"
    peak = {"save": Peak(72 * 10**9, {})}
    found = [RankResult(0, {}, "torch", 1, error=error), RankResult(1, {}, "torch", 1, gpu=peak)]
    monkeypatch.setattr("bapo_megatron.commands.cluster.job.rehearse_job", lambda *_: found)
    assert check_job(job(), force=False) == []
    with pytest.raises(ConfigError, match=r"would not run on h100-80gb:\nrank 0 fails in update 1: .*:155"):
        check_job(job(), force=False, rehearse=True)
    warnings = check_job(job(), force=True, rehearse=True)
    assert warnings[-1] == "rank 1 needs 75.0 GB in save; a GPU may use 72.0"
    without = replace(load_cluster(ROOT / "slurm/clusters/h100_pyxis.toml"), gpu=None)
    with pytest.raises(ConfigError, match="does not say which `gpu`"):
        check_job(job(without), force=False, rehearse=True)


def test_engines_that_hold_no_sequence_are_refused() -> None:
    large = job()
    sglang = replace(large.config.rollout.sglang, tensor=1)
    config = replace(large.config, rollout=replace(large.config.rollout, sglang=sglang))
    with pytest.raises(ConfigError, match="no sequence of 67584 tokens: raise rollout.sglang.tensor"):
        check_job(replace(large, config=config), force=False)


def test_processes_must_hold_whole_replicas() -> None:
    cluster = replace(load_cluster(ROOT / "slurm/clusters/h100_pyxis.toml"), trainer_nodes=9)
    with pytest.raises(ConfigError, match="72 processes, no multiple of the 64"):
        check_job(job(cluster), force=True)
    with pytest.raises(ConfigError, match="parallel.data=1 needs 64 processes, and 16 nodes have 128"):
        check_job(job(replace(cluster, trainer_nodes=16)), force=True)


def test_named_servers_and_rollout_nodes_exclude_each_other() -> None:
    both = job()
    sglang = replace(both.config.rollout.sglang, urls=("http://a:1",))
    config = replace(both.config, rollout=replace(both.config.rollout, sglang=sglang))
    with pytest.raises(ConfigError, match="set rollout_nodes = 0"):
        check_job(replace(both, config=config), force=True)


def test_a_group_of_one_node_is_warned_of() -> None:
    cluster = replace(load_cluster(ROOT / "slurm/clusters/h100_pyxis.toml"), rollout_nodes=1)
    assert any("has one node" in line for line in check_job(job(cluster), force=False))


def test_paths_that_nemo_run_would_change_are_refused() -> None:
    with pytest.raises(ConfigError, match="rename the folder"):
        check_job(replace(job(), root=Path("/home/x/nemo_run")), force=True)


def test_arguments_survive_the_shell() -> None:
    odd = replace(job(), flags=("--reward.format-pattern", "a b'c"))
    words = shlex.split(odd.arguments())
    assert words[1:3] == ["--reward.format-pattern", "a b'c"]
    assert words[-2:] == ["--run-dir", str(ROOT / "runs/bp_math_32b_64k")]


def test_settings_hold_what_the_cluster_file_says() -> None:
    found = job().settings()
    assert found["BAPO_LEAD_S"] == "900"
    assert found["BAPO_MOUNTS"] == "/shared:/shared,/scratch:/scratch"
    assert found["BAPO_HEALTH_FLAGS"] == "--memory-gb 1000 --disk-gb 500 --clock-s 5"
    assert found["NCCL_DEBUG"] == "WARN"


def test_the_command_line() -> None:
    command = SubmitCommand.of(["r.py", "--steps", "3", "--cluster=c.toml", "--dry-run", "--seed=1"])
    assert command == SubmitCommand(Path("r.py"), Path("c.toml"), True, False, ("--steps", "3", "--seed=1"))
    assert SubmitCommand.of(["r.py", "--cluster", "c.toml", "--rehearse"]).rehearse
    assert not command.rehearse
    with pytest.raises(ConfigError, match="the recipe comes first"):
        SubmitCommand.of(["--cluster", "c.toml"])
    with pytest.raises(ConfigError, match="has examples of FILE"):
        SubmitCommand.of(["r.py", "--cluster"])


def test_without_nemo_run_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_NEMO_RUN_PYTHON", "/no/python")
    with pytest.raises(ConfigError, match="BAPO_NEMO_RUN_PYTHON=/no/python does not exist"):
        nemo_run_python()
    monkeypatch.delenv("BAPO_NEMO_RUN_PYTHON")
    monkeypatch.setattr("bapo_megatron.commands.cluster.submit._TEMPLATES", Path("/no/slurm"))
    with pytest.raises(ConfigError, match="make nemo-run"):
        nemo_run_python(lambda _name: None)
