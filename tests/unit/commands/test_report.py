"""``bapo report`` on synthetic runs: sections, self-contained HTML, and numbers by hand."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from bapo_megatron.algo.bins import RATIO_BINS
from bapo_megatron.checkpoint.run_directory import FORMAT
from bapo_megatron.commands.report.data import MetricTable, moving_mean, read_run
from bapo_megatron.commands.report.page import headline, report_command, write_report
from bapo_megatron.commands.report.panels import DISTRIBUTIONS, PANELS, bands
from bapo_megatron.errors import ConfigError

ALLOWED = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The content security policy of every page: its own pictures and styles, no script."""

HOSTILE = (
    """</title></style><script>alert(1)</script><img src=http://x.example/ onerror='a()'>"'}{{7*7}}$\\x"""
)

RANGES = {"low_start": 0.6, "low_end": 0.9, "high_start": 1.2, "high_end": 3.0, "target": 0.4}
BOUNDS = {f"algorithm.bounds.{name}": value for name, value in RANGES.items()}


METRICS = {curve.metric for panel in PANELS for curve in panel.curves} - {"eval/mean", "sampled/reward/mean"}
SHARES = {"0": 0.25, "1": 0.25, "2-3": 0.5}
"""Of the tokens of each staleness."""


def made_up_update(step: float, noise: random.Random) -> dict[str, float | None]:
    """Metrics of one synthetic update: all that panels draw, climbing, and what tables are computed of."""
    row: dict[str, float | None] = {
        name: 0.3 + step / 200 + noise.gauss(0, 0.02)
        for name in sorted(METRICS)
        if not name.startswith("staleness/")
    }
    for number, name in enumerate(RATIO_BINS):
        row[f"ratio/{name}/tokens"] = 0.4 if number == 6 else 0.02
        row[f"ratio/{name}/probability"] = 0.9 if number == 6 else 0.3
        row[f"ratio/{name}/entropy"] = 0.5
    for bucket, share in SHARES.items():
        row |= {f"staleness/{bucket}/tokens": share, f"staleness/{bucket}/clipped": 0.02 * share}
        for name in ("entropy", "effect", "covariance"):
            row[f"staleness/{bucket}/{name}"] = noise.gauss(0.5, 0.01)
    covariance = noise.gauss(0, 0.01)
    ages = {"staleness/mean": 1.5, "staleness/max": 3.0}
    return {**row, **ages, "entropy_rule/covariance": covariance, "policy/tokens": 1e5, "policy/lr": 2e-6}


def made_up_step(step: int, noise: random.Random) -> dict[str, float | None]:
    """Metrics of one synthetic step that its updates do not have."""
    times = {"time/step_s": 18 + noise.gauss(0, 1), "time/tokens_per_s": 9000 + noise.gauss(0, 300)}
    times |= {"rollout/length_negative_mean": None if step % 17 == 0 else 610 + noise.gauss(0, 22)}
    return {"reward/mean": 0.28 + step / 200 + noise.gauss(0, 0.03), **times}


def made_up_run(folder: Path, steps: int = 60, updates: int = 4) -> Path:
    """Write a run directory. Step 31 has no updates; the run was resumed at step 41."""
    noise = random.Random(0)
    step_rows: list[dict[str, Any]] = []
    update_rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        rows = [made_up_update(step, noise) for _ in range(0 if step == 31 else updates)]
        names = made_up_update(step, noise)
        means = {name: float(np.mean([row[name] for row in rows])) if rows else None for name in names}
        step_rows.append({"step": step, **means, **made_up_step(step, noise)})
        update_rows += [{"step": step, "epoch": 0, "update": i, **row} for i, row in enumerate(rows)]
    write_lines(folder / "metrics.jsonl", step_rows)
    write_lines(folder / "updates.jsonl", update_rows)
    evaluated = [{"step": step, "eval/mean": 0.2 + step / 200} for step in range(0, steps + 1, 10)]
    write_lines(folder / "evaluations.jsonl", evaluated)
    start = {"time": "2026-01-01T08:00:00.000+00:00", "kind": "start", "processes": 4}
    resumed = {"time": "2026-01-01T08:14:00.000+00:00", "kind": "resume", "step": 41}
    write_lines(folder / "events.jsonl", [start, resumed])
    write_config(folder, {"name": "made-up", "model.hf_path": "models/tiny", **BOUNDS})
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({"format": FORMAT, "config": config}))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made_up_run(tmp_path_factory.mktemp("run"))
    write_report([folder])
    return folder


