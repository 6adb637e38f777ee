"""Supervised fine-tuning, the warm start before RL: next-token training on the solutions of problems.

`bapo sft` calls ``run_sft(config)`` on every rank. No checkpoints: it writes the model once, as a Hugging
Face folder, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.checkpoint.export import export_hf
from bapo_megatron.config import SftConfig
from bapo_megatron.data.chat_template import chat_template_of
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.problem_sets import mixed
from bapo_megatron.data.prompts import MixedSource, Mixture, load_prompts
from bapo_megatron.data.rows import within_difficulty
from bapo_megatron.data.samples import Sample
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.reward.answer_text import THINKING
from bapo_megatron.rollout.engines.requests import stop_token_ids
from bapo_megatron.runtime.distributed import is_main
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.trainer.build import tell_left_out
from bapo_megatron.trainer.kernel_check import check_kernels
from bapo_megatron.types import Prompt


def run_sft(config: SftConfig) -> None:
    """Fine-tune on solutions and write the model as a Hugging Face folder. Collective; process groups must
    exist. Raises ConfigError if a problem has no solution."""
    check_kernels(config.model, config.parallel)
    policy = MegatronPolicy(
        config.model, config.parallel, config.batch, config.optimizer, planned_updates=config.updates
    )
    for update, samples in enumerate(_batches(config, is_main()), start=1):
        packs = pack_samples(samples, config.batch.pack_tokens, layout=policy.pack_layout)
        loss, tokens = policy.update(packs, next_token_loss).sums.tolist()
        if is_main() and (update % 20 == 0 or update == config.updates):
            print(f"update {update}/{config.updates} loss {loss / tokens:.4f}", flush=True)
    export_hf(policy.hf_weights(), config.model.hf_path, config.output)
    if is_main():
        print(f"Hugging Face model: {config.output}")


def next_token_loss(stats: TokenStats, batch: MicroBatch) -> Tensor:
    """Return the cross entropy, -sum_t w_t log p_t over the response tokens t, and their number: [2]."""
    return torch.stack([-(stats.log_prob_T * batch.weight_T).sum(), batch.mask_T.sum()])


def _batches(config: SftConfig, tells: bool = False) -> Iterator[list[Sample]]:
    samples, sources = load_solutions(config, load_tokenizer(config.model.hf_path), tells)
    order = _mixed(sources, config.seed) if sources else _shuffled(len(samples), config.seed)
    for _ in range(config.updates):
        yield [samples[i] for i in islice(order, config.samples_per_update)]


def _shuffled(samples: int, seed: int) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(samples).tolist()


def _mixed(sources: Sequence[MixedSource], seed: int) -> Iterator[int]:
    mixture = Mixture(sources, seed, shuffle=True)
    return (index for number in count() for _, index in mixture.take(number, 1))


def load_solutions(
    config: SftConfig, tokenizer: Any, tells: bool = False
) -> tuple[list[Sample], list[MixedSource]]:
    """Return training samples, each a problem with its solution as the response, and the sources to mix.
    ``tells``: print how many problems are left out. Raises ConfigError if a problem has no solution."""
    files = config.data.files
    solutions = [load_prompts(item.file, tokenizer, config.data.max_prompt_tokens) for item in files]
    solutions = [replace(item, prompts=within_difficulty(item.prompts, config.data)) for item in solutions]
    for item in solutions if tells else ():
        tell_left_out(item, config.data)
    samples = _samples(
        config, tokenizer, [(item.file, each.prompts) for item, each in zip(files, solutions, strict=True)]
    )
    return samples, [mixed(*pair) for pair in zip(config.data.sources, solutions, strict=False)]


def _samples(
    config: SftConfig, tokenizer: Any, problems: Sequence[tuple[Path, Sequence[Prompt]]]
) -> list[Sample]:
    stops = [*filter(None, map(tokenizer.decode, stop_token_ids(config.model.hf_path, tokenizer)))]

    def sample(path: Path, prompt: Prompt) -> Sample:
        solution = prompt.extra_info.get("solution")
        if not isinstance(solution, str) or not solution:
            raise ConfigError(f"data.path={path}, row {prompt.prompt_id}: extra_info.solution is missing")
        if prompt.opens_thinking:  # in the chat template; a solution may begin with the tag, too
            opened = tokenizer.decode(prompt.token_ids_P[-1:]).endswith("\n")
            solution = solution.removeprefix(THINKING).removeprefix("\n" if opened else "")
        while ended := next(filter(solution.rstrip().endswith, stops), None):
            solution = solution.rstrip().removesuffix(ended)  # the stop token is added below
        ids = [*chat_template_of(tokenizer).ids_of_text(solution), tokenizer.eos_token_id]
        return Sample(
            token_ids=np.concatenate([prompt.token_ids_P, np.array(ids, dtype=np.int32)]),
            log_probs_R=np.zeros(len(ids), dtype=np.float32),
            versions_R=np.zeros(len(ids), dtype=np.int32),
            advantage=1.0,
        )

    samples = [sample(path, prompt) for path, prompts in problems for prompt in prompts]
    longest = max(item.positions for item in samples)
    needed = config.parallel.pack_tokens_for(longest)
    if needed > config.batch.pack_tokens:
        raise ConfigError(
            f"batch.pack_tokens={config.batch.pack_tokens} is too small for a sample of {longest} tokens; "
            f"set it to at least {needed}"
        )
    return samples
