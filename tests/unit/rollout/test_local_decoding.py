"""The embedded engine: exact log-probs, incomplete folders, fp8. (What it samples: tests/contract.)"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch

from bapo_megatron.rollout.engines.local_decoding import sample
from bapo_megatron.rollout.engines.local_engine import LocalEngine, LocalModel
from bapo_megatron.types import GenerateRequest, SamplingParams
from tests.support.checkpoint_models import load_tensors, save_tensors
from tests.support.fp8 import in_bfloat16, save_fp8_folder
from tests.support.models import EXPERTS, HYBRID, save_tiny_model

REQUESTS = [
    GenerateRequest(f"{n}", np.array(ids, np.int32), SamplingParams(1.0, 9, (1,), n))
    for n, ids in enumerate(([5, 6, 7, 8], [9, 10], [5, 6, 7, 9, 11] * 14, [9, 10]))
]


@pytest.mark.parametrize("entries", [49_152, 151_936])
def test_log_probs_at_a_real_vocabulary_are_those_of_float64(entries: int) -> None:
    """torch's own float32 softmax on a CPU is off by 1e-5 of a probability."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, entries, generator=generator) * torch.tensor([[0.5], [1.0], [3.0], [5.0]])
    temperature, draw = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.rand(4, dtype=torch.float64)
    token, log_prob = sample(logits, temperature, draw)
    expected = logits.double().log_softmax(1).gather(1, token[:, None])[:, 0]
    assert token[1] == logits[1].argmax()
    torch.testing.assert_close(log_prob.double(), expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize("family", ["qwen2", HYBRID])
def test_rows_of_equal_prompts_that_end_early_leave_the_others_as_they_are(
    family: str, tmp_path: Path
) -> None:
    """Their keys, values and states are repeated after the prompt, and dropped from the batch."""
    model = LocalModel(save_tiny_model(family, tmp_path), max_batch=64)
    asked = [
        replace(request, params=replace(request.params, max_new_tokens=most, stop_token_ids=()))
        for request, most in zip(REQUESTS, (3, 9, 12, 2), strict=True)
    ]
    for one, (alone,) in zip(model.generate(asked), map(model.generate, zip(asked)), strict=True):
        assert one.token_ids_R.tolist() == alone.token_ids_R.tolist()
        np.testing.assert_allclose(one.log_probs_R, alone.log_probs_R, atol=1e-4)
    model.close()


async def loaded(model: LocalModel, folder: Path) -> None:
    """The engine's load of a folder, whose digest is taken as right."""
    engine = LocalEngine(model)
    await engine.load(folder, 7, AsyncMock())
    assert await engine.weight_version() == 7


def test_a_folder_that_lacks_a_tensor_changes_nothing(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen2", tmp_path)
    model = LocalModel(folder, max_batch=64)
    before = model.generate(REQUESTS)
    weights = {name: torch.zeros_like(tensor) for name, tensor in load_tensors(folder).items()}
    weights.pop("model.norm.weight")
    save_tensors(folder, weights)
    with pytest.raises(ValueError, match="1 weights are missing: model.norm.weight"):
        asyncio.run(loaded(model, folder))
    for old, new in zip(before, model.generate(REQUESTS), strict=True):
        assert (old.token_ids_R.tolist(), set(new.versions_R)) == (new.token_ids_R.tolist(), {0})
    model.close()


@pytest.mark.parametrize("family", ["qwen3_tied", EXPERTS])
def test_a_folder_in_fp8_samples_as_the_same_numbers_in_bfloat16(family: str, tmp_path: Path) -> None:
    """Hidden 144 and MLP 200, where transformers would cut the blocks at other places, or refuse."""
    plain = save_tiny_model(family, tmp_path / "plain", hidden_size=144, intermediate_size=200)
    folder = save_fp8_folder(plain, tmp_path / "fp8")
    names = load_tensors(plain).keys()
    save_tensors(plain, {name: tensor for name, tensor in in_bfloat16(folder).items() if name in names})
    answers = []
    for path in (plain, folder):
        model = LocalModel(path, max_batch=4)
        answers.append(model.generate(REQUESTS))
        asyncio.run(loaded(model, path))  # as an evaluation and `--rollout-only` do
        answers.append(model.generate(REQUESTS))
        model.close()
    for one, other in (*zip(*answers[::2], strict=True), *zip(*answers[1::2], strict=True)):
        assert one.token_ids_R.tolist() == other.token_ids_R.tolist()
        assert one.log_probs_R.tolist() == other.log_probs_R.tolist()
