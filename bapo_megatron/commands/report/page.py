"""HTML report of a run: ``report/index.html``, one self-contained page, and its plots as PNG.

``report_command`` is ``bapo report``. Importing this module does not import matplotlib: the end of a training
run uses its ``headline``. Used by ``commands/finish.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from bapo_megatron.commands.report.comparison import write_comparison
from bapo_megatron.commands.report.data import (
    PAGE,
    Headline,
    RunRecord,
    headline,
    known_values,
    make_report_folder,
    mean,
    read_run,
)
from bapo_megatron.commands.report.episodes import episode_cells
from bapo_megatron.commands.report.header import facts, main_settings
from bapo_megatron.commands.report.panels import PANELS, Panel
from bapo_megatron.commands.report.readings import readings
from bapo_megatron.commands.report.series import FEW_TOKENS, event_marks
from bapo_megatron.commands.report.sources import SOURCE_COLUMNS, source_cells
from bapo_megatron.commands.report.text import (
    event_cells,
    number,
    render,
    setting_lines,
    short_count,
    staleness_cells,
    svg_uri,
)
from bapo_megatron.errors import refuse_arguments
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_files import check_no_links
from bapo_megatron.runtime.run_paths import RunPaths

__all__ = ["Headline", "headline", "write_report"]


@dataclass(frozen=True)
class Picture:
    """A plot of the page: its panel, and the image as a data URI."""

    panel: Panel
    data_uri: str


@dataclass(frozen=True)
class MetricRow:
    """A row of the metrics table: mean of the first and last steps, and the final value, as text."""

    name: str
    first: str
    last: str
    final: str


def write_report(run_dir: Path, folder: Path | None = None) -> Path:
    """Write the report of a run into ``folder``, by default its ``report/``; returns the page.

    The run may still be training.

    Raises:
        ConfigError: there are no metrics, or a log is damaged.
    """
    # Imported here: matplotlib is slow to import, and a training run needs only `headline`.
    from bapo_megatron.commands.report.distributions import DISTRIBUTIONS
    from bapo_megatron.commands.report.plots import draw_overview, draw_panels, smoothing_window

    run = read_run(run_dir)
    if folder is None:
        check_no_links(run_dir)
    folder = folder or RunPaths(run_dir).report
    make_report_folder(folder)
    svgs = draw_panels(run, folder)
    draw_overview(run, folder / "overview.png")
    pictures = [Picture(panel, svg_uri(svgs[panel.file])) for panel in (*PANELS, *DISTRIBUTIONS)]
    page = folder / PAGE
    write_atomically(page, _render(run, pictures, smoothing_window(len(run.steps))))
    return page


def _render(run: RunRecord, pictures: list[Picture], window: int) -> str:
    figures = headline(run.steps)
    return render(
        "page.html",
        run=run,
        reward=f"{number(figures['reward_first'])} → {number(figures['reward_last'])}",
        window=figures["window"],
        numbers=_numbers(run, figures),
        facts=facts(run),
        readings=readings(run),
        main_settings=main_settings(run.config),
        pictures=pictures,
        smoothing=window,
        metrics=list(_metric_rows(run, figures["window"])),
        settings=setting_lines(run.config),
        few=FEW_TOKENS,
        losses=any(mark.loss for mark in event_marks(run)),
        staleness=staleness_cells(run),
        episodes=episode_cells(run, figures["window"]),
        sources=source_cells(run, figures["window"]),
        source_columns=SOURCE_COLUMNS,
        events=[event_cells(event) for event in run.events],
    )


def _numbers(run: RunRecord, figures: Headline) -> list[tuple[str, str]]:
    """The headline numbers besides the reward, as (text, name)."""
    return [
        (f"{figures['steps']:,}", "steps"),
        (f"{len(run.updates):,}", "updates"),
        (short_count(figures["tokens"]), "tokens"),
        (str(timedelta(seconds=round(figures["time_s"]))), "training time"),
    ]


def _metric_rows(run: RunRecord, window: int) -> Iterator[MetricRow]:
    for name in sorted({name for row in run.steps for name in row} - {"step"}):
        values = known_values(run.steps, name)
        yield MetricRow(
            name,
            number(mean(values[:window])),
            number(mean(values[-window:])),
            number(run.steps[-1].get(name)),
        )


def report_command(arguments: Sequence[str]) -> None:
    """The command ``bapo report RUN [RUN ...] [--output DIR]``: write the page, and print where it is."""
    usage = "usage: bapo report RUN [RUN ...] [--output DIR], with directories of runs"
    runs, output = [Path(argument) for argument in arguments], None
    if "--output" in arguments:
        place = arguments.index("--output")
        if place + 1 == len(arguments):
            refuse_arguments(arguments, usage)
        runs, output = runs[:place] + runs[place + 2 :], runs[place + 1]
    if not runs or any(str(run).startswith("-") for run in runs):
        refuse_arguments(arguments, usage)
    if len(runs) == 1:
        print(write_report(runs[0], output))
    else:
        print(write_comparison(runs, output or common_folder(runs) / "comparison"))


def common_folder(runs: Sequence[Path]) -> Path:
    """The deepest folder that holds all runs."""
    return Path(os.path.commonpath([run.resolve().parent for run in runs]))
