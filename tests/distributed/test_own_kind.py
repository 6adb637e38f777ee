"""A kind of layer of one's own, in one file outside of the package: trained, converted, planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron.config import ParallelConfig
from bapo_megatron.data.samples import Sample
from bapo_megatron.hf.config import attention_flops, linear_flops_per_token, read_model_shape
from bapo_megatron.hf.families import FAMILIES
from bapo_rehearsal.job import rehearse
from bapo_rehearsal.records import RankRequest
from checkpoints_tools import reshard, to_hf
from tests.distributed.test_checkpoints_of_kinds import load_and_look
from tests.distributed.test_converted_checkpoints import train_and_save
from tests.distributed.test_layouts import Answer, answers, check_agreement
from tests.support import running_mean
from tests.support.rehearsals import TOKENS, small_run
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, running_mean.NAME, running_mean.FAMILY)
        yield running_mean.save_mean_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder: Path, samples: list[Sample]) -> Answer:
    [found] = answers("one", folder, samples)
    return found


@pytest.mark.parametrize("text", ["pp2 layers1+3", "tp2-cp2", "pp2-vpp2 full"])
def test_layouts_agree_with_one_process(
    text: str, folder: Path, samples: list[Sample], reference: Answer
) -> None:
    """Stages of unlike layers, too."""
    check_agreement(answers(text, folder, samples), reference, samples)


def test_what_the_trainer_saves_is_loaded_at_any_layout_and_converted(folder: Path, tmp_path: Path) -> None:
    """Layers that are not alike have keys of their own."""
    path, written = tmp_path / "policy", ParallelConfig(tensor=2, pipeline=2)
    [(digest, weights), *_] = run_layout(train_and_save, written, folder, written, path, "float32")
    for layout in (ParallelConfig(), ParallelConfig(pipeline=2, pipeline_layers=(1, 3))):
        for found, same in run_layout(load_and_look, layout, folder, layout, path):
            assert found == digest
            assert all(torch.equal(same[one], tensor) for one, tensor in weights.items())
    reshard(path, tmp_path / "resharded", grid=3, reference=folder)
    for number, source in enumerate((path, tmp_path / "resharded")):
        to_hf(source, tmp_path / f"hf {number}", reference=folder)
        converted = load_file(tmp_path / f"hf {number}/model.safetensors")
        assert all(torch.equal(converted[name], tensor) for name, tensor in weights.items())


def test_it_is_rehearsed(folder: Path, tmp_path: Path) -> None:
    """Its FLOPs are counted as the plan counts them."""
    run = small_run(tmp_path, ParallelConfig(), 4)
    run = replace(run, model=replace(run.model, hf_path=folder))
    [result] = rehearse([RankRequest(run, 0, 1)], "torch", workers=1)
    assert result.error is None
    shape = read_model_shape(folder)
    forward = linear_flops_per_token(shape) * TOKENS + attention_flops(shape, TOKENS)
    assert result.flops["bounds search 2"] == pytest.approx(forward, rel=0.01)
