"""``bapo report`` on synthetic runs: sections, self-contained HTML, and numbers by hand."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from bapo_megatron.algo.bins import RATIO_BINS
from bapo_megatron.checkpoint.run_directory import FORMAT
from bapo_megatron.commands.report.data import MetricTable, moving_mean, read_run
from bapo_megatron.commands.report.page import headline, report_command, write_report
from bapo_megatron.commands.report.panels import DISTRIBUTIONS, PANELS, bands, episode_panels
from bapo_megatron.errors import ConfigError

ALLOWED = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The content security policy of every page: its own pictures and styles, no script."""

HOSTILE = (
    """</title></style><script>alert(1)</script><img src=http://x.example/ onerror='a()'>"'}{{7*7}}$\\x"""
)

BOUNDS = {
    "algorithm.bounds.low_start": 0.6,
    "algorithm.bounds.low_end": 0.9,
    "algorithm.bounds.high_start": 1.2,
    "algorithm.bounds.high_end": 3.0,
    "algorithm.bounds.target": 0.4,
}


def made_up_update(step: float, noise: random.Random) -> dict[str, float | None]:
    """Metrics of one synthetic update."""
    learnt = 1 / (1 + math.exp(-(step - 24) / 8))
    high = min(max(1.9 - 0.5 * learnt + noise.gauss(0, 0.25), 1.2), 3.0)
    return {
        "policy/entropy": 0.62 - 0.22 * learnt + noise.gauss(0, 0.012),
        "policy/grad_norm": 0.35 + 0.1 * math.exp(-step / 10) + abs(noise.gauss(0, 0.05)),
        "policy/kl": 0.0012 + 0.0008 * learnt + abs(noise.gauss(0, 0.0003)),
        "policy/loss": noise.gauss(0, 0.02),
        "policy/lr": 2e-6,
        "bapo/clip_high": round(high / 0.05) * 0.05,
        "bapo/clip_low": round(min(0.6 + 0.3 * max(noise.gauss(0.35 - 0.2 * learnt, 0.2), 0), 0.9) / 0.02)
        * 0.02,
        "bapo/contribution": 0.4 + abs(noise.gauss(0.004, 0.012)) + 0.05 * learnt,
        "bapo/clip_fraction_high": 0.004 + 0.003 * learnt + abs(noise.gauss(0, 0.001)),
        "bapo/clip_fraction_low": 0.009 - 0.002 * learnt + abs(noise.gauss(0, 0.001)),
        "bapo/positive_token_fraction": 0.3 + 0.3 * learnt + noise.gauss(0, 0.02),
        **made_up_diagnostics(learnt, noise),
    }


def made_up_diagnostics(learnt: float, noise: random.Random) -> dict[str, float | None]:
    """Kinds of tokens, ratios and staleness of an update."""
    found: dict[str, float | None] = {"policy/tokens": 1e5, "staleness/mean": 1.5, "staleness/max": 3.0}
    for kind in ("positive_high", "positive_low", "negative_high", "negative_low"):
        found[f"quadrant/{kind}/clipped"] = abs(noise.gauss(0.01, 0.01))
        found[f"quadrant/{kind}/contribution"] = 0.25 + noise.gauss(0, 0.02)
    found["polarity/expanding_effect"] = 0.02 + noise.gauss(0, 0.002)
    found["polarity/contracting_effect"] = -0.03 - 0.02 * learnt + noise.gauss(0, 0.002)
    found["entropy_rule/effect"] = -0.01 - 0.02 * learnt + noise.gauss(0, 0.002)
    found["entropy_rule/covariance"] = 0.01 + 0.02 * learnt + noise.gauss(0, 0.002)
    for number, name in enumerate(RATIO_BINS):
        found[f"ratio/{name}/tokens"] = 0.4 if number == 6 else 0.02
        found[f"ratio/{name}/probability"] = 0.9 if number == 6 else 0.3
        found[f"ratio/{name}/entropy"] = 0.5
    for bucket, share in (("0", 0.25), ("1", 0.25), ("2-3", 0.5)):
        found |= {f"staleness/{bucket}/tokens": share, f"staleness/{bucket}/clipped": 0.02 * share}
        found |= {f"staleness/{bucket}/entropy": 0.5, f"staleness/{bucket}/effect": noise.gauss(-0.01, 0.01)}
        found[f"staleness/{bucket}/covariance"] = noise.gauss(0.01, 0.01)
    return found


