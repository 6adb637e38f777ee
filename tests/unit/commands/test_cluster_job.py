"""A recipe on a cluster: nodes, refusals, and the words of the submission."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.commands.cluster.cluster_file import ClusterFile, load_cluster
from bapo_megatron.commands.cluster.job import ClusterJob, check_job
from bapo_megatron.commands.cluster.submit import (
    SubmitCommand,
    _live_job,
    launch,
    nemo_run_python,
    submission_environment,
    submit,
)
from bapo_megatron.commands.train_flags import train_flags
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from tests.support.altered import altered
from tests.support.executables import executable

ROOT = Path(__file__).parents[3]
LARGE = ROOT / "recipes/bp_math_32b_64k.py"


def pyxis() -> ClusterFile:
    """The example for pyxis, whose container mounts this checkout."""
    cluster = load_cluster(ROOT / "slurm/clusters/h100_pyxis.toml")
    return replace(cluster, mounts=(*cluster.mounts, f"{ROOT}:{ROOT}"))


def job(cluster: ClusterFile | None = None, **parallel: object) -> ClusterJob:
    config = load_recipe(LARGE, RunConfig)
    config = replace(config, parallel=replace(config.parallel, **parallel))
    cluster = cluster or pyxis()
    return ClusterJob(config, cluster, LARGE, ("--steps", "3"), ROOT, ROOT / "slurm")


@pytest.mark.parametrize(
    ("replay", "nodes", "field"),
    [
        (None, "1, where 8 GPUs train and 8 sample, in turns", "rollout.sglang.colocated"),
        (Path("/shared/run"), "1 train", "rollout.replay"),
    ],
)
def test_a_job_without_servers_of_its_own_takes_no_nodes_for_them(
    replay: Path | None, nodes: str, field: str
) -> None:
    """Whatever the cluster file says: servers that share the trainer's GPUs, and stored rollouts."""
    recipe = ROOT / "recipes/r1_distill_qwen_7b_8k.py"
    config = load_recipe(recipe, RunConfig)
    config = replace(config, rollout=replace(config.rollout, replay=replay))
    small = ClusterJob(config, replace(pyxis(), mounts=("/:/",)), recipe, (), ROOT, ROOT / "slurm")
    assert [(group["role"], group["nodes"]) for group in small.groups()] == [("trainer", 1)]
    assert small.summary()[1] == f"Nodes: {nodes}"
    [line] = [line for line in check_job(small, force=False) if line.startswith("rollout_nodes = 8")]
    assert field in line


def with_sglang(one: ClusterJob, **sglang: object) -> ClusterJob:
    rollout = one.config.rollout
    changed = replace(rollout, sglang=replace(rollout.sglang, **sglang))
    return replace(one, config=replace(one.config, rollout=changed))


def nodes(trainer: int) -> ClusterFile:
    return replace(pyxis(), trainer_nodes=trainer)


def renamed(**fields: object) -> ClusterJob:
    return replace(job(), config=replace(job().config, **fields))


