"""Requests to engines: the dataset that they come from, seeds, stop tokens, and their validation.

Requests are checked before they are sent, because a bad id can take an engine down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.config import RunConfig
from bapo_megatron.data.mixture import mixture_settings
from bapo_megatron.data.prompts import MixedSource
from bapo_megatron.types import GenerateRequest, Generation, Prompt


@dataclass(frozen=True)
class Dataset:
    """The tokenized prompts of a run, with the tokenizer that reads the responses."""

    prompts: Sequence[Prompt]
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    sources: tuple[MixedSource, ...] = ()
    """The sources of the prompts, in their order; none for the only file of a run."""

    def texts(self, ids: Sequence[np.ndarray]) -> list[str]:
        """Responses as text, without special tokens."""
        return [self.tokenizer.decode(one.tolist(), skip_special_tokens=True) for one in ids]


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model on its requests."""

    vocabulary: int
    """Token ids are below it."""
    context: int
    """Most tokens of prompt and response together."""


def limits_of(hf_path: Path) -> ModelLimits:
    """The limits of the model in an HF folder."""
    config = json.loads((hf_path / "config.json").read_text())
    return ModelLimits(config["vocab_size"], config["max_position_embeddings"])


def check_request(request: GenerateRequest, limits: ModelLimits) -> None:
    """Raise ValueError that names the request and its first mistake."""
    for problem in _problems(request, limits):
        raise ValueError(f"request {request.request_id!r}: {problem}")


def _problems(request: GenerateRequest, limits: ModelLimits) -> Iterator[str]:
    vocabulary, context = limits.vocabulary, limits.context
    ids, params = np.asarray(request.input_ids), request.params
    if ids.ndim != 1 or len(ids) == 0:
        yield f"input_ids has shape {ids.shape}; it must be a list of at least one token"
    elif not np.issubdtype(ids.dtype, np.integer):
        yield f"input_ids are {ids.dtype}, not integers"
    elif ids.min() < 0 or ids.max() >= vocabulary:
        yield f"input_ids span {ids.min()} to {ids.max()}; the vocabulary is 0 to {vocabulary - 1}"
    if params.max_new_tokens < 1:
        yield f"max_new_tokens={params.max_new_tokens} must be at least 1"
    if len(ids) + params.max_new_tokens > context:
        yield (
            f"{len(ids)} input tokens and max_new_tokens={params.max_new_tokens} are more than the "
            f"model's context (max_position_embeddings={context})"
        )
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        yield f"temperature={params.temperature} must be 0 (greedy) or a positive number"
    if params.seed is not None and params.seed < 0:
        yield f"seed={params.seed} must not be negative"
    if not 0 <= request.prefix_tokens <= len(ids):
        yield f"prefix_tokens={request.prefix_tokens} must be between 0 and the {len(ids)} input tokens"


def empty_generation(request: GenerateRequest) -> Generation:
    """The answer to a request that was aborted before it began."""
    empty = np.zeros(0, np.int32)
    return Generation(request.request_id, empty, np.zeros(0, np.float32), empty, "abort")


@lru_cache(1 << 16)  # every segment of a response asks again
def request_seed(run_seed: int, epoch: int, index: int, sample: int) -> int:
    """63 bits that depend on all four, the same on every machine."""
    entropy = np.random.SeedSequence([run_seed % 2**64, epoch, index, sample])
    return int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))


def stop_token_ids(hf_path: Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response: the ends of sequence of the tokenizer and of the model's two files.

    Those are generation_config.json (chat models have several) and config.json. SGLang stops at all that the
    files name, also where a request does not ask for it, so every engine must.
    """
    stops = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = Path(hf_path) / name
        if path.is_file():
            listed = json.loads(path.read_text()).get("eos_token_id")
            stops.update(listed if isinstance(listed, list) else [listed])
    return tuple(sorted(stops - {None}))


def identity(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """The settings that a journal is bound to: under others its records cannot be used."""
    rollout = config.rollout
    return {
        **mixture_settings(dataset.sources),
        "prompts": len(dataset.prompts),
        "seed": config.seed,
        "data.shuffle": config.data.shuffle,
        "model.hf_path": str(config.model.hf_path),
        "rollout.group_size": rollout.group_size,
        "rollout.temperature": rollout.temperature,
        "rollout.max_response_tokens": rollout.max_response_tokens,
    }
