"""HTML comparison of several runs: one page with shared plots, results, and the settings that differ.

``bapo report`` calls ``write_comparison`` if it is given more than one run. Used by ``page.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bapo_megatron.checkpoint.run_directory import NOT_SETTINGS
from bapo_megatron.commands.report.data import PAGE, RunRecord, headline, make_report_folder, read_run
from bapo_megatron.commands.report.header import facts
from bapo_megatron.commands.report.panels import PANELS, Panel
from bapo_megatron.commands.report.readings import comparison_readings
from bapo_megatron.commands.report.series import FEW_TOKENS, LOSS_EVENTS, final_results
from bapo_megatron.commands.report.text import (
    NO_VALUE,
    event_cells,
    number,
    render,
    setting_lines,
    staleness_cells,
    svg_uri,
)
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically

_OUR_PREFIXES = (
    *("reward", "rollout", "sampler", "policy", "bapo", "contribution", "staleness", "time", "eval"),
    *("source", "corrections", "polarity", "tokens", "raised", "entropy_rule", "quadrant", "ratio"),
)
"""First parts of the names of metrics that every run may have."""
_SHOWN_EVENTS = ("start", "resume", "forked", "resume_mismatch_accepted", "config_changed", *LOSS_EVENTS)


@dataclass(frozen=True)
class ComparedRun:
    """A run in the page's list of runs: plain data for the template, already formatted."""

    name: str
    colour: str
    folder: str
    settings: list[str]
    """The resolved configuration, one setting a line."""
    staleness: list[tuple[str, list[str]]]
    events: list[tuple[str, str, str]]
    """Starts, resumes and losses."""


@dataclass(frozen=True)
class LayeredPicture:
    """A panel (plot) for the page, as data URIs: its axes, and a layer for each run."""

    panel: Panel
    lines: str
    axes_uri: str
    run_uris: list[str]


def write_comparison(run_dirs: Sequence[Path], folder: Path) -> Path:
    """Write the comparison of several runs into ``folder``; returns the page.

    Raises:
        ConfigError: too many runs, one twice, one without metrics, or a damaged log.
    """
    # Imported here: matplotlib is slow to import.
    from bapo_megatron.commands.report.comparison_plots import COLOURS, curves_of, draw_comparison
    from bapo_megatron.commands.report.distributions import DISTRIBUTIONS

    _check_runs(run_dirs, len(COLOURS))
    runs = with_unique_names([read_run(run_dir) for run_dir in run_dirs])
    make_report_folder(folder)
    drawn = list(zip(runs, COLOURS, strict=False))
    pictures = []
    for panel in (*PANELS, *DISTRIBUTIONS):
        if panel.compared != ():
            layers = draw_comparison(panel, drawn, folder)
            uris = [svg_uri(layer) for layer in layers.runs]
            lines = _line_names([curve.label or "" for curve in curves_of(panel)])
            pictures.append(LayeredPicture(panel, lines, svg_uri(layers.axes), uris))
    page = folder / PAGE
    text = render(
        "comparison.html",
        runs=[_compared(run, colour) for run, colour in drawn],
        facts=_facts(runs),
        readings=comparison_readings(runs),
        few=FEW_TOKENS,
        results=_results(runs),
        pictures=pictures,
        differences=setting_differences([run.config for run in runs]),
    )
    write_atomically(page, text)
    return page


def with_unique_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs with unique names: the folder's name is appended to a name that several runs have."""
    names = [run.name for run in runs]
    return [
        replace(run, config=run.config | {"name": f"{run.name} ({run.run_dir.resolve().name})"})
        if names.count(run.name) > 1
        else run
        for run in runs
    ]


def setting_differences(configs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The settings that differ between runs, with every run's value; without names and directories."""
    names = dict.fromkeys(name for config in configs for name in config)
    rows = []
    for name in sorted(set(names) - set(NOT_SETTINGS)):
        values = [
            json.dumps(config[name], ensure_ascii=False) if name in config else NO_VALUE for config in configs
        ]
        if len(set(values)) > 1:
            rows.append((name, values))
    return rows


def _check_runs(run_dirs: Sequence[Path], most: int) -> None:
    if len(run_dirs) > most:
        raise ConfigError(f"{len(run_dirs)} runs are too many for one page: give at most {most}")
    places = [run_dir.resolve() for run_dir in run_dirs]
    for run_dir, place in zip(run_dirs, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{run_dir} is given twice: name each run once")


def _compared(run: RunRecord, colour: str) -> ComparedRun:
    cells = [event_cells(event) for event in run.events if event.get("kind") in _SHOWN_EVENTS]
    return ComparedRun(
        run.name, colour, str(run.run_dir), setting_lines(run.config), staleness_cells(run), cells
    )


def _facts(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    columns = [dict(facts(run)) for run in runs]
    rewards = [headline(run.steps) for run in runs]
    said = [f"{number(reward['reward_first'])} → {number(reward['reward_last'])}" for reward in rewards]
    names = dict.fromkeys(name for column in columns for name in column)
    return [*((name, [column.get(name, NO_VALUE) for column in columns]) for name in names), ("reward", said)]


def _results(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    columns = [final_results(run) for run in runs]
    rows = [(name, [number(column[name]) for column in columns]) for name in columns[0]]
    return rows + [(f"{name}, last step", values) for name, values in own_metrics(runs)]


def own_metrics(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """User-defined metrics (of the user's losses and measurements), which no panel draws: last values."""
    last = [run.steps[-1] if run.steps else {} for run in runs]
    names = dict.fromkeys(name for row in last for name in row if "/" in name)
    own = [name for name in names if name.partition("/")[0] not in _OUR_PREFIXES]
    return [(name, [number(row.get(name)) for row in last]) for name in own]


def _line_names(labels: Sequence[str]) -> str:
    """The key to line styles, e.g. "Solid: upper; dashed: lower."; empty for a plot of one curve."""
    if len(labels) < 2:
        return f"Shown: {labels[0]}." if labels and labels[0] else ""
    lines = zip(("solid", "dashed", "dotted"), labels, strict=False)
    return "; ".join(f"{line}: {label}" for line, label in lines).capitalize() + "."
