"""Table and plots of a report on episodes: turns, given tokens, how responses ended, rewards by turn.

From the run's metrics named ``environment/...`` and ``episode/...``; the table has an environment's own, too,
and its cells are text. Used by ``page.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bapo_megatron.commands.report.data import RunRecord
from bapo_megatron.commands.report.panels import AGES, NEGATIVE, NEUTRAL, POSITIVE, Curve, Panel
from bapo_megatron.commands.report.text import ends, number, percent, source_names

_ROWS = (
    ("turns of a response, mean", "turns_mean"),
    ("turns of a response, most", "turns_max"),
    ("answers to a response", "steps_mean"),
    ("given tokens", "given_share"),
    ("failed environments in a step", "failures"),
    ("responses begun again in a step", "restarts"),
    ("ended by the environment", "finish_stop"),
    ("ended at the longest response", "finish_length"),
    ("ended after the most turns", "finish_turns"),
    ("ended by a failure", "finish_failed"),
)
_SHARES = ("given_share", "finish_stop", "finish_length", "finish_turns", "finish_failed")
_REWARD = "environment/reward_turn_"
"""First part of the names of the rewards by turn."""


def _reward_turns(metrics: Iterable[str]) -> list[int]:
    """The numbers of the answers that have a reward, from 1."""
    return sorted({int(name.removeprefix(_REWARD)) for name in metrics if name.startswith(_REWARD)})


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
    rows = [(label, f"environment/{name}", name in _SHARES) for label, name in _ROWS]
    rows += [(f"reward of answer {turn}", f"{_REWARD}{turn}", False) for turn in _reward_turns(names)]
    rows += [(name.removeprefix("episode/"), name, False) for name in names if name.startswith("episode/")]
    cells = []
    for label, metric, is_share in rows:
        if len(run.steps.known(prefix + metric)):
            form = percent if is_share else number
            cells.append((of + label, [*ends(run.steps, prefix + metric, window, form)]))
    return cells
