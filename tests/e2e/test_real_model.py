"""A pretrained model of 135 M parameters where the other tests have random ones: what only its size, its
vocabulary of 49,152 tokens and its learned activations show."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron import cli
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang.server_process import sglang_python
from bapo_megatron.runtime.files import remove_folder
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_rehearsal.job import rehearse
from bapo_rehearsal.records import RankRequest
from checkpoints_tools.hf_to_megatron import to_megatron
from checkpoints_tools.megatron_to_hf import to_hf
from tests.support.forked_commands import ROOT, ForkedCommand, start_bapo
from tests.support.metrics import results
from tests.support.processes import servers_of
from tests.support.real_model import RECIPE, require_model, write_sums
from tests.support.rehearsals import real_ranks
from tests.support.short_runs import finish

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WEIGHTS = "model.safetensors"
LIMIT_S = 1800


@pytest.fixture
def model() -> Path:
    return require_model()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder for gigabytes, which is not kept as pytest's own are."""
    yield tmp_path
    for path in tmp_path.iterdir():
        remove_folder(path)


def test_a_round_trip_conversion_is_byte_identical(model: Path, room: Path) -> None:
    to_megatron(model, room / "megatron")
    to_hf(room / "megatron", room / "hf")
    ours, theirs = load_file(room / "hf" / WEIGHTS), load_file(model / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (room / "hf" / name).read_bytes() == (model / name).read_bytes()


# --- layouts -------------------------------------------------------------------------------------

CANARY = ["--tokens=200", "--longest=64", "--batch.pack-tokens=128", "--data.max-prompt-tokens=48"]
CANARY += ["--batch.hold-forwards=false"]  # pipeline stages cannot
LAYOUTS = {
    "pp2": ["--parallel.pipeline=2"],
    "tp3-sp": ["--parallel.tensor=3", "--parallel.sequence"],
}


def verify(model: Path, *flags: str) -> int:
    arguments = [
        "verify-parallel",
        str(ROOT / RECIPE),
        f"--model.hf-path={model}",
        "--data.path=absent.jsonl",
    ]
    try:
        return cli.run([*arguments, *CANARY, *flags])
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.distributed
def test_layouts_agree(
    model: Path, room: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process writes what it finds, and each layout is compared with that."""
    monkeypatch.setattr("bapo_megatron.runtime.distributed.os.cpu_count", lambda: 1)  # of forks of a test
    reference = room / "one.npz"
    assert verify(model, f"--save={reference}") == 0
    for name, flags in LAYOUTS.items():
        code = verify(model, *flags, f"--certificate={reference}")
        printed = capfd.readouterr().out
        assert code == 0, f"{name}: {printed}"
        assert "all 6 quantities agree" in printed


# --- runs ----------------------------------------------------------------------------------------

SHORT = [
    "--reward.function=tests.support.real_model:letters",
    "--rollout.prompts-per-step=2",
    "--rollout.group-size=3",
    "--rollout.max-response-tokens=8",
    "--batch.pack-tokens=256",
    "--algorithm.reuse-epochs=1",
    "--algorithm.updates-per-epoch=2",
    "--optimizer.warmup-updates=0",
    *("--evaluation.every=0", "--reward.workers=1"),
]


def start(model: Path, room: Path, run_dir: Path, *flags: str) -> ForkedCommand:
    data = write_sums(room / "sums.jsonl")
    where = [f"--model.hf-path={model}", f"--data.path={data}", f"--run-dir={run_dir}"]
    return start_bapo("train", RECIPE, *where, *SHORT, *flags)


def kill_when(is_there: Callable[[], object], process: ForkedCommand) -> None:
    """Kill all of the run as soon as something is there: its end, of gigabytes, is not read."""
    deadline = time.monotonic() + LIMIT_S
    while not is_there():
        assert process.poll() is None, process.communicate()[0].decode()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_real_server_samples_it(model: Path, room: Path) -> None:
    """Of both steps: of the published weights, and of those after two updates. It ends with the run."""
    try:
        sglang_python()
    except ConfigError as error:
        pytest.skip(str(error))
    log = room / "run/metrics.jsonl"
    process = start(
        model, room, room / "run", "--steps=100", "--checkpoint.every=100", "--rollout.engine=sglang"
    )
    kill_when(lambda: log.exists() and len(read_jsonl(log)) >= 2, process)
    for step, row in enumerate(read_jsonl(log)[:2], 1):
        assert row["step"] == step
        assert row["rollout/engine_gap_mean"] < 1e-4
        assert row["policy/grad_norm"] > 0
    deadline = time.monotonic() + 300
    while servers_of(room / "run"):  # it has gigabytes, and the folder is removed
        assert time.monotonic() < deadline, "the server outlived its run"
        time.sleep(0.2)


def test_a_step_that_is_made_again_is_bitwise_equal(model: Path, room: Path) -> None:
    """As after a kill: the checkpoint of the last step is not there. (Kills: test_runs.py.)"""
    run_dir = room / "run"
    flags = (
        "--steps=2",
        "--algorithm.updates-per-epoch=1",
        "--checkpoint.every=1",
        "--checkpoint.keep-last=2",
    )
    finish(start(model, room, run_dir, *flags))
    logs = [results(run_dir, name) for name in ("metrics.jsonl", "updates.jsonl")]
    theirs = load_file(run_dir / "export" / WEIGHTS)
    for name in ("checkpoints/step_000002", "export"):
        remove_folder(run_dir / name)
    finish(start(model, room, run_dir, *flags))
    assert any(row["kind"] == "resume" for row in read_jsonl(run_dir / "events.jsonl"))
    assert [results(run_dir, name) for name in ("metrics.jsonl", "updates.jsonl")] == logs
    ours, before = (load_file(folder / WEIGHTS) for folder in (run_dir / "export", model))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in ours.items())


def test_the_rehearsed_peak_is_the_measured_one(model: Path) -> None:
    """But for the first update: gloo gathers the new weights through a copy of all of them, which no GPU has.
    In the second one the activations of 512 tokens take more than that."""
    recipe = load_recipe(ROOT / RECIPE, RunConfig)
    config = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, hf_path=model),
        batch=dataclasses.replace(recipe.batch, pack_tokens=512),
    )
    [(peaks, _)] = real_ranks(config, packs=1)
    [rehearsed] = rehearse([RankRequest(config, 0, 1, "cpu")])
    assert rehearsed.error is None
    del peaks["update 1"]
    assert {"build", "bounds search 2", "update 2", "weight sync", "save"} <= set(peaks)
    for phase, size in peaks.items():
        assert rehearsed.gpu[phase].size == pytest.approx(size, rel=0.03), phase
