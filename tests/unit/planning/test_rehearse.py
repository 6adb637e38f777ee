"""``bapo rehearse``: its flags choose ranks, packs and layers; invalid flags are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.cli import run as bapo
from bapo_megatron.config import BatchConfig, ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.rehearsal.job import RehearseOptions, choose_layers, packs_of, ranks_of
from bapo_megatron.planning.rehearsal.program import sequence_lengths
from bapo_megatron.planning.rehearsal.transformer_engine import VERSIONS, find_sources
from bapo_megatron.runtime.files import check_output_file
from tests.unit.planning.test_plan import job

ROOT = Path(__file__).parents[3]
FOUR = ParallelConfig(tensor=2, pipeline=4, data=2)


def test_one_rank_of_each_kind_or_those_that_are_asked_for() -> None:
    """Stages of four ranks: the first ranks of the first, the third and the last."""
    four = job(FOUR)
    assert ranks_of(four, RehearseOptions()) == [0, 8, 12]
    assert ranks_of(job(), RehearseOptions()) == [0]
    assert ranks_of(four, RehearseOptions(stage=1)) == [4]
    assert ranks_of(four, RehearseOptions(rank=5)) == [5]
    assert ranks_of(four, RehearseOptions(all_ranks=True)) == list(range(16))
    with pytest.raises(ConfigError, match="--rank 16: the layout has ranks 0 to 15"):
        ranks_of(four, RehearseOptions(rank=16))
    with pytest.raises(ConfigError, match="--stage 4: the layout has stages 0 to 3"):
        ranks_of(four, RehearseOptions(stage=4))


def test_packs_fill_the_pipeline() -> None:
    """Eight packs of 16 tokens in an update (see test_plan.py), four of a replica where there are two."""
    assert packs_of(job(), RehearseOptions()) == 1
    assert packs_of(job(ParallelConfig(pipeline=4)), RehearseOptions()) == 5
    assert packs_of(job(FOUR), RehearseOptions()) == 4  # no more than there are
    assert packs_of(job(ParallelConfig(pipeline=2, virtual=2)), RehearseOptions()) == 4
    assert packs_of(job(hold_forwards=True), RehearseOptions()) == 8
    assert packs_of(job(), RehearseOptions(packs=3)) == 3


def test_packs_are_full() -> None:
    """Sequences have at most 16 + 14 tokens: one and a rest, which is long enough from 256 on."""
    run = job().run
    assert sequence_lengths(run, 1) == [16]
    assert sequence_lengths(replace(run, batch=BatchConfig(pack_tokens=64)), 1) == [30, 30]
    assert sequence_lengths(replace(run, batch=BatchConfig(pack_tokens=64)), 4) == [28, 28]
    rollout = replace(run.rollout, max_response_tokens=684)  # with a prompt of 16: 700
    long = replace(run, rollout=rollout, batch=BatchConfig(pack_tokens=1024))
    assert sequence_lengths(long, 1) == [700, 324]


def test_the_rehearsed_layers_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_TE_SOURCES", str(tmp_path))
    layers, why = choose_layers(None, "bfloat16")
    assert layers == "torch"
    assert "not those of Transformer Engine that a GPU would have" in why
    assert "make te-sources" in why
    with pytest.raises(ConfigError, match="make te-sources"):
        choose_layers("te", "bfloat16")
    with pytest.raises(ConfigError, match="a run in float32 has torch's layers"):
        choose_layers("te", "float32")
    package = tmp_path / "2.11.0/transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert choose_layers(None, "bfloat16") == ("te", "Transformer Engine 2.11.0's layers")
    assert choose_layers(None, "float32")[0] == "torch"
    assert choose_layers("torch", "bfloat16")[0] == "torch"


def test_bad_input_ends_before_anything_is_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bapo(["rehearse", "recipes/bp_math_32b_64k.py", "--rank", "64"]) == 2
    assert "--rank 64: the layout has ranks 0 to 63" in capsys.readouterr().err
    assert bapo(["rehearse", "recipes/bp_math_32b_64k.py", "--parallel.tensor", "3"]) == 2
    assert "parallel.tensor=3 does not divide" in capsys.readouterr().err


def test_flags_that_exclude_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "recipes/bp_math_32b_64k.py"
    assert bapo(["rehearse", recipe, "--rank", "1", "--stage", "0"]) == 2
    assert "--rank and --stage exclude each other: give one" in capsys.readouterr().err
    assert bapo(["rehearse", recipe, "--stage", "0", "--all-ranks"]) == 2
    assert "--stage and --all-ranks exclude each other: give one" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapo_megatron.commands.plan.rehearse_job", lambda *_: pytest.fail("it began"))
    gone = tmp_path / "gone/out.json"
    assert bapo(["rehearse", "recipes/bp_math_32b_64k.py", "--json", str(gone)]) == 2
    told = f"--json {gone}: the folder {gone.parent} does not exist; make it, or name another file"
    assert told in capsys.readouterr().err
    check_output_file("--json", tmp_path / "new.json")
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        check_output_file("--json", tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="cannot be written to; name a file in another folder"):
        check_output_file("--json", tmp_path / "new.json")


def install(folder: Path, version: str) -> None:
    """A package transformer_engine whose import ends in an error, as without its libraries."""
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine/__init__.py").write_text("raise RuntimeError('compiled for a GPU')")
    metadata = folder / f"transformer_engine-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n"
    )


@pytest.mark.parametrize(
    ("version", "found"), [(VERSIONS[0], True), (f"{VERSIONS[0]}+cu13", True), ("2.10.0", False)]
)
def test_sources_of_the_installed_package(
    version: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BAPO_TE_SOURCES", str(tmp_path / "none"))
    if found:
        assert find_sources(VERSIONS[0]) == tmp_path
    else:
        with pytest.raises(ConfigError, match="and it is not installed: run `make te-sources`"):
            find_sources(VERSIONS[0])


TORCH_LAYERS = """
import torch
from bapo_megatron.planning.rehearsal.job import prepare_layers

prepare_layers("torch")
from bapo_megatron.policy import device

device.has_cuda = lambda: True
print(device.uses_transformer_engine(torch.bfloat16))
"""


@pytest.mark.integration
def test_torch_layers_are_used_although_transformer_engine_is_installed(tmp_path: Path) -> None:
    install(tmp_path, VERSIONS[0])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", TORCH_LAYERS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "False\n", done.stderr
