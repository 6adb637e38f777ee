"""Table of a report on episodes: turns, given tokens, how responses ended, rewards by turn, own metrics.

Its cells are text, from the run's metrics named ``environment/...`` and ``episode/...``. Used by ``page.py``.
"""

from __future__ import annotations

from bapo_megatron.commands.report.data import RunRecord, mean
from bapo_megatron.commands.report.text import number, percent, source_names

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


def episode_cells(run: RunRecord, window: int) -> list[tuple[str, list[str]]]:
    """The rows of the table: a name, then the means of the first and of the last ``window`` steps.

    None for a run without an environment. With several sources, rows of all episodes, then of each source.
    """
    sources = source_names(run)
    own = [(f"{name}: ", f"source/{name}/") for name in sources]
    return [cell for label, prefix in [("", ""), *own] for cell in _cells(run, window, label, prefix)]


def _cells(run: RunRecord, window: int, of: str, prefix: str) -> list[tuple[str, list[str]]]:
    """The rows of the metrics behind ``prefix``, each label behind ``of``."""
    names = [name.removeprefix(prefix) for name in run.steps.names if name.startswith(prefix)]
    rows = [(label, f"environment/{name}", name in _SHARES) for label, name in _ROWS]
    first = "environment/reward_turn_"
    turns = sorted(int(name.removeprefix(first)) for name in names if name.startswith(first))
    rows += [(f"reward of answer {turn}", f"{first}{turn}", False) for turn in turns]
    rows += [(name.removeprefix("episode/"), name, False) for name in names if name.startswith("episode/")]
    cells = []
    for label, metric, is_share in rows:
        values = run.steps.known(prefix + metric)
        if len(values):
            ends = mean(values[:window]), mean(values[-window:])
            cells.append((of + label, [percent(one) if is_share else number(one) for one in ends]))
    return cells
