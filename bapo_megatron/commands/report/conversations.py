"""Example episodes of a report as conversations, a tree of them if an episode branches, from RUN/journal.

``conversations(run)`` reads one episode of the first, the middle and the last stored step. An episode that
cannot be read becomes a ``Conversation`` that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

import numpy as np

from bapo_megatron.commands.report.data import RunRecord
from bapo_megatron.commands.report.series import number
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import Piece, TextDecoder
from bapo_megatron.rollout.sampler.step_batches import read_example, steps_in
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.types import GIVEN, FinishReason, Rollout

MOST_TOKENS = 1000
"""Most tokens shown of a block: half from its start, half from its end."""

_SHORT = 600
"""Most tokens of a conversation that is initially open on the page."""

_ENDS: dict[FinishReason, str] = {
    "stop": "ended by the environment",
    "length": "ended at the longest response",
    "turns": "ended after the most turns",
    "failed": "ended by a failure",
}

Speaker = Literal["prompt", "model", "environment"]


@dataclass(frozen=True)
class Block:
    """Block of a conversation: its speaker (prompt, model or environment) and text."""

    speaker: Speaker
    pieces: list[Piece]
    """Ordinary text and special tokens in order; an omission is a piece, too."""


@dataclass(frozen=True)
class Conversation:
    """One episode, or a branch of one: title and blocks of text, or the ``problem`` that prevents them."""

    title: str
    blocks: list[Block]
    is_short: bool = True
    problem: str = ""
    depth: int = 0
    """Number of ancestor branches."""


def conversations(run: RunRecord) -> list[Conversation]:
    """Return up to three episodes, branch by branch. If none can be shown, returns one item that says why."""
    paths = RunPaths(run.run_dir)
    try:
        decoder, steps = _decoder(run, paths), steps_in(paths.journal)
    except ConfigError as error:
        return [Conversation("No episode can be shown as text", [], problem=str(error))]
    if not steps:
        missing = f"{paths.journal} has no step: the journal keeps the last rollout.keep_steps of a run's own"
        return [Conversation("No episode is stored", [], problem=missing)]
    shown = dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1]))
    return [conversation for step in shown for conversation in _conversations(paths.journal, step, decoder)]


def _decoder(run: RunRecord, paths: RunPaths) -> TextDecoder:
    model, problems = run.config.get("model.hf_path"), []
    for folder in (*([Path(model)] if model else []), paths.export):
        try:
            return TextDecoder(folder)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError("; ".join(problems))


def _conversations(journal: Path, step: int, decoder: TextDecoder) -> list[Conversation]:
    """Return a step's example episode; a branch follows its parent and omits the beginning they share."""
    try:
        ids_P, branches = read_example(journal, step)
    except ConfigError as error:  # deleted by the running run, or damaged
        return [Conversation(f"Step {step}", [], problem=str(error))]
    whole = [
        np.concatenate([ids_P[: len(ids_P) * branch.has_prompt], branch.token_ids_R]) for branch in branches
    ]
    made: list[tuple[list[int], Conversation]] = []
    for place in range(len(branches)):
        shared = [_shared(whole[place], other) for other in whole[:place]]
        longest = max(shared, default=0)
        parent = shared.index(longest) if longest else None
        way = [*(() if parent is None else made[parent][0]), place]
        said = _branch(step, ids_P, branches, place, longest, parent, decoder)
        made.append((way, replace(said, depth=len(way) - 1)))
    return [branch for _, branch in sorted(made, key=itemgetter(0))]


def _shared(ids: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    most = min(len(ids), len(other))
    differs = np.flatnonzero(ids[:most] != other[:most])
    return int(differs[0]) if len(differs) else most


def _branch(
    step: int,
    ids_P: np.ndarray,
    branches: Sequence[Rollout],
    place: int,
    shared: int,
    parent: int | None,
    decoder: TextDecoder,
) -> Conversation:
    """Return a branch after its first ``shared`` tokens, which branch ``parent`` shows."""
    branch = branches[place]
    ids_P = ids_P if branch.has_prompt else ids_P[:0]
    ids_R, mask_R = branch.token_ids_R, branch.loss_mask_R
    if mask_R is None:
        mask_R = np.ones(len(ids_R), np.bool_)
    own, is_given_R = max(0, shared - len(ids_P)), branch.versions_R == GIVEN
    turns = list(_turns(ids_R[own:], mask_R[own:]))
    blocks = [_block("prompt", ids_P[shared:], decoder)] if shared < len(ids_P) else []
    blocks += [_block(who, ids, decoder) for who, ids in turns]
    if blocks and not branch.has_prompt and is_given_R[: own + 1].all():  # the model has not spoken yet
        blocks[0] = replace(blocks[0], speaker="prompt")
    sampled = sum(who == "model" for who, _ in turns)
    name = f"Step {step}"
    if len(branches) > 1:
        name += f", branch {place + 1} of {len(branches)}"
        name += f", behind {shared:,} tokens of branch {parent + 1}" if parent is not None else ""
    said = (
        f"{name}: reward {number(float(branch.reward))}, {sampled} turn{'' if sampled == 1 else 's'}, "
        f"{len(ids_R):,} tokens, {np.count_nonzero(is_given_R):,} of them given, "
        f"{_end(branch.finish_reason, mask_R)}"
    )
    return Conversation(said, blocks, len(ids_P) + len(ids_R) - shared <= _SHORT)


def _end(reason: FinishReason, mask_R: np.ndarray) -> str:
    """Return how a response ended; one without environment answers ended by itself."""
    return "ended by a stop token" if reason == "stop" and mask_R.all() else _ENDS[reason]


def _turns(ids_R: np.ndarray, mask_R: np.ndarray) -> Iterator[tuple[Speaker, np.ndarray]]:
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
