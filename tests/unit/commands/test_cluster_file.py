"""Cluster files: the shipped examples are valid, and invalid fields are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bapo_megatron.commands.cluster.cluster_file import ClusterFile, load_cluster
from bapo_megatron.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[3] / "slurm/clusters").glob("*.toml"))
WHOLE = 'account = "a"\npartition = "p"\ntime = "1:00:00"\ngpus_per_node = 8\n'


def test_example_cluster_files_are_valid() -> None:
    clusters = {path.stem: load_cluster(path) for path in EXAMPLES}
    assert [*clusters] == ["a100_modules", "h100_pyxis", "local_test"]
    assert all(cluster.account and cluster.margin_s < cluster.lead_s for cluster in clusters.values())


def loaded(folder: Path, text: str) -> ClusterFile:
    (folder / "c.toml").write_text(text)
    return load_cluster(folder / "c.toml")


TIMES = {"24:00:00": 86400, "10:30": 630, "9": 540, "1-2": 93600, "1-02:03": 93780, "2-00:00:07": 172807}


@pytest.mark.parametrize(("time", "seconds"), TIMES.items())
def test_stop_signal_lead_is_below_the_time_limit(tmp_path: Path, time: str, seconds: int) -> None:
    whole = WHOLE.replace("1:00:00", time)
    assert loaded(tmp_path, f"lead_s = {seconds - 1}\n{whole}").lead_s == seconds - 1
    with pytest.raises(ConfigError, match=f"lead_s = {seconds} must be below time = .{time}., {seconds} s"):
        loaded(tmp_path, f"lead_s = {seconds}\n{whole}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("partion = 'x'\n", "partion is unknown; there are "),
        ("[budgets]\ncrashs = 1\n", "budgets.crashs is unknown; there are "),
        ("qos = 3\n", "qos = 3 must be text or None"),
        ("time = 24\n", "time = 24 must be text"),
        ("time = 'one day'\n", "'one day' is not a time"),
        ("gpu = 'h100'\n", "gpu = 'h100' must be one of "),
        ("margin_s = 700\n", "margin_s = 700 must be below lead_s = 600"),
        ("mounts = ['/data']\ncontainer = 'c'\n", "mounts: '/data' must be HOST:CONTAINER"),
        ("mounts = ['/a:/b']\n", "mounts are of a container, and there is none"),
        ("[environment]\n'NCCL-DEBUG' = 'INFO'\n", "environment.NCCL-DEBUG: a variable's name has"),
        ("[sbatch]\ncpus-per-task = '4'\n", "sbatch.cpus-per-task: the key cpus_per_task of this file"),
        ("[sbatch]\nno_requeue = ''\n", "sbatch.no_requeue: a key of this file sets it, or the job itself"),
        ("[sbatch]\ncontainer-image = 'a'\n", "sbatch.container-image: the job's script runs outside"),
        ("[health]\nprobe = 'maybe'\n", "health.probe = 'maybe' must be one of on, off"),
        ("[health]\nclock_s = 0\n", "health.clock_s = 0 must be above 0"),
        ("[sbatch]\n'--exclude' = 'n3'\n", "sbatch.'--exclude' is not a flag of sbatch: write its name"),
    ],
)
def test_invalid_fields_are_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as failure:
        loaded(tmp_path, WHOLE + text if "time = " not in text else WHOLE.replace('time = "1:00:00"\n', text))
    assert str(tmp_path / "c.toml") in str(failure.value)


def test_missing_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is missing") as failure:
        loaded(tmp_path, "qos = 'x'\n")
    for name in ("account", "partition", "time", "gpus_per_node"):
        assert f"{name} is missing" in str(failure.value)


def test_tables_become_fields(tmp_path: Path) -> None:
    flags = 'gres = "gpu:h100:8,nvme:1"\nexclude = "n3"\nexclusive = "user"\nspread-job = ""\n'
    tables = f'[sbatch]\n{flags}[environment]\nno_proxy = "a,b"\n[budgets]\ncrash = 9\n'
    # Files of before the margin was 60 have such leads; the job takes half of them (bapo_fit_margin).
    cluster = loaded(tmp_path, f"lead_s = 45\n{WHOLE}{tables}")
    assert set(cluster.sbatch) == {"gres", "exclude", "exclusive", "spread-job"}
    assert (cluster.environment, cluster.lead_s) == ({"no_proxy": "a,b"}, 45)
    assert (cluster.budgets.crash, cluster.budgets.preemption) == (9, 100)


def test_an_invalid_cluster_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="slurm/clusters/ has examples"):
        load_cluster(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("account = ")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster(tmp_path / "bad.toml")