def made_up_step(step: int, noise: random.Random) -> dict[str, float | None]:
    """Metrics of one synthetic step that its updates do not have."""
    learnt = 1 / (1 + math.exp(-(step - 24) / 8))
    positive = 420 + 90 * learnt + noise.gauss(0, 12)
    negative = 610 + 30 * learnt + noise.gauss(0, 22)
    return {
        "reward/mean": 0.28 + 0.52 * learnt + noise.gauss(0, 0.03),
        "rollout/length_mean": positive * learnt + negative * (1 - learnt),
        "rollout/length_positive_mean": positive,
        "rollout/length_negative_mean": None if step % 17 == 0 else negative,
        "staleness/mean": 1.5,
        "time/step_s": 18 + noise.gauss(0, 1),
        "time/tokens_per_s": 9000 + noise.gauss(0, 300),
    }


def made_up_run(folder: Path, steps: int = 60, updates: int = 4) -> Path:
    """Write a run directory. Step 31 has no updates; the run was resumed at step 41."""
    noise = random.Random(0)
    step_rows: list[dict[str, Any]] = []
    update_rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        rows = [made_up_update(step, noise) for _ in range(0 if step == 31 else updates)]
        names = made_up_update(step, noise)
        means = {name: float(np.mean([row[name] for row in rows])) if rows else None for name in names}
        step_rows.append({"step": step, **made_up_step(step, noise), **means})
        update_rows += [{"step": step, "epoch": 0, "update": i, **row} for i, row in enumerate(rows)]
    write_lines(folder / "metrics.jsonl", step_rows)
    write_lines(folder / "updates.jsonl", update_rows)
    evaluated = [{"step": step, "eval/mean": 0.2 + step / 200} for step in range(0, steps + 1, 10)]
    write_lines(folder / "evaluations.jsonl", evaluated)
    write_lines(
        folder / "events.jsonl",
        [
            {"time": "2026-01-01T08:00:00.000+00:00", "kind": "start", "processes": 4},
            {"time": "2026-01-01T08:14:00.000+00:00", "kind": "resume", "step": 41},
        ],
    )
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
    for module in ("plots", "page"):
        monkeypatch.setattr(f"bapo_megatron.commands.report.{module}.DISTRIBUTIONS", DISTRIBUTIONS[:1])


def test_page_needs_nothing_but_itself(reported: Path) -> None:
    page = (reported / "report" / "index.html").read_text()
    sources = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", page)
    assert len(sources) == len(PANELS) + len(DISTRIBUTIONS)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "@import" not in page
    assert "url(" not in page
    assert "<script" not in page
    assert page.index(f'<meta http-equiv="Content-Security-Policy" content="{ALLOWED}">') < page.index(
        "<title>"
    )


