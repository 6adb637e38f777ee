"""Requests to an engine under contract, and what Hugging Face's own forward pass says of the answers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bapo_megatron.hf.config import read_text_config
from bapo_megatron.hf.parameter_map import expert_tensors
from bapo_megatron.types import GenerateRequest, Generation, RouteShape, SamplingParams

from .blocking import BlockingEngine
from .conftest import SHAPE

TOLERANCE = 2e-5
"""Natural log; float32 on both sides."""

FOREVER = 3500
"""New tokens that no test waits for: such requests are aborted."""


def request(
    name: str | int = "r",
    ids: Sequence[int] = (1, 2, 3),
    *,
    new: int = 12,
    temperature: float = 0.7,
    stop: tuple[int, ...] = (),
    seed: int | None = 5,
    prefix: int = 0,
) -> GenerateRequest:
    params = SamplingParams(temperature, new, stop, seed)
    return GenerateRequest(str(name), np.array(ids, np.int32), params, prefix)


def mixed_requests(count: int, **more: Any) -> list[GenerateRequest]:
    """Prompts of many lengths, each with a seed of its own."""
    rng = np.random.default_rng(0)
    vocabulary = SHAPE["vocab_size"]
    prompts = [rng.integers(0, vocabulary, rng.integers(1, 17)) for _ in range(count)]
    return [request(i, ids, seed=i, **more) for i, ids in enumerate(prompts)]


@cache
def reference_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.inference_mode()
def reference_log_probs(folder: Path, asked: GenerateRequest, answer: Generation) -> np.ndarray:
    """Log-probs of the answer by one forward pass over prompt and answer, alone in its batch."""
    ids = torch.tensor([[*asked.input_ids.tolist(), *answer.token_ids_R.tolist()]])
    start = len(asked.input_ids)
    logits = reference_model(folder)(ids).logits[0, start - 1 : -1] / (asked.params.temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(1, ids[0, start:, None])[:, 0].numpy()


def assert_from_model(folder: Path, asked: list[GenerateRequest], answers: list[Generation]) -> None:
    for one, answer in zip(asked, answers, strict=True):
        expected = reference_log_probs(folder, one, answer)
        np.testing.assert_allclose(answer.log_probs_R, expected, atol=TOLERANCE, rtol=0)


def tensors(folder: Path) -> list[tuple[str, Tensor]]:
    """The trained weights by the folder's names, in the model's order; experts one by one, as a run's."""
    found: list[tuple[str, Tensor]] = []
    family, _ = read_text_config(folder)
    for name, tensor in reference_model(folder).named_parameters():
        experts = expert_tensors(name, tensor.shape)
        places = {own: tensor[place] for own, place in experts.items()} or {name: tensor}
        found += [
            (own.replace("model.", family.body, 1), one.detach().clone()) for own, one in places.items()
        ]
    return found


def next_segments(asked: list[GenerateRequest], answers: list[Generation]) -> list[GenerateRequest]:
    """Requests that continue behind the answers, as of responses that are made in segments."""
    return [
        dataclasses.replace(
            one,
            input_ids=np.concatenate([one.input_ids, answer.token_ids_R]),
            prefix_tokens=len(answer.token_ids_R),
        )
        for one, answer in zip(asked, answers, strict=True)
    ]


WAITS_S = (0.4, 2.0, 10.0, 60.0)
"""A busy machine may have sampled nothing after the first of them."""


def interrupted(
    start: Callable[[], BlockingEngine],
    asked: list[GenerateRequest],
    interrupt: Callable[[BlockingEngine, float], None],
    versions: int = 1,
) -> tuple[BlockingEngine, list[Generation]]:
    """An engine, and its answers to requests that are interrupted after a while.

    After a longer while, on an engine started anew, if the last of them had not five tokens, or not of
    so many ``versions``.
    """
    for wait_s in WAITS_S:
        engine = start()
        running = engine.begin(asked)
        time.sleep(wait_s)
        interrupt(engine, wait_s)
        answers = running.result(timeout=600)
        last = answers[-1].versions_R.tolist()
        if len(last) >= 5 and len(set(last)) >= versions:
            return engine, answers
    raise AssertionError("the engine has sampled nothing in a minute")


ROUTES = RouteShape(SHAPE["num_hidden_layers"], 2, 8)
"""Of the model with experts."""


def reference_routes(folder: Path, asked: GenerateRequest, tokens: Sequence[int]) -> list[list[list[int]]]:
    """The experts of the positions that predict the answer's ``tokens``, in order of their numbers."""
    ids = torch.tensor([[*asked.input_ids.tolist(), *tokens]])
    with torch.inference_mode():
        logits = reference_model(folder)(ids[:, :-1], output_router_logits=True).router_logits
    routes = torch.stack([one.topk(2, -1).indices.sort(-1).values for one in logits], 1)
    found: list[list[list[int]]] = routes[len(asked.input_ids) - 1 :].tolist()
    return found