@pytest.mark.parametrize(
    ("made", "force", "says"),
    [
        (lambda: with_sglang(job(), tensor=1), False, "no sequence of 67584 tokens: raise rollout.sglang.te"),
        (lambda: with_sglang(job(), tensor=3), True, "does not divide gpus_per_node=8"),
        (lambda: job(nodes(9)), True, "72 processes, no multiple of the 64"),
        (lambda: job(nodes(16)), True, "parallel.data=1 needs 64 processes, and 16 nodes have 128"),
        (lambda: with_sglang(job(), urls=("http://a:1",)), True, "set rollout_nodes = 0"),
        # Each server is given its own GPUs: of eight two servers of four have some.
        (lambda: job(replace(pyxis(), servers_per_node=3)), True, "GPUs each need 12, and gpus_per_node = 8"),
    ],
)
def test_a_job_that_could_not_run_is_refused(made: Callable[[], ClusterJob], force: bool, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_job(made(), force=force)


def test_a_recipe_that_does_not_fit_is_refused_unless_forced() -> None:
    small = job(nodes(1), context=1, data=None)
    with pytest.raises(ConfigError, match=r"does not fit h100-80gb:\nstage 0 needs .*\n(?s:.*)--force"):
        check_job(small, force=False)
    assert any("stage 0 needs" in line for line in check_job(small, force=True))


def test_a_rehearsal_refuses_a_recipe_that_fails_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ``bapo rehearse`` is stood in for: a rank that fails, and one that needs 75 GB of 72."""
    misfits = ["rank 0 fails in update 1: passes.py:155: RuntimeError: cuda:0", "rank 1 needs 75 GB"]
    script = "import json, sys; json.dump({'misfits': json.loads(sys.argv[1])}, open(sys.argv[-1], 'w'))"
    stand_in = (sys.executable, "-c", script, json.dumps(misfits))
    monkeypatch.setattr("bapo_megatron.commands.cluster.job._REHEARSE", stand_in)
    check_job(job(), force=False)
    with pytest.raises(ConfigError, match=r"would not run on h100-80gb:\nrank 0 fails in update 1: .*:155"):
        check_job(job(), force=False, rehearse=True)
    assert check_job(job(), force=True, rehearse=True)[-1] == misfits[1]
    with pytest.raises(ConfigError, match="does not say which `gpu`"):
        check_job(job(replace(pyxis(), gpu=None)), force=False, rehearse=True)
    monkeypatch.setattr("bapo_megatron.commands.cluster.job._REHEARSE", (sys.executable, "-c", "exit(137)"))
    with pytest.raises(ConfigError, match="ends with exit code 137, without a result"):
        check_job(job(), force=True, rehearse=True)


def test_servers_without_nodes_are_refused() -> None:
    """Servers of the 32B recipe find no GPU beside ranks on all eight of a node; a split node has room.

    A job of stored rollouts needs none.
    """
    alone = job(replace(pyxis(), rollout_nodes=0))
    with pytest.raises(ConfigError, match=r"rollout_nodes = 0.*set rollout_nodes .*--rollout.sglang.urls"):
        check_job(alone, force=True)
    assert not list(with_sglang(alone, urls=("http://a:1",)).problems())
    outside = replace(alone.cluster, environment={"BAPO_ENGINES": "4"})
    assert not list(replace(alone, cluster=outside).problems())
    replays = replace(alone.config, rollout=replace(alone.config.rollout, replay=Path("/shared/run")))
    assert not list(replace(alone, config=replays).problems())
    half = job(replace(alone.cluster, tasks_per_node=4), tensor=4, context=1, data=1)
    assert not list(with_sglang(half, first_gpu=4, servers=1).problems())
    assert list(half.problems())


def missing(cluster: ClusterFile | None = None, **changes: Any) -> list[str]:
    """The folders that the container should mount, too."""
    lines = replace(job(cluster), **changes).missing_mounts()
    return [line.split('"')[1].partition(":")[0] for line in lines]


def test_a_container_must_mount_what_its_tasks_read() -> None:
    """A folder above serves, another place inside of the container and a like-named neighbour do not."""
    cluster = replace(pyxis(), mounts=("/shared:/shared", f"{ROOT}:/work", f"{ROOT}x:{ROOT}x"))
    told = f'the container does not mount the folder of the submission {ROOT}: add "{ROOT}:{ROOT}" to mounts'
    with pytest.raises(ConfigError, match="does not mount") as refused:
        check_job(job(cluster), force=True)
    assert str(refused.value) == told  # which serves checkout, run directory and recipe, too
    warnings = check_job(job(cluster), force=False, dry_run=True)
    assert f"{told}; without --dry-run this is refused" in warnings
    assert missing(cluster, root=Path("/shared/here")) == [str(ROOT)]
    assert missing(recipe=Path("/home/me/r.py")) == ["/home/me"]
    assert missing(config=replace(job().config, run_dir=Path("/fast/run"))) == ["/fast/run"]
    assert missing(replace(cluster, mounts=(f"{ROOT.parent}:{ROOT.parent}:rw",))) == []
    assert missing(replace(cluster, container=None, mounts=())) == []


def test_inputs_that_this_machine_has_must_be_mounted(tmp_path: Path) -> None:
    """One that it lacks may be in the image, or have another path outside; a replay reads no data."""
    names = ("model", "reference", "run", "data", "suites")
    model, reference, run, data, suites = folders = [tmp_path / name for name in names]
    paths = {"model.hf_path": model, "algorithm.reference_kl.model": reference}
    paths |= {"data.path": data / "c.jsonl", "evaluation.every": 10}
    config = altered(job().config, paths | {"evaluation.suites": ("absent", str(suites / "own.jsonl"))})

    def told(*mounts: str, replay: Path | None = None) -> list[str]:
        cluster = replace(pyxis(), mounts=(*pyxis().mounts, *mounts))
        return missing(cluster, config=altered(config, {"rollout.replay": replay}), forked=run)

    assert told() == []
    for folder in folders:
        folder.mkdir()
    for file in (data / "c.jsonl", suites / "own.jsonl"):
        file.touch()
    assert told() == list(map(str, folders))
    elsewhere = (f"/lustre/model:{model}", f"/lustre/data:{data}:ro")
    assert told(*elsewhere) == list(map(str, (reference, run, suites)))
    assert told(replay=run) == [str(folder) for folder in folders if folder != data]


def test_warnings_for_missing_inputs_and_a_small_disk(tmp_path: Path) -> None:
    """32.76 B parameters: three checkpoints of 14 bytes, and three copies of 2, are 1572.6 GB;
    500 steps of 512 responses of 16,384 tokens at 12 bytes 50.3."""
    large = replace(job(), root=tmp_path, cluster=replace(pyxis(), mounts=("/:/",)))
    file, model = tmp_path / "data/skywork_math/data.jsonl", tmp_path / "models/DeepSeek-R1-Distill-Qwen-32B"
    told = check_job(large, force=False)
    said = [f"model.hf_path: {model} has no config.json", f"data.path: {file} is absent"]
    assert [line[: len(start)] for line, start in zip(told, said, strict=True)] == said
    assert large.settings()["BAPO_ENGINES_LOAD_S"] == "655"  # 65.5 GB at 0.1 GB/s
    for path in (file, model / "config.json"):
        path.parent.mkdir(parents=True)
        path.touch()
    assert check_job(large, force=False) == []
    needy = replace(large.cluster, health=replace(large.cluster.health, memory_gb=1))
    (warning,) = check_job(replace(large, cluster=needy), force=False)
    assert warning.endswith("and the probe asks for 1: set health.memory_gb = 81 in the cluster file")
    half = replace(needy, gpus_per_node=4, trainer_nodes=16)
    (warning,) = check_job(replace(large, cluster=half), force=False)
    assert "set health.memory_gb = 41 in" in warning  # four ranks write half of what eight do
    small = replace(large.cluster, health=replace(large.cluster.health, disk_gb=1500))
    (warning,) = check_job(replace(large, cluster=small), force=False)
    assert "needs 1,623 GB" in warning
    assert "set health.disk_gb = 1623" in warning
    unprobed = replace(small, health=replace(small.health, probe="off"))
    assert check_job(replace(large, cluster=unprobed), force=False) == []


def test_a_dry_run_says_how_many_nodes_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NeMo-Run is replaced by a fake: tests/slurm checks the submitted job."""
    file = tmp_path / "cluster.toml"
    text = (ROOT / "slurm/clusters/h100_pyxis.toml").read_text().replace('"/shared:/shared", ', '"/:/", ')
    file.write_text(text.replace("rollout_nodes = 8", "rollout_nodes = 4"))
    monkeypatch.setattr("bapo_megatron.commands.cluster.submit.launch", lambda *_: "the script\n")
    command = SubmitCommand(LARGE, file, True, False, ())
    assert submit(command, load_recipe(LARGE, RunConfig)) == "the script\n"
    said = capsys.readouterr().err
    assert "\nNodes: 8 train + 4 sample = 12\n" in said
    for line in ("FITS: ", "Step: ", "First checkpoint: step 10", "Disk: "):
        assert f"\n{line}" in f"\n{said}"
    large = job()
    assert (large.trainer_nodes, large.processes, large.servers_per_node) == (8, 64, 2)
    groups = [(group["role"], group["nodes"], group["tasks"]) for group in large.groups()]
    assert groups == [("trainer", 8, 8), ("rollout", 8, 1)]
    # Without a plan: the cluster file does not name its GPUs, or the model's folder is on the nodes alone.
    unknown = job(replace(pyxis(), gpu=None, rollout_nodes=1))
    assert unknown.summary()[1].startswith("No plan: the cluster file does not say which `gpu`")
    away = replace(large.config, model=replace(large.config.model, hf_path=Path("on/the/nodes")))
    assert "has no config.json" in replace(large, config=away).summary()[1]


def test_a_job_of_odd_names_reads_none_as_shell(tmp_path: Path) -> None:
    """Of the script that NeMo-Run makes, which quotes no argument of srun."""
    try:
        nemo_run_python()
    except ConfigError as error:
        pytest.skip(str(error))
    assert renamed(name="a/b").specification()["name"] == "bapo-a-b"  # no folder of the job's log
    odd = f'o d\'d $(touch {tmp_path}/ran) `touch {tmp_path}/ran` "q"'
    cluster = replace(pyxis(), container=f"/{odd}.sqsh", mounts=(f"/{odd}:/{odd}", f"{ROOT}:{ROOT}"))
    config = replace(job().config, name=odd.replace("/", "."), run_dir=ROOT / odd)
    script = launch(replace(job(cluster), config=config), dry_run=True)
    lines = [line for line in script.splitlines() if line.startswith("srun --")]
    assert len(lines) == 2
    for line in lines:
        stub = 'srun() { printf "%s\\0" "$@"; }\nBAPO_LOGS=/logs BAPO_WAIT_S=5\n'
        shell = ["bash", "-c", stub + line.partition(" & pids")[0]]
        words = subprocess.check_output(shell, text=True, cwd=tmp_path).split("\0")
        assert f"--container-image=/{odd}.sqsh" in words
        assert f"--container-mounts=/{odd}:/{odd},{ROOT}:{ROOT}" in words
        assert str(ROOT / odd) in words
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("flags", ["run_dir=x", ""])
def test_arguments_survive_the_shell_with_an_absolute_run_directory(flags: str) -> None:
    """Whatever directory comes before it."""
    run_dir = Path("x") if flags else None
    large = replace(renamed(run_dir=run_dir), flags=(*flags.split(), "--reward.format-pattern", "a b'c"))
    run = train_flags("train", shlex.split(large.specification()["arguments"])).run
    assert (run.reward.format_pattern, run.run_dir) == ("a b'c", ROOT / (run_dir or "runs/bp_math_32b_64k"))


def test_the_command_line() -> None:
    """Those of the pages: tests/unit/docs/test_commands.py."""
    command = SubmitCommand.of(["r.py", "--steps", "3", "--cluster=c.toml", "--rehearse", "--seed=1"])
    flags = ("--steps", "3", "--seed=1")
    assert command == SubmitCommand(Path("r.py"), Path("c.toml"), False, False, flags, rehearse=True)
    for words in (["--cluster", "c.toml"], ["r.py", "--cluster"]):
        with pytest.raises(ConfigError, match="usage: bapo submit RECIPE --cluster FILE"):
            SubmitCommand.of(words)


@pytest.mark.parametrize(("state", "told"), [("SUSPENDED", True), ("COMPLETED", False)])
def test_a_second_job_of_a_run_is_told_before_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, told: bool
) -> None:
    monkeypatch.setattr("bapo_megatron.commands.cluster.submit.queue_state", lambda _job: (state, ""))
    run = renamed(run_dir=tmp_path)
    assert _live_job(run) is None
    (tmp_path / "slurm.state").write_text("job=41\nstatus=requeued\n")
    words = f"job 41 of {tmp_path} is {state}: `bapo cancel {tmp_path}` lets it save and stop"
    assert _live_job(run) == (f"{words}; of two jobs of a run the second stops" if told else None)