class Tags(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(attrs)


def check_harmless(page: str) -> None:
    """Check that the strings of a hostile run are text on its page."""
    found = Tags(page)
    assert not found.tags & {"script", "iframe", "object", "embed", "form", "base", "link", "svg"}
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert all(value.startswith("data:") for name, value in found.attributes if name in ("src", "href"))
    assert "&lt;script&gt;alert(1)" in page
    assert "{{7*7}}" in page  # no template in a template


def make_hostile(folder: Path) -> Path:
    """A run with markup in each of its strings."""
    made_up_run(folder, steps=2, updates=1)
    write_config(folder, {"name": HOSTILE, "model.hf_path": HOSTILE, **BOUNDS, f"a.{HOSTILE}": [HOSTILE]})
    events = [{"time": HOSTILE, "kind": HOSTILE, HOSTILE: HOSTILE}, {"kind": "resume", "step": HOSTILE}]
    write_lines(folder / "events.jsonl", events)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_lines(folder / "metrics.jsonl", [{**row, f"reward/{HOSTILE}": 1.0} for row in rows])
    return folder


@pytest.mark.usefixtures("few_pictures")
def test_markup_in_a_run_is_text(tmp_path: Path) -> None:
    write_report([make_hostile(tmp_path)])
    check_harmless((tmp_path / "report/index.html").read_text())


def test_names_of_metrics_that_no_run_has_are_names(tmp_path: Path) -> None:
    made_up_run(tmp_path, steps=2, updates=1)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    odd = {f"environment/reward_turn_{turn}": 1.0 for turn in ("x", "-1", "9" * 5000, "2")}
    write_lines(tmp_path / "metrics.jsonl", [{**row, "environment/turns_mean": 1.0, **odd} for row in rows])
    panels = {panel.file: panel for panel in episode_panels([read_run(tmp_path)])}
    assert [curve.label for curve in panels["reward_by_turn"].curves] == ["2"]


def test_page_says_the_headline_and_the_configuration(reported: Path) -> None:
    page = (reported / "report" / "index.html").read_text()
    figures = headline(read_run(reported).steps)
    assert f"{figures['reward_first']:.3f} → {figures['reward_last']:.3f}" in page
    assert "<dt>updates</dt><dd>236</dd>" in page  # 59 steps of 4
    assert "algorithm.bounds.high_end = 3.0" in page
    assert "<td>resume</td><td>step 41</td>" in page


def test_sections_come_in_order_and_raw_rows_are_folded(reported: Path) -> None:
    page = (reported / "report" / "index.html").read_text()
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == ["Configuration", "Curves", "By staleness", "Events", "Values"]
    header = page[: page.index("<h2>Configuration")]
    for name in ("algorithm", "preset", "target", "staleness", "held-out", "baseline"):
        assert f'<th scope="row">{name}</th>' in header
    assert "does not show that this method is better" in header
    for folded in ("algorithm.bounds.high_end = 3.0", "<wbr>clip_fraction_low"):
        assert page.rindex("<details", 0, page.index(folded)) > page.rindex("<h2>", 0, page.index(folded))
    assert not re.search(r"<details[^>]*open[^>]*>\s*<summary>All", page)


@pytest.mark.parametrize("name", [*(panel.file for panel in (*PANELS, *DISTRIBUTIONS)), "overview"])
def test_pictures_show_something(reported: Path, name: str) -> None:
    pixels = imread(reported / "report" / f"{name}.png")
    assert min(pixels.shape[:2]) >= 600
    assert pixels[..., :3].std() > 0.03


@pytest.mark.usefixtures("few_pictures")
@pytest.mark.parametrize("kind", ["page", "link", "folder"])
@pytest.mark.parametrize("runs", [1, 2])
def test_a_file_that_is_no_report_is_not_overwritten(tmp_path: Path, kind: str, runs: int) -> None:
    made = [str(tmp_path / name) for name in "ab"[:runs]]
    for run in made:
        Path(run).mkdir()
        made_up_run(Path(run), 2, 1)
    site = tmp_path / "site"
    site.mkdir()
    if kind == "page":
        (site / "index.html").write_text("<title>My training report</title>")
    elif kind == "link":
        (site / "index.html").symlink_to(tmp_path / "absent")
    else:
        (site / "index.html").mkdir()
    with pytest.raises(ConfigError, match=r"index.html is not a page of bapo report.* --output DIR"):
        report_command([*made, "--output", str(site)])
    assert [path.name for path in site.iterdir()] == ["index.html"]
    assert kind != "page" or (site / "index.html").read_text() == "<title>My training report</title>"


@pytest.mark.usefixtures("few_pictures")
def test_same_run_gives_the_same_page(tmp_path: Path) -> None:
    made_up_run(tmp_path, steps=5)
    first = write_report([tmp_path]).read_bytes()
    assert write_report([tmp_path]).read_bytes() == first


@pytest.mark.usefixtures("few_pictures")
def test_names_are_text_not_markup(tmp_path: Path) -> None:
    made_up_run(tmp_path, steps=1)
    write_config(tmp_path, {"name": "<b>bold & more"})
    assert "<h1>&lt;b&gt;bold &amp; more</h1>" in write_report([tmp_path]).read_text()


def test_one_step_alone(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": 0.25}])
    page = write_report([tmp_path]).read_text()
    assert "0.250 → 0.250" in page
    assert f"<h1>{tmp_path.name}</h1>" in page


def test_metrics_may_be_null_throughout(tmp_path: Path) -> None:
    nothing = dict.fromkeys(made_up_update(1, random.Random(0)))
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": None, **nothing}] * 3)
    assert "– → –" in write_report([tmp_path]).read_text()  # noqa: RUF001


def test_missing_and_empty_metrics_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        write_report([tmp_path])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="no steps yet"):
        write_report([tmp_path])


def test_headline_by_hand() -> None:
    rows = [
        {"step": i, "reward/mean": i / 20, "time/step_s": 2.0, "time/tokens_per_s": 100.0}
        for i in range(1, 21)
    ]
    figures = headline(MetricTable(rows))
    assert figures["window"] == 2
    assert figures["reward_first"] == pytest.approx((1 + 2) / 2 / 20)
    assert figures["reward_last"] == pytest.approx((19 + 20) / 2 / 20)
    assert (figures["steps"], figures["time_s"], figures["tokens"]) == (20, 40.0, 4000.0)


@pytest.mark.parametrize(("steps", "window"), [(1, 1), (9, 1), (29, 2), (50, 5), (1000, 5)])
def test_headline_window(steps: int, window: int) -> None:
    assert headline(MetricTable([{"step": 1, "reward/mean": 0.5}] * steps))["window"] == window


def test_headline_skips_steps_without_a_reward() -> None:
    rows = [
        {"step": 1, "reward/mean": None},
        {"step": 2, "reward/mean": 0.5},
        {"step": 3, "time/step_s": None},
    ]
    figures = headline(MetricTable(rows))
    assert (figures["reward_first"], figures["reward_last"]) == (0.5, 0.5)
    assert headline(MetricTable([]))["reward_first"] is None


def test_the_reward_of_a_run_is_of_all_that_was_sampled_before_and_after_it_had_the_name() -> None:
    """A run of an earlier version that continues: its first rows have it as ``reward/mean``."""
    then = [{"step": step, "reward/mean": 0.25} for step in (1, 2)]
    now = [{"step": step, "reward/mean": 0.5, "sampled/reward/mean": 0.75} for step in (3, 4)]
    table = MetricTable([*then, *now])
    assert table.column("sampled/reward/mean").tolist() == [0.25, 0.25, 0.75, 0.75]
    assert (headline(table)["reward_first"], headline(table)["reward_last"]) == (0.25, 0.75)


def test_moving_mean_by_hand() -> None:
    values = np.array([1.0, 2.0, np.nan, 4.0, 9.0])
    assert moving_mean(values, 3) == pytest.approx([1.5, 1.5, 3.0, 6.5, 6.5])
    assert moving_mean(values, 1) == pytest.approx(values, nan_ok=True)


def test_updates_lie_between_their_steps(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1}, {"step": 2}])
    write_lines(
        tmp_path / "updates.jsonl", [{"step": 1, "x": 5}, {"step": 2, "x": 6}, {"step": 2, "x": None}]
    )
    series = read_run(tmp_path).by_update("x")
    assert series.step == pytest.approx([1.0, 1.5, 2.0])
    assert series.value == pytest.approx([5, 6, np.nan], nan_ok=True)


