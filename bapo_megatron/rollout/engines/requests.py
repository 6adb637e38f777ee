"""Helpers for generation requests: tokenized dataset, seeds, stop tokens, validation, decoding of responses.

Engines call ``check_request``, which raises ValueError for token ids or lengths that could crash them.
``stop_token_ids`` and ``limits_of`` read a model folder; ``identity`` returns the settings of a run that a
resume must not change. Nothing here calls an engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.config import RunConfig
from bapo_megatron.data.prompts import MixedSource, ends_in_thinking, mixture_settings
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import read_model_shape, read_text_config
from bapo_megatron.reward.answer_text import THINKING, THOUGHT
from bapo_megatron.runtime.files import read_file_inside
from bapo_megatron.types import GenerateRequest, Generation, Prompt, ResponseTokens, RouteShape


@dataclass(frozen=True)
class Dataset:
    """A run's tokenized prompts and stop tokens, and the tokenizer, which decodes responses and turns."""

    prompts: Sequence[Prompt]
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    """The model's stop tokens; environments may add more."""
    sources: tuple[MixedSource, ...] = ()
    """Prompt sources, in order; empty in a run with one file."""
    tools_sha256: str = ""
    """Digest of the tools described in the prompts; empty without tools."""

    def texts(self, ids: Sequence[np.ndarray]) -> list[str]:
        return [response_text(self.tokenizer, response_ids) for response_ids in ids]

    def turn_text(self, ids: np.ndarray, stops: Sequence[int]) -> str:
        """Decode a model turn, with special tokens but without the token of ``stops`` that ended it."""
        listed = ids.tolist()
        if listed and listed[-1] in stops:
            listed.pop()
        text: str = self.tokenizer.decode(listed, skip_special_tokens=False)
        return text


def response_text(tokenizer: Any, ids: np.ndarray) -> str:
    """Decode a response without special tokens, except thinking tags and single characters. Rewards find the
    answer after the thinking tags, which some tokenizers mark as special. Some models have ``!`` as a special
    padding token, and an answer's factorial must survive."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: str(token) for number, token in added.items() if token.special}
    told = {n for n, text in special.items() if text in (THINKING, THOUGHT) or len(text.strip()) < 2}
    kept = [id_ for id_ in ids.tolist() if not told or id_ in told or id_ not in special]
    decoded: str = tokenizer.decode(kept, skip_special_tokens=not told)
    return decoded


def prompt_of_turn(tokenizer: Any, prompt: Prompt, ids_R: np.ndarray, start: int) -> Prompt:
    """Return the prompt for the turn that begins at response token ``start``, with ``opens_thinking`` set by
    the tokens before it: R1's template opens a thought after a prompt, but not after a tool's answer."""
    if start == 0:
        return prompt
    return replace(prompt, opens_thinking=ends_in_thinking(tokenizer, ids_R[:start]))


@dataclass(frozen=True)
class ModelLimits:
    """A model's limits on requests: vocabulary and context length."""

    vocabulary: int
    """Exclusive upper bound on token ids."""
    context: int
    """Most tokens of prompt and response together."""


def limits_of(hf_path: Path) -> ModelLimits:
    """Read the model limits from an HF folder's config.json."""
    _, config = read_text_config(hf_path)
    return ModelLimits(config["vocab_size"], config["max_position_embeddings"])


def asked_routes(config: RunConfig) -> RouteShape | None:
    """Return the shape of the routes that a run requests from its engines; None if it requests none."""
    if config.rollout.route_replay == "off":
        return None
    shape = read_model_shape(config.model.hf_path)
    experts = shape.experts
    return None if experts is None else RouteShape(shape.layers, experts.per_token, experts.count)


def check_request(request: GenerateRequest, limits: ModelLimits) -> None:
    """Raise ValueError, with the request's id and first mistake, if it is invalid."""
    if problem := next(_problems(request, limits), None):
        raise ValueError(f"request {request.request_id!r}: {problem}")


def _problems(request: GenerateRequest, limits: ModelLimits) -> Iterator[str]:
    vocabulary, context = limits.vocabulary, limits.context
    ids, params = np.asarray(request.input_ids), request.params
    if not len(ids):
        yield "input_ids must have at least one token"
    elif ids.min() < 0 or ids.max() >= vocabulary:
        yield f"input_ids span {ids.min()} to {ids.max()}; the vocabulary is 0 to {vocabulary - 1}"
    if params.max_new_tokens < 1:
        yield f"max_new_tokens={params.max_new_tokens} must be at least 1"
    if len(ids) + params.max_new_tokens > context:
        yield (
            f"{len(ids)} input tokens and max_new_tokens={params.max_new_tokens} are more than the "
            f"model's context (max_position_embeddings={context})"
        )


