"""Episodes of a report: their table and plots, and three conversations as blocks of text.

Table and plots are of the run's metrics named ``environment/...`` and ``episode/...``: turns, given tokens,
how responses ended, rewards by turn; the table has an environment's own, too, and its cells are text. The
conversations are out of the run's journal: one of the first step that it still has, one of the middle, one of
the last. Only these files are opened, and of each only what is shown is read, so the length of a run and of
its steps costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np

from bapo_megatron.commands.report.data import RunRecord
from bapo_megatron.commands.report.panels import AGES, NEGATIVE, NEUTRAL, POSITIVE, Curve, Panel
from bapo_megatron.commands.report.series import ends, number, percent, source_names
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import Piece, TextDecoder
from bapo_megatron.rollout.sampler.step_batches import read_example, steps_in
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.types import FinishReason

_ENDS: dict[FinishReason, str] = {
    "stop": "ended by the environment",
    "length": "ended at the longest response",
    "turns": "ended after the most turns",
    "failed": "ended by a failure",
}
_ROWS = (
    ("turns of a response, mean", "turns_mean", number),
    ("turns of a response, most", "turns_max", number),
    ("answers to a response", "steps_mean", number),
    ("given tokens", "given_share", percent),
    ("failed environments in a step", "failures", number),
    ("responses begun again in a step", "restarts", number),
    *((said, f"finish_{reason}", percent) for reason, said in _ENDS.items()),
)
_REWARD = "environment/reward_turn_"
"""First part of the names of the rewards by turn."""
_REWARD_TURN = re.compile(f"{_REWARD}([0-9]{{1,9}})")

MOST_TOKENS = 1000
"""Most tokens of a block that are shown: half of them from its start, half from its end."""

_SHORT = 600
"""Most tokens of a conversation that is open when the page opens."""

Speaker = Literal["prompt", "model", "environment"]


def _reward_turns(metrics: Iterable[str]) -> list[int]:
    """The numbers of the answers that have a reward, from 1."""
    return sorted({int(turn[1]) for name in metrics if (turn := _REWARD_TURN.fullmatch(name))})


def episode_panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """The plots by step, each with the curves that some run has; none for runs without an environment."""
    names = {name for run in runs for name in run.steps.names}
    if "environment/turns_mean" not in names:
        return []
    turns = _reward_turns(names)[: len(AGES)]
    panels = (
        Panel(
            "turns",
            "Turns of an episode",
            "mean of a response",
            (
                Curve("environment/turns_mean", NEUTRAL, "turns of the model"),
                Curve("episode/calls", POSITIVE, "calls of tools"),
                Curve("episode/call_errors", NEGATIVE, "calls with an error"),
            ),
            "How often the model speaks in a response, and asks a tool, where the environment counts that.",
            "no figure",
            compared=(0,),
        ),
        Panel(
            "episode_ends",
            "How episodes end",
            "share of responses",
            (
                Curve("environment/finish_stop", POSITIVE, "by the environment"),
                Curve("environment/finish_turns", NEUTRAL, "most turns"),
                Curve("environment/finish_length", AGES[0], "longest response"),
                Curve("environment/finish_failed", NEGATIVE, "failure", dashed=True),
            ),
            "An episode should end because it is over. One that is cut off has no answer, and a failure of "
            "the environment is not the model's fault: see the events.",
            "no figure",
            "percent",
            compared=(0,),
        ),
        Panel(
            "reward_by_turn",
            "Reward by answer",
            "mean reward of an answer",
            tuple(Curve(f"{_REWARD}{turn}", AGES[place], f"{turn}") for place, turn in enumerate(turns)),
            "Mean reward that the environment gave with its first answer, its second, and so on, over the "
            "responses that had one.",
            "no figure",
            "auto",
            compared=(),
        ),
    )
    known = [replace(panel, curves=tuple(c for c in panel.curves if c.metric in names)) for panel in panels]
    return [panel for panel in known if panel.curves]


def episode_cells(run: RunRecord, window: int) -> list[tuple[str, list[str]]]:
    """The rows of the table: a name, then the means of the first and of the last ``window`` steps (``ends``).

    None for a run without an environment. With several sources, rows of all episodes, then of each source.
    """
    sources = source_names(run)
    own = [(f"{name}: ", f"source/{name}/") for name in sources]
    return [cell for label, prefix in [("", ""), *own] for cell in _cells(run, window, label, prefix)]


def _cells(run: RunRecord, window: int, of: str, prefix: str) -> list[tuple[str, list[str]]]:
    """The rows of the metrics behind ``prefix``, each label behind ``of``."""
    names = [name.removeprefix(prefix) for name in run.steps.names if name.startswith(prefix)]
    rows = [(label, f"environment/{name}", form) for label, name, form in _ROWS]
    rows += [(f"reward of answer {turn}", f"{_REWARD}{turn}", number) for turn in _reward_turns(names)]
    rows += [(name.removeprefix("episode/"), name, number) for name in names if name.startswith("episode/")]
    return [
        (of + label, [*ends(run.steps, prefix + metric, window, form)])
        for label, metric, form in rows
        if len(run.steps.known(prefix + metric))
    ]


@dataclass(frozen=True)
class Block:
    """A block of a conversation: who wrote it, and its text."""

    speaker: Speaker
    pieces: list[Piece]
    """Ordinary texts and special tokens, in their order; what was left out is a piece, too."""


@dataclass(frozen=True)
class Conversation:
    """One episode as text, or why it cannot be shown."""

    title: str
    blocks: list[Block]
    is_short: bool = True
    problem: str = ""


def conversations(run: RunRecord) -> list[Conversation]:
    """The three episodes, fewer of a short run. A problem of all of them is one without blocks."""
    paths = RunPaths(run.run_dir)
    try:
        decoder, steps = _decoder(run, paths), steps_in(paths.journal)
    except ConfigError as error:
        return [Conversation("No episode can be shown as text", [], problem=str(error))]
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