def test_a_job_gets_no_variables_that_would_change_it() -> None:
    """Defaults of sbatch, the job that the shell is in, and settings of a job by plain sbatch."""
    stays = ["BAPO_SGLANG_PYTHON", "HF_TOKEN", "SLURM_CONF", "SLURM_CPU_BIND"]
    goes = ["BAPO_DEVICE", "PYTHONPATH", "PYXIS_CONTAINER_IMAGE", "SBATCH_ACCOUNT"]
    shell = dict.fromkeys([*stays, *goes, "BAPO_PYTHON"], "x")
    library = ROOT / "slurm/lib"
    kept, left_out = submission_environment(shell, {"BAPO_PYTHON"}, library)
    assert (sorted(kept), left_out) == (stays, goes)
    in_a_job = {**shell, "SLURM_JOB_ID": "7", "SLURM_TRES_PER_TASK": "cpu=4"}
    assert sorted(submission_environment(in_a_job, (), library)[0]) == stays[:3]


def test_a_submission_tells_what_the_site_says_and_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executable(tmp_path / "sbatch", "true")
    says = 'echo "nemo: noise" >&2\necho "sbatch: 12 hours left" >&2\necho "4711${BAPO_DEVICE-}"'
    executable(tmp_path / "python", says)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("BAPO_NEMO_RUN_PYTHON", str(tmp_path / "python"))
    monkeypatch.setenv("BAPO_DEVICE", "cpu")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    run = replace(job(), config=replace(job().config, run_dir=tmp_path / "run"))
    assert launch(run, dry_run=False) == "4711\n"
    assert (tmp_path / "run/logs/submitted.job").read_text() == "4711\n"
    said = capsys.readouterr().err
    assert "warning: BAPO_DEVICE of this shell: not handed on to the job" in said
    assert "sbatch: 12 hours left\n" in said
    assert "noise" not in said
    (tmp_path / "run/logs/submitted.job").unlink()
    (tmp_path / "run/logs/submitted.job/folder").mkdir(parents=True)  # where no file can be written
    assert launch(run, dry_run=False) == "4711\n"
    assert "`bapo status` and `bapo cancel` know the job only once it has begun" in capsys.readouterr().err


def test_what_a_submission_needs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = replace(job(), flags=("--run-dir", str(tmp_path / "run")))
    with pytest.raises(ConfigError, match=r"no sbatch on this machine.*login node.*--dry-run"):
        launch(run, dry_run=False)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("BAPO_NEMO_RUN_PYTHON", "/no/python")
    with pytest.raises(ConfigError, match="BAPO_NEMO_RUN_PYTHON=/no/python does not exist"):
        nemo_run_python()
    monkeypatch.delenv("BAPO_NEMO_RUN_PYTHON")
    monkeypatch.setattr("bapo_megatron.commands.cluster.submit._TEMPLATES", Path("/no/slurm"))
    monkeypatch.setattr("bapo_megatron.commands.cluster.submit.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="make nemo-run"):
        nemo_run_python()
