"""Decoding of the embedded engine: shared prefill of equal prompts, and exact log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch

from bapo_megatron.rollout.engines.local_decoding import sample
from bapo_megatron.rollout.engines.local_engine import LocalEngine, LocalModel
from bapo_megatron.types import GenerateRequest, Generation, SamplingParams
from tests.support.checkpoint_models import load_tensors, save_tensors
from tests.support.fp8 import in_bfloat16, save_fp8_folder
from tests.support.models import EXPERTS, HYBRID, HYBRIDS, save_tiny_model, tiny_model

PROMPTS = ([5, 6, 7, 8], [9, 10], [5, 6, 7, 9, 11] * 14)
"""Of different lengths, two of them with one beginning, one longer than a chunk of Gated DeltaNet."""
GROUP = 4


def group_requests() -> list[GenerateRequest]:
    """A group of responses to each prompt; a seed each."""
    return [
        GenerateRequest(f"{place}-{n}", np.array(ids, np.int32), SamplingParams(1.0, 9, (1,), 10 * place + n))
        for n in range(GROUP)
        for place, ids in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module", params=["qwen2", HYBRID])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalModel]:
    """A tiny model, which caches keys and values, or states beside them."""
    loaded = LocalModel(save_tiny_model(request.param, tmp_path_factory.mktemp("model")), max_batch=64)
    yield loaded
    loaded.close()


def shapes_of(model: LocalModel, requests: Sequence[GenerateRequest]) -> tuple[list[Any], list[Generation]]:
    """The shape of the ids of every call of the model, and the answers."""
    shapes: list[Any] = []
    counter = model._model.register_forward_pre_hook(
        lambda _module, _args, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    try:
        return shapes, model.generate(requests)
    finally:
        counter.remove()


def test_equal_prompts_are_prefilled_once(model: LocalModel) -> None:
    shapes, _ = shapes_of(model, group_requests())
    assert shapes[0] == (len(PROMPTS), 70)
    assert shapes[1] == (len(PROMPTS) * GROUP, 1)


def test_a_shared_prompt_samples_what_each_request_samples_alone(model: LocalModel) -> None:
    """Their products have other shapes, so log-probs agree to rounding."""
    requests = group_requests()
    together = model.generate(requests)
    for request, answer in zip(requests, together, strict=True):
        [alone] = model.generate([request])
        assert answer.token_ids_R.tolist() == alone.token_ids_R.tolist()
        np.testing.assert_allclose(answer.log_probs_R, alone.log_probs_R, rtol=2e-6, atol=2e-6)
    assert len({tuple(answer.token_ids_R.tolist()) for answer in together}) > GROUP


@pytest.mark.parametrize("family", HYBRIDS)
def test_caches_of_both_kinds_follow_the_requests(family: str, tmp_path: Path) -> None:
    """Log-probs are those of one pass over the whole response: with keys and values in some layers and states
    in the others, prompts of unlike length, groups that share one, and requests that end early."""
    engine = LocalModel(save_tiny_model(family, tmp_path), max_batch=64)
    requests = group_requests()
    for place, one in enumerate(requests):
        limit = replace(one.params, max_new_tokens=3 + 4 * (place % 3), stop_token_ids=())
        requests[place] = replace(one, params=limit)
    found, model = engine.generate(requests), tiny_model(family)
    for request, answer in zip(requests, found, strict=True):
        ids = torch.from_numpy(np.concatenate([request.input_ids, answer.token_ids_R])).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(answer.log_probs_R, expected[-len(answer.log_probs_R) :], atol=3e-6)
    engine.close()


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


async def loaded(model: LocalModel, folder: Path) -> None:
    """The engine's load of a folder, whose digest is taken as right."""
    engine = LocalEngine(model)
    await engine.load(folder, 7, AsyncMock())
    assert await engine.weight_version() == 7


def test_a_folder_that_lacks_a_tensor_changes_nothing(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen2", tmp_path)
    model = LocalModel(folder, max_batch=64)
    before = model.generate(group_requests()[:3])
    weights = {name: torch.zeros_like(tensor) for name, tensor in load_tensors(folder).items()}
    weights.pop("model.norm.weight")
    save_tensors(folder, weights)
    with pytest.raises(ValueError, match="1 weights are missing: model.norm.weight"):
        asyncio.run(loaded(model, folder))
    for old, new in zip(before, model.generate(group_requests()[:3]), strict=True):
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
        answers.append(model.generate(group_requests()[:4]))
        asyncio.run(loaded(model, path))  # as an evaluation and `--rollout-only` do
        answers.append(model.generate(group_requests()[:4]))
        model.close()
    for one, other in (*zip(*answers[::2], strict=True), *zip(*answers[1::2], strict=True)):
        assert one.token_ids_R.tolist() == other.token_ids_R.tolist()
        assert one.log_probs_R.tolist() == other.log_probs_R.tolist()
