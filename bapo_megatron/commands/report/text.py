"""Formatting of report pages: jinja templates, numbers as text, table cells, plots as data URIs.

Values are escaped for HTML when a template is rendered; a value that it asks for and is not given is an
error.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined

from bapo_megatron.commands.report.data import MetricTable, RunRecord, mean
from bapo_megatron.commands.report.series import staleness_table

SOURCE_COLUMNS = (
    *("prompts", "trained on", "reward", "length", "entropy", "tokens", "gradient"),
    *("contribution", "without bounds", "clipped high", "clipped low"),
)
"""Columns of the table by source of training data."""

NO_VALUE = "–"  # noqa: RUF001, the dash is meant


def render(template: str, **values: Any) -> str:
    """The HTML that a jinja template of this package makes of ``values``."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(lambda name: files(__package__).joinpath(name).read_text(encoding="utf-8")),
    )
    return environment.get_template(template).render(**values)


def number(value: float | None) -> str:
    """A number as text, with at least three significant digits; integers in full."""
    if value is None:
        return NO_VALUE
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"


def short_count(count: float) -> str:
    """A count in short, e.g. 12.3M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def svg_uri(svg: bytes) -> str:
    """The data URI of an SVG."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def setting_lines(config: dict[str, Any]) -> list[str]:
    """The resolved configuration, one setting a line."""
    return [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in sorted(config.items())]


def event_cells(event: dict[str, Any]) -> tuple[str, str, str]:
    """The table cells of an event: time, kind and details."""
    others = {key: value for key, value in event.items() if key not in ("time", "kind")}
    details = ", ".join(f"{key} {value}" for key, value in others.items())
    time = str(event.get("time", ""))[:19].replace("T", " ")  # Whole seconds, without the zone: it is UTC.
    return time, str(event.get("kind", "")), details


def staleness_cells(run: RunRecord) -> list[tuple[str, list[str]]]:
    """Table rows, one for each staleness bucket with tokens; the first two values are percentages."""
    return [
        (bucket, [*(percent(value) for value in values[:2]), *(number(value) for value in values[2:])])
        for bucket, values in staleness_table(run)
    ]


def percent(share: float | None) -> str:
    """A share as text, e.g. 12.5%."""
    return NO_VALUE if share is None else f"{100 * share:.3g}%"


def ends(
    steps: MetricTable, name: str, window: int, form: Callable[[float | None], str] = number
) -> tuple[str, str]:
    """Means of a metric over the first and over the last ``window`` steps that have it, as text.

    Behind the second stands the last of these steps, where that is not the run's last.
    """
    values = steps.column(name)
    known = np.flatnonzero(~np.isnan(values))
    first, last = form(mean(values[known[:window]])), form(mean(values[known[-window:]]))
    if not len(known) or known[-1] == len(values) - 1:
        return first, last
    return first, f"{last} (to step {steps.column('step')[known[-1]]:.0f})"


def source_cells(run: RunRecord, window: int) -> list[tuple[str, list[str]]]:
    """Table rows, one for each source of training data: ``SOURCE_COLUMNS``; none for a run of one file."""
    return [(name, _source_cells(run, f"source/{name}/", window)) for name in source_names(run)]


def source_names(run: RunRecord) -> list[str]:
    """Names of the sources of training data; none for a run of one file."""
    first, last = "source/", "/rollout/groups"
    named = [name for name in run.steps.names if name.startswith(first) and name.endswith(last)]
    return [*dict.fromkeys(name.removeprefix(first).removesuffix(last) for name in named)]


def _source_cells(run: RunRecord, prefix: str, window: int) -> list[str]:
    def values(name: str) -> np.ndarray:
        return run.steps.known(prefix + name)

    first, last = ends(run.steps, f"sampled/{prefix}reward/mean", window)
    return [
        *(f"{sum(values(f'rollout/{name}')):,.0f}" for name in ("groups_sampled", "groups")),
        f"{first} → {last}",
        *(number(mean(values(name))) for name in ("rollout/length_mean", "policy/entropy")),
        *(percent(mean(values(name))) for name in ("token_share", "gradient_share")),
        *(percent(mean(values(f"bapo/contribution{end}"))) for end in ("", "_unclipped")),
        *(percent(mean(values(f"bapo/clip_fraction_{bound}"))) for bound in ("high", "low")),
    ]
