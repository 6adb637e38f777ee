"""``report/index.html``: a run on one page that needs nothing but itself, and its pictures as PNG."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from bapo_megatron.files import write_atomically
from bapo_megatron.report_data import Headline, RunRecord, headline, mean, read_run
from bapo_megatron.report_panels import PANELS, Panel

__all__ = ["Headline", "headline", "write_report"]

_NO_VALUE = "–"  # noqa: RUF001, the dash is meant


@dataclass(frozen=True)
class Picture:
    """A panel as the page shows it."""

    panel: Panel
    data_uri: str


@dataclass(frozen=True)
class MetricRow:
    """A line of the table of values."""

    name: str
    first: str
    last: str
    final: str


def write_report(run_dir: Path) -> Path:
    """Write ``report/`` into a run directory and return the page. The run may still be under way.

    Raises:
        ConfigError: there are no metrics, or a log is damaged.
    """
    # Imported here: it brings matplotlib, and a training run that imports `headline` should not wait.
    from bapo_megatron.report_plots import draw_overview, draw_panels, smoothing_window

    run = read_run(run_dir)
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    svgs = draw_panels(run, folder)
    draw_overview(run, folder / "overview.png")
    pictures = [Picture(panel, _svg_uri(svgs[panel.file])) for panel in PANELS]
    page = folder / "index.html"
    write_atomically(page, _render(run, pictures, smoothing_window(len(run.steps))))
    return page


def _render(run: RunRecord, pictures: list[Picture], window: int) -> str:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = files("bapo_megatron").joinpath("report_page.html").read_text(encoding="utf-8")
    figures = headline(run.steps)
    return environment.from_string(template).render(
        run=run,
        reward=f"{_number(figures['reward_first'])} → {_number(figures['reward_last'])}",
        window=figures["window"],
        facts=_facts(run, figures),
        pictures=pictures,
        smoothing=window,
        metrics=list(_metric_rows(run, figures["window"])),
        settings="\n".join(
            f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in run.config.items()
        ),
        events=[_event_cells(event) for event in run.events],
    )


def _facts(run: RunRecord, figures: Headline) -> list[tuple[str, str]]:
    """The headline's other numbers, with their names."""
    return [
        (f"{figures['steps']:,}", "steps"),
        (f"{len(run.updates):,}", "updates"),
        (_short(figures["tokens"]), "tokens"),
        (str(timedelta(seconds=round(figures["time_s"]))), "training time"),
    ]


def _metric_rows(run: RunRecord, window: int) -> Iterator[MetricRow]:
    for name in sorted({name for row in run.steps for name in row} - {"step"}):
        values = [row[name] for row in run.steps if row.get(name) is not None]
        yield MetricRow(
            name,
            _number(mean(values[:window])),
            _number(mean(values[-window:])),
            _number(run.steps[-1].get(name)),
        )


def _event_cells(event: dict[str, Any]) -> tuple[str, str, str]:
    others = {key: value for key, value in event.items() if key not in ("time", "kind")}
    details = ", ".join(f"{key} {value}" for key, value in others.items())
    time = str(event.get("time", ""))[:19].replace("T", " ")  # Whole seconds, without the zone: it is UTC.
    return time, str(event.get("kind", "")), details


def _number(value: float | None) -> str:
    """At least three digits that matter."""
    if value is None:
        return _NO_VALUE
    if abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"


def _short(count: float) -> str:
    """E.g. 12.3M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def _svg_uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