@pytest.fixture
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two curves and a distribution suffice where pictures are not the point: drawing takes time."""
    monkeypatch.setattr("bapo_megatron.commands.report.page.PANELS", PANELS[:2])
    monkeypatch.setattr("bapo_megatron.commands.report.page.DISTRIBUTIONS", DISTRIBUTIONS[:1])


def check_self_contained(page: str, pictures: int) -> None:
    sources = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", page)
    assert len(sources) == pictures
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert not [text for text in ("@import", "url(", "<script") if text in page]
    policy = f'<meta http-equiv="Content-Security-Policy" content="{ALLOWED}">'
    assert page.index(policy) < page.index("<title>")


def test_the_page(reported: Path) -> None:
    """It needs nothing but itself; sections come in order, and raw rows are folded."""
    page = (reported / "report" / "index.html").read_text()
    check_self_contained(page, len(PANELS) + len(DISTRIBUTIONS))
    figures = headline(read_run(reported).steps)
    assert f"{figures['reward_first']:.3f} → {figures['reward_last']:.3f}" in page
    assert "<dt>updates</dt><dd>236</dd>" in page  # 59 steps of 4
    assert "<td>resume</td><td>step 41</td>" in page
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == ["Configuration", "Curves", "By staleness", "Events", "Values"]
    header = page[: page.index("<h2>Configuration")]
    for name in ("algorithm", "preset", "target", "staleness", "held-out"):
        assert f'<th scope="row">{name}</th>' in header
    assert "does not show that this method is better" in header
    for folded in ("algorithm.bounds.high_end = 3.0", "<wbr>clip_fraction_low"):
        assert page.rindex("<details", 0, page.index(folded)) > page.rindex("<h2>", 0, page.index(folded))
    assert not re.search(r"<details[^>]*open[^>]*>\s*<summary>All", page)


def check_harmless(page: str) -> None:
    """Check that the strings of a hostile run are text on its page: no tag has one of them."""
    assert not re.search(r"<(script|iframe|object|embed|form|base|link|svg)\b", page)
    tags = re.findall(r"""<\w(?:[^<>"']|"[^"]*"|'[^']*')*>""", page)
    assert len(tags) > 50
    assert not [tag for tag in tags if re.search(r"""\s(on\w+|(src|href)=["'](?!data:))""", tag)]
    assert "&lt;script&gt;alert(1)" in page
    assert "{{7*7}}" in page  # no template in a template


def make_hostile(folder: Path) -> Path:
    """A run with markup in each of its strings."""
    made_up_run(folder, steps=2, updates=1)
    write_config(folder, {"name": HOSTILE, "model.hf_path": HOSTILE, **BOUNDS, f"a.{HOSTILE}": [HOSTILE]})
    events = [{"time": HOSTILE, "kind": HOSTILE, HOSTILE: HOSTILE}, {"kind": "resume", "step": HOSTILE}]
    events.append({"time": "now", "kind": "reward_failed", "detail": "half of a surrogate pair: \ud83d"})
    write_lines(folder / "events.jsonl", events)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_lines(folder / "metrics.jsonl", [{**row, f"reward/{HOSTILE}": 1.0} for row in rows])
    return folder


@pytest.mark.usefixtures("few_pictures")
def test_markup_in_a_run_is_text(tmp_path: Path) -> None:
    write_report([make_hostile(tmp_path)])
    check_harmless((tmp_path / "report/index.html").read_text())


def test_pictures_show_something(reported: Path) -> None:
    for name in [*(panel.file for panel in (*PANELS, *DISTRIBUTIONS)), "overview"]:
        pixels = imread(reported / "report" / f"{name}.png")
        assert min(pixels.shape[:2]) >= 600, name
        assert pixels[..., :3].std() > 0.03, name


@pytest.mark.usefixtures("few_pictures")
def test_a_file_that_is_no_report_is_not_overwritten(tmp_path: Path) -> None:
    made_up_run(tmp_path, 2, 1)
    page = tmp_path / "site/index.html"
    page.parent.mkdir()
    page.write_text("<title>My training report</title>")
    with pytest.raises(ConfigError, match=r"index.html is not a page of bapo report.* --output DIR"):
        report_command([str(tmp_path), "--output", str(page.parent)])
    assert [*page.parent.iterdir()] == [page]
    assert page.read_text() == "<title>My training report</title>"


@pytest.mark.usefixtures("few_pictures")
def test_one_step_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        write_report([tmp_path])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="no steps yet"):
        write_report([tmp_path])
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": 0.25}])
    page = write_report([tmp_path]).read_text()
    assert "0.250 → 0.250" in page
    assert f"<h1>{tmp_path.name}</h1>" in page
    nothing = dict.fromkeys(made_up_update(1, random.Random(0)))
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": None, **nothing}] * 3)
    assert "– → –" in write_report([tmp_path]).read_text()  # noqa: RUF001


def test_headline_by_hand() -> None:
    """Of all that was sampled, also where an earlier version named that ``reward/mean``."""
    times = {"time/step_s": 2.0, "time/tokens_per_s": 100.0}
    rows: list[dict[str, float | None]] = [{"step": i, "reward/mean": i / 20, **times} for i in range(1, 21)]
    figures = headline(MetricTable(rows))
    first, last = (1 + 2) / 2 / 20, (19 + 20) / 2 / 20
    assert [figures["reward_first"], figures["reward_last"]] == pytest.approx([first, last])
    assert (figures["steps"], figures["time_s"], figures["tokens"]) == (20, 40.0, 4000.0)
    for steps, window in ((1, 1), (9, 1), (29, 2), (50, 5), (1000, 5)):
        assert headline(MetricTable(rows[:1] * steps))["window"] == window
    now = {"reward/mean": 0.5, "sampled/reward/mean": 0.75}
    mixed = headline(MetricTable([{"reward/mean": None}, {"reward/mean": 0.25}, {"time/step_s": None}, now]))
    assert (mixed["reward_first"], mixed["reward_last"]) == (0.25, 0.75)
    assert headline(MetricTable([]))["reward_first"] is None
    unscored = MetricTable([now, {"reward/mean": 0.5, "sampled/reward/mean": None}])
    assert np.isnan(unscored.column("sampled/reward/mean")).tolist() == [False, True]


def test_moving_mean_by_hand() -> None:
    values = np.array([1.0, 2.0, np.nan, 4.0, 9.0])
    assert moving_mean(values, 3) == pytest.approx([1.5, 1.5, 3.0, 6.5, 6.5])
    assert moving_mean(values, 1) == pytest.approx(values, nan_ok=True)


def test_ranges_and_target_come_from_the_configuration(tmp_path: Path) -> None:
    run = read_run(made_up_run(tmp_path, steps=1))
    found = {panel.file: [(band.low, band.high) for band in bands(panel, run)] for panel in PANELS}
    drawn = {"clip_bounds": [(1.2, 3.0), (0.6, 0.9)], "contribution": [(0.4, 0.4)]}
    assert {file: ranges for file, ranges in found.items() if ranges} == drawn
    write_config(tmp_path, BOUNDS | {"algorithm.bounds.low_end": 0.6, "algorithm.bounds.high_end": 1.2})
    fixed = read_run(tmp_path)
    assert [band for panel in PANELS for band in bands(panel, fixed)] == []


def test_evaluations_are_at_their_own_steps(tmp_path: Path) -> None:
    """The weights of the beginning are step 0; a run that was never evaluated has no values anywhere."""
    run = read_run(made_up_run(tmp_path, steps=20))
    series = run.by_step("eval/mean")
    assert series.step.tolist() == [0, 10, 20]
    assert series.value.tolist() == pytest.approx([0.2, 0.25, 0.3])
    (tmp_path / "evaluations.jsonl").unlink()
    never = read_run(tmp_path)
    assert np.isnan(never.by_step("eval/mean").value).all()
    assert (run.first_step, never.first_step) == (0, 1)