def test_ranges_and_target_come_from_the_configuration(tmp_path: Path) -> None:
    run = read_run(made_up_run(tmp_path, steps=1))
    by_file = {panel.file: bands(panel, run) for panel in PANELS}
    assert [(band.low, band.high) for band in by_file["clip_bounds"]] == [(1.2, 3.0), (0.6, 0.9)]
    assert [(band.low, band.high) for band in by_file["contribution"]] == [(0.4, 0.4)]
    assert by_file["reward"] == []


def test_fixed_bounds_have_no_range_and_no_target(tmp_path: Path) -> None:
    made_up_run(tmp_path, steps=1)
    write_config(tmp_path, BOUNDS | {"algorithm.bounds.low_end": 0.6, "algorithm.bounds.high_end": 1.2})
    run = read_run(tmp_path)
    assert [band for panel in PANELS for band in bands(panel, run)] == []


def test_evaluations_are_at_their_own_steps(tmp_path: Path) -> None:
    """The weights of the beginning are step 0; a run that was never evaluated has no values anywhere."""
    (tmp_path / "run").mkdir()
    made_up_run(tmp_path / "run", steps=20)
    run = read_run(tmp_path / "run")
    series = run.by_step("eval/mean")
    assert series.step.tolist() == [0, 10, 20]
    assert series.value.tolist() == pytest.approx([0.2, 0.25, 0.3])
    assert run.first_step == 0
    (tmp_path / "run/evaluations.jsonl").unlink()
    never = read_run(tmp_path / "run")
    assert np.isnan(never.by_step("eval/mean").value).all()
    assert never.first_step == 1
