"""HTML report of one run or several: ``index.html``, a self-contained page, and its plots as PNG.

``write_report`` writes both and returns the page's path; ``report_command`` is ``bapo report``. A comparison
of runs shows shared plots, results, and the settings that differ. matplotlib is imported only to draw.
"""

from __future__ import annotations

import base64
import json
import os
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from bapo_megatron.checkpoint.run_directory import NOT_SETTINGS
from bapo_megatron.commands.report.conversations import conversations
from bapo_megatron.commands.report.data import RunRecord, headline, read_run, smoothing_window
from bapo_megatron.commands.report.header import comparison_readings, facts, readings
from bapo_megatron.commands.report.panels import DISTRIBUTIONS, PANELS, episode_panels, expert_panels
from bapo_megatron.commands.report.series import (
    FEW_TOKENS,
    LOSS_EVENTS,
    NO_VALUE,
    ends,
    event_marks,
    final_results,
    number,
    short_count,
    staleness_cells,
)
from bapo_megatron.errors import ConfigError, refuse_arguments
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_paths import RunPaths

PAGE = "index.html"
"""The page's file name in a report folder."""
_TITLE = re.compile(rb"(?s)<title>.* \xc2\xb7 (training report|comparison)</title>")
Cells = tuple[str, list[str]]
"""Table row: its name and its cells."""

_OUR_PREFIXES = (
    *("reward", "rollout", "sampler", "policy", "bapo", "contribution", "staleness", "time", "eval"),
    *("source", "corrections", "polarity", "tokens", "entropy_rule", "quadrant", "ratio"),
    *("experts", "sampled", "environment"),
)
"""First parts of the metric names that any run may have."""
_COMPARED_EVENTS = (
    *("start", "resume", "forked", "resume_mismatch_accepted", "config_changed"),
    *LOSS_EVENTS,
)
"""Event kinds in a comparison; a single run's page shows all."""


def write_report(run_dirs: Sequence[Path], folder: Path | None = None) -> Path:
    """Write the page of one run, or of several compared, into ``folder``; return the page's path.

    The default folder is ``report/`` of a single run, ``comparison/`` of the first of several. Raises
    ConfigError for too many runs, a run without metrics, a damaged log, or another program's index.html.
    """
    # Imported here: matplotlib is slow to import.
    from bapo_megatron.commands.report.plots import COLOURS, draw_overview, draw_panel

    if len(run_dirs) > len(COLOURS):
        raise ConfigError(f"{len(run_dirs)} runs are too many for one page: give at most {len(COLOURS)}")
    runs = with_unique_names([read_run(run_dir) for run_dir in run_dirs])
    single = len(runs) == 1
    if folder is None:
        paths = RunPaths(run_dirs[0])
        folder = paths.report if single else paths.comparison
    _make_folder(folder)
    pictures = []
    for panel in (*PANELS, *expert_panels(runs), *episode_panels(runs), *DISTRIBUTIONS):
        if single or panel.compared != ():
            pictures.append({"panel": panel, "uri": svg_uri(draw_panel(panel, runs, folder))})
    if single:
        draw_overview(runs[0], folder / "overview.png")
    page = folder / PAGE
    # Texts of events are foreign: half of a surrogate pair must not end the report.
    write_atomically(page, _render(runs, pictures, COLOURS).encode(errors="replace"))
    return page


def with_unique_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with unique names: runs of the same name get their folder appended."""
    names = [run.name for run in runs]
    return [
        replace(run, config=run.config | {"name": f"{run.name} ({run.run_dir})"})
        if names.count(run.name) > 1
        else run
        for run in runs
    ]


def _make_folder(folder: Path) -> None:
    """Make the report folder. Raises ConfigError if it holds another program's page."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    if os.path.lexists(page) and not _is_report(page):
        raise ConfigError(
            f"{page} is not a page of bapo report, and is kept: name another folder with --output DIR"
        )


def _is_report(page: Path) -> bool:
    """Whether a file is a report or comparison page, of this or an earlier version."""
    if page.is_symlink() or not page.is_file():
        return False
    with page.open("rb") as file:
        return _TITLE.search(file.read(1 << 16)) is not None


# --- the template's values -------------------------------------------------------------------------


def _render(runs: Sequence[RunRecord], pictures: list[dict[str, Any]], colours: Sequence[str]) -> str:
    said = comparison_readings(runs) if len(runs) > 1 else readings(runs[0])
    return render(
        "page.html",
        runs=[_run_cells(run, colour, len(runs) > 1) for run, colour in zip(runs, colours, strict=False)],
        facts=_facts(runs),
        readings=said,
        pictures=pictures,
        few=FEW_TOKENS,
        results=_results(runs) if len(runs) > 1 else [],
        differences=setting_differences([run.config for run in runs]),
        **(_details(runs[0]) if len(runs) == 1 else {}),
    )


