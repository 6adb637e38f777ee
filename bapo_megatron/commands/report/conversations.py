"""Conversations of a report: three episodes of a run, out of its journal, as blocks of text.

One of the first step that the journal still has, one of the middle, one of the last. Only these files are
opened, and of each only what is shown is read, so the length of a run and of its steps costs nothing. Used by
``page.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np

from bapo_megatron.commands.report.data import RunRecord
from bapo_megatron.commands.report.text import number
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import Piece, TextDecoder
from bapo_megatron.rollout.sampler.step_batches import read_example, steps_in
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.types import FinishReason

MOST_TOKENS = 1000
"""Most tokens of a block that are shown: half of them from its start, half from its end."""

_SHORT = 600
"""Most tokens of a conversation that is open when the page opens."""

_ENDS: dict[FinishReason, str] = {
    "stop": "ended by the environment",
    "length": "ended at the longest response",
    "turns": "ended after the most turns",
    "failed": "ended by a failure",
}

Speaker = Literal["prompt", "model", "environment"]


@dataclass(frozen=True)
class Block:
    """A block of a conversation: who wrote it, and its text. Made by ``conversations``."""

    speaker: Speaker
    pieces: list[Piece]
    """Ordinary texts and special tokens, in their order; what was left out is a piece, too."""


@dataclass(frozen=True)
class Conversation:
    """One episode as text, or why it cannot be shown. Made by ``conversations``."""

    title: str
    blocks: list[Block]
    is_short: bool = True
    problem: str = ""


def conversations(run: RunRecord) -> list[Conversation]:
    """The three episodes, fewer of a short run. A problem of all of them is one without blocks."""
    paths = RunPaths(run.run_dir)
    try:
        decoder = _decoder(run, paths)
    except ConfigError as error:
        return [Conversation("No episode can be shown as text", [], problem=str(error))]
    steps = steps_in(paths.journal)
    if not steps:
        missing = f"{paths.journal} has no step: the journal keeps the last rollout.keep_steps of a run's own"
        return [Conversation("No episode is stored", [], problem=missing)]
    shown = dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1]))
    return [_conversation(paths.journal, step, decoder) for step in shown]


def _decoder(run: RunRecord, paths: RunPaths) -> TextDecoder:
    """The tokenizer of the run's model, or of its export. ConfigError that names both if there is neither."""
    model, problems = run.config.get("model.hf_path"), []
    for folder in (*([Path(model)] if model else []), paths.export):
        try:
            return TextDecoder(folder)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError("; ".join(problems))


def _conversation(journal: Path, step: int, decoder: TextDecoder) -> Conversation:
    try:
        ids_P, found = read_example(journal, step)
    except ConfigError as error:  # deleted while the run goes on, or damaged
        return Conversation(f"Step {step}", [], problem=str(error))
    ids_R, mask_R = found.token_ids_R, found.loss_mask_R
    if mask_R is None:
        mask_R = np.ones(len(ids_R), np.bool_)
    turns = list(_turns(ids_R, mask_R))
    blocks = [_block("prompt", ids_P, decoder), *(_block(who, ids, decoder) for who, ids in turns)]
    sampled = sum(who == "model" for who, _ in turns)
    said = (
        f"Step {step}: reward {number(float(found.reward))}, {sampled} turn{'' if sampled == 1 else 's'}, "
        f"{len(ids_R):,} tokens, {np.count_nonzero(~mask_R):,} of them given, "
        f"{_end(found.finish_reason, mask_R)}"
    )
    return Conversation(said, blocks, len(ids_P) + len(ids_R) <= _SHORT)


def _end(reason: FinishReason, mask_R: np.ndarray) -> str:
    """How a response ended; one without answers of an environment ended by itself."""
    return "ended by a stop token" if reason == "stop" and mask_R.all() else _ENDS[reason]


def _turns(ids_R: np.ndarray, mask_R: np.ndarray) -> Iterator[tuple[Speaker, np.ndarray]]:
    """The runs of sampled and of given tokens: between two turns of the model there are given ones."""
    at = 0
    for is_sampled, tokens in groupby(mask_R.tolist()):
        end = at + sum(1 for _ in tokens)
        yield "model" if is_sampled else "environment", ids_R[at:end]
        at = end


def _block(speaker: Speaker, ids: np.ndarray, decoder: TextDecoder) -> Block:
    tokens: list[int] = ids.tolist()
    if len(tokens) <= MOST_TOKENS:
        return Block(speaker, decoder.pieces(tokens))
    half = MOST_TOKENS // 2
    left_out: Piece = (f" … {len(tokens) - 2 * half:,} tokens … ", True)
    return Block(speaker, [*decoder.pieces(tokens[:half]), left_out, *decoder.pieces(tokens[-half:])])
