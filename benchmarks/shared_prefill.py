"""The embedded engine's prefill of a group: each response's prompt on its own, and the group's prompt once.

    python -m benchmarks.shared_prefill         # two minutes on two cores
    python -m benchmarks.shared_prefill --quick

A group asks for responses to one prompt, each with a seed of its own. Before, every response's prompt went
through the model; now it does once, and the other rows get copies of its keys, values and logits. Both sample
the same tokens, which is checked. They take turns, so that a busy machine hits both alike; the ratio is that
of each round's two, in processor time and in time. Models are of random float32 weights and sample their
limit of new tokens. Writes benchmarks/results/shared_prefill.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.rollout.engines.local import model as engine
from bapo_megatron.rollout.engines.local.decoding import Decoding
from bapo_megatron.rollout.engines.local.model import LocalModel
from bapo_megatron.types import GenerateRequest, Generation, SamplingParams
from benchmarks.common import is_quick, machine, write

GROUP, PROMPT, NEW = 8, 40, 12
SHAPES: dict[str, dict[str, Any]] = {
    "tiny, 4 layers of 64": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 264,
    },
    "SmolLM2-135M's, 30 layers of 576": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
    },
}


class EachAlone(Decoding):
    """The decoding of before: all prompts are different ones."""

    def _pad_prompts(self, longest: int) -> None:
        super()._pad_prompts(longest)
        self._prompt_B = list(range(len(self._prompt_B)))


DECODINGS = {"each alone": EachAlone, "shared": Decoding}


@dataclass(frozen=True)
class Measured:
    """Medians over rounds."""

    prefilled: dict[str, int]
    """Prompt tokens that went through the model, of each way."""
    seconds: dict[str, float]
    cpu_ratios: list[float]
    """Processor time of ``each alone`` over that of ``shared``, of each round."""
    ratios: list[float]


def measure(shape: dict[str, Any], groups: int, rounds: int) -> Measured:
    """Both ways in turns on a random Llama of this shape."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, tie_word_embeddings=True, max_position_embeddings=2048)
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
        loaded = LocalModel(Path(folder), max_batch=GROUP * groups)
    try:
        return _in_turns(loaded, requests(groups, shape["vocab_size"]), rounds)
    finally:
        loaded.close()


def requests(groups: int, vocabulary: int) -> list[GenerateRequest]:
    """``GROUP`` responses to each of ``groups`` random prompts; no stop token."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(0, vocabulary, (groups, PROMPT)).astype(np.int32)
    return [
        GenerateRequest(f"{place}-{n}", ids, SamplingParams(1.0, NEW, (), GROUP * place + n))
        for place, ids in enumerate(prompts)
        for n in range(GROUP)
    ]


def _in_turns(loaded: LocalModel, asked: Sequence[GenerateRequest], rounds: int) -> Measured:
    prefilled: dict[str, int] = {}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in DECODINGS}
    answers: dict[str, list[Generation]] = {}
    for number in range(rounds + 1):  # the first warms up
        order = list(DECODINGS) if number % 2 else list(DECODINGS)[::-1]
        for name in order:
            engine.Decoding = DECODINGS[name]  # type: ignore[attr-defined]
            begun = time.perf_counter(), time.process_time()
            if number:
                loaded.generate(asked)
                times[name].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
            else:
                prefilled[name], answers[name] = _counted(loaded, asked)
    old, new = answers.values()
    if any(a.token_ids_R.tolist() != b.token_ids_R.tolist() for a, b in zip(old, new, strict=True)):
        raise SystemExit("the two ways sampled different tokens")
    pairs = list(zip(*times.values(), strict=True))
    return Measured(
        prefilled,
        {name: statistics.median(wall for wall, _ in taken) for name, taken in times.items()},
        [before[1] / after[1] for before, after in pairs],
        [before[0] / after[0] for before, after in pairs],
    )


def _counted(loaded: LocalModel, asked: Sequence[GenerateRequest]) -> tuple[int, list[Generation]]:
    """The tokens of calls of the model with more than one column, and the answers."""
    seen: list[Tensor] = []
    hook = loaded._model.register_forward_pre_hook(
        lambda _module, _args, named: seen.append(named["input_ids"]), with_kwargs=True
    )
    try:
        answers = loaded.generate(asked)
    finally:
        hook.remove()
    return sum(ids.numel() for ids in seen if ids.size(1) > 1), answers


def rows(groups: int, rounds: int, shapes: Sequence[str]) -> list[str]:
    """A row of the table for each shape."""
    lines = []
    for name in shapes:
        found = measure(SHAPES[name], groups, rounds)
        prefilled = " -> ".join(f"{count:,}" for count in (found.prefilled[way] for way in DECODINGS))
        seconds = " -> ".join(f"{value:.2f}" for value in found.seconds.values())
        lines.append(
            f"| {name} | {prefilled} | {seconds} | {_ratio(found.ratios)} | **{_ratio(found.cpu_ratios)}** |"
        )
    return lines


def _ratio(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(groups: int, rounds: int) -> str:
    table = "\n".join(rows(groups, rounds, list(SHAPES)))
    tokens = (PROMPT + NEW - 1) / (PROMPT / GROUP + NEW - 1)
    return f"""# Embedded engine: the prompt of a group is prefilled once

Command: `python -m benchmarks.shared_prefill`

{machine()}. {groups} groups of {GROUP} responses, prompts of {PROMPT} tokens, {NEW} new tokens each, random
Llama models in float32. Each response's prompt on its own -> the group's prompt once; {rounds} rounds in
turns. Ratios are old over new, the median over the rounds with the smallest and the largest. The sampled
tokens are the same.

| model | prompt tokens through the model | seconds | ratio of time | ratio of processor time |
|---|---:|---:|---:|---:|
{table}

For each response {PROMPT} tokens of its prompt and {NEW - 1} of its own went through the model, and now
{PROMPT / GROUP:g} and {NEW - 1}: {tokens:.1f} times fewer. Longer responses gain less. Single rounds scatter
on a busy machine.
"""


if __name__ == "__main__":
    if is_quick(__doc__):
        print("\n".join(rows(2, 2, list(SHAPES)[:1])))
    else:
        write("shared_prefill", report(4, 7))