def _details(run: RunRecord) -> dict[str, Any]:
    figures = headline(run.steps)
    window = figures["window"]
    names = sorted(set(run.steps.names) - {"step"})
    return {
        "window": window,
        "model": run.config.get("model.hf_path"),
        "resumed": run.resumed_at,
        "losses": any(mark.loss for mark in event_marks(run)),
        "smoothing": smoothing_window(len(run.steps)),
        "conversations": conversations(run) if "environment/turns_mean" in names else [],
        "metrics": [(n, [*ends(run.steps, n, window), number(run.steps.last.get(n))]) for n in names],
        "numbers": [
            (_reward(run), f"reward, mean of the first and last {window} step{'' if window == 1 else 's'}"),
            (f"{figures['steps']:,}", "steps"),
            (f"{len(run.updates):,}", "updates"),
            (short_count(figures["tokens"]), "tokens"),
            (str(timedelta(seconds=round(figures["time_s"]))), "training time"),
        ],
    }


def _run_cells(run: RunRecord, colour: str, compared: bool) -> dict[str, Any]:
    events = [event for event in run.events if not compared or event.get("kind") in _COMPARED_EVENTS]
    settings = sorted(run.config.items())
    return {
        "name": run.name,
        "colour": colour,
        "folder": str(run.run_dir),
        "settings": [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings],
        "staleness": staleness_cells(run),
        "events": [event_cells(event) for event in events],
    }


def _facts(runs: Sequence[RunRecord]) -> list[Cells]:
    columns = [dict(facts(run)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, [column.get(name, NO_VALUE) for column in columns]) for name in names]
    return rows if len(runs) == 1 else [*rows, ("reward", [_reward(run) for run in runs])]


def _reward(run: RunRecord) -> str:
    figures = headline(run.steps)
    return f"{number(figures['reward_first'])} → {number(figures['reward_last'])}"


def _results(runs: Sequence[RunRecord]) -> list[Cells]:
    columns = [final_results(run) for run in runs]
    rows = [(name, [number(column[name]) for column in columns]) for name in columns[0]]
    return rows + [(f"{name}, last step", values) for name, values in own_metrics(runs)]


def own_metrics(runs: Sequence[RunRecord]) -> list[Cells]:
    """Return the last values of user-defined metrics (of losses and measurements), which no panel draws."""
    last = [run.steps.last for run in runs]
    names = dict.fromkeys(name for row in last for name in row if "/" in name)
    own = [name for name in names if name.partition("/")[0] not in _OUR_PREFIXES]
    return [(name, [number(row.get(name)) for row in last]) for name in own]


def setting_differences(configs: Sequence[dict[str, Any]]) -> list[Cells]:
    """Return the settings that differ between runs, with all values; names and directories excluded."""
    names = dict.fromkeys(name for config in configs for name in config)
    rows = []
    for name in sorted(set(names) - set(NOT_SETTINGS)):
        values = [
            json.dumps(config[name], ensure_ascii=False) if name in config else NO_VALUE for config in configs
        ]
        if len(set(values)) > 1:
            rows.append((name, values))
    return rows


def render(template: str, **values: Any) -> str:
    """Render a jinja template of this package to HTML."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(lambda name: files(__package__).joinpath(name).read_text(encoding="utf-8")),
    )
    return environment.get_template(template).render(**values)


def svg_uri(svg: bytes) -> str:
    """Return an SVG as a data URI."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def event_cells(event: dict[str, Any]) -> tuple[str, str, str]:
    """Return an event's table cells: time, kind and details."""
    others = {key: value for key, value in event.items() if key not in ("time", "kind")}
    details = ", ".join(f"{key} {value}" for key, value in others.items())
    time = str(event.get("time", ""))[:19].replace("T", " ")  # whole seconds, without the zone: it is UTC
    return time, str(event.get("kind", "")), details


# --- the command -----------------------------------------------------------------------------------


def report_command(arguments: Sequence[str]) -> None:
    """``bapo report RUN [RUN ...] [--output DIR]``: write the page and print its path."""
    usage = (
        "usage: bapo report RUN [RUN ...] [--output DIR], with directories of runs; DIR: RUN/report of one "
        "run, and comparison in the directory of the first of several"
    )
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--output", nargs="?", const="")
    named, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown or not named.runs or named.output == "":
        refuse_arguments(arguments, usage)
    print(write_report(named.runs, named.output and Path(named.output)))