def empty_generation(request: GenerateRequest) -> Generation:
    """Return an answer without tokens, for a request that was aborted before it began."""
    return Generation(
        **ResponseTokens.joined([]).columns, request_id=request.request_id, finish_reason="abort"
    )


@lru_cache(1 << 16)  # every segment of a response asks again
def request_seed(run_seed: int, epoch: int, index: int, sample: int) -> int:
    """Return a response's seed: a 63-bit hash of the arguments, equal on every machine."""
    entropy = np.random.SeedSequence([run_seed % 2**64, epoch, index, sample])
    return int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))


_LLAMAS_END = "<|eom_id|>"
"""SGLang's extra stop token (``_ADDITIONAL_STOP_TOKEN_TEXTS``); base and distilled models' files omit it."""


def stop_token_ids(hf_path: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the stop tokens: end-of-sequence ids of tokenizer, generation_config.json and config.json, and
    ``<|eom_id|>`` of every Llama 3, also R1-Distill-Llama. SGLang stops at all of them whatever a request
    says, so every engine must. Raises ConfigError if a file is unreadable or its ids are not integers."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    stops = {tokenizer.eos_token_id, added.get(_LLAMAS_END)}
    for name in ("config.json", "generation_config.json"):
        try:
            listed = json.loads(read_file_inside(hf_path, name)).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError, AttributeError) as error:
            why = f"{hf_path / name} cannot be read: {str(error)[:200]}"
            raise ConfigError(f"model.hf_path: {why}") from None
        stop_ids = listed if isinstance(listed, list) else [listed]
        if not all(token is None or type(token) is int for token in stop_ids):
            raise ConfigError(
                f"model.hf_path: {hf_path / name} has eos_token_id={listed!r:.200}: it must be a token id or "
                "several; mend the file"
            )
        stops.update(stop_ids)
    return tuple(sorted(stops - {None}))


def unstopped_end(tokenizer: Any, stops: Sequence[int]) -> str | None:
    """Return the added token with which the chat template ends a model turn, if it is not in ``stops``; else
    None. A Qwen base model stops only at ``<|endoftext|>``, but its template writes ``<|im_end|>``."""
    mark = "Aturn7f3aEnd"
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": mark}]
    try:
        tail: str = tokenizer.apply_chat_template(messages, tokenize=False).rpartition(mark)[2]
    except Exception:  # a template raises whatever its author chose
        return None
    first = tokenizer.encode(tail, add_special_tokens=False)[:1]
    added = {number: text for text, number in tokenizer.get_added_vocab().items()}
    return next((added[token] for token in first if token in added and token not in stops), None)


ENVIRONMENT = "environment.function"
"""Key of a journal's identity: the environment of all prompts, or, if they differ, of each source by name."""

PROMPTS = "model.prompts_sha256"
"""Key of a journal's identity: digest of all prompts' tokens. Older journals lack it."""


def identity(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """Return the identity of a sampler's journal: the settings that a resume must not change, by name."""
    rollout, names = config.rollout, config.data.source_names or ("",)
    by_source = {name: config.environments[name].function for name in names}
    environment = by_source if len({*by_source.values()}) > 1 else by_source[names[0]]
    # A version without environments compares the size, and so refuses such a journal with a clear message.
    optional: dict[str, Any] = {} if environment is None else {ENVIRONMENT: environment}
    if dataset.tools_sha256:
        optional["environment.tools"] = dataset.tools_sha256
    size = rollout.group_size if environment is None else f"{rollout.group_size} episodes of an environment"
    return {
        **optional,
        **mixture_settings(dataset.sources),
        "prompts": len(dataset.prompts),
        "seed": config.seed,
        "data.shuffle": config.data.shuffle,
        "model.hf_path": str(config.model.hf_path),
        "rollout.group_size": size,
        "rollout.temperature": rollout.temperature,
        "rollout.max_response_tokens": rollout.max_response_tokens,
        PROMPTS: _digest(dataset.prompts),
    }


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt.token_ids_P).to_bytes(8, "little") + prompt.token_ids_P.tobytes())
    return digest.hexdigest()
