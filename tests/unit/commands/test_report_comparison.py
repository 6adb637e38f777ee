"""``bapo report`` with several synthetic runs: one self-contained page and a table of differences."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bapo_megatron.cli import run as bapo
from bapo_megatron.commands.report import plots
from bapo_megatron.commands.report.data import MetricTable, RunRecord
from bapo_megatron.commands.report.page import (
    setting_differences,
    with_unique_names,
    write_report,
)
from bapo_megatron.commands.report.panels import DISTRIBUTIONS, PANELS
from bapo_megatron.commands.report.plots import draw_panel
from tests.unit.commands.test_report import (
    BOUNDS,
    check_self_contained,
    few_pictures,
    made_up_run,
    write_config,
    write_lines,
)

__all__ = ["few_pictures"]

ONE_STEP = MetricTable([{"step": 1}])
SHOWN = [panel.file for panel in (*PANELS, *DISTRIBUTIONS) if panel.compared != ()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two whole runs, and a third that has one step and measured nothing else, as of an earlier version. Two
    dollar signs are a formula to matplotlib: a wrong one was an error."""
    folder = tmp_path_factory.mktemp("runs")
    found = [folder / name for name in ("bapo", "grpo", "young")]
    for run in found:
        run.mkdir()
    made_up_run(found[0])
    made_up_run(found[1], steps=40)
    write_config(found[1], {"name": "<g$^$>", **BOUNDS, "algorithm.bounds.high_end": 1.2, "new.field": "a"})
    write_lines(found[2] / "metrics.jsonl", [{"step": 1, "reward/mean": 0.25}])
    return found


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs, tmp_path_factory.mktemp("out") / "deep" / "report")


def test_the_page(page: Path) -> None:
    """It needs nothing but itself; sections come in order."""
    text = page.read_text()
    check_self_contained(text, len(SHOWN))
    assert all(name in text for name in ("made-up", "&lt;g$^$&gt;", "young"))
    assert '<td>steps</td><td class="number">60</td><td class="number">40</td>' in text
    assert "algorithm.<wbr>bounds.<wbr>high_end" in text
    assert "algorithm.<wbr>bounds.<wbr>low_end" in text  # the third run says nothing of it
    assert "step 41" in text
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles == ["Configuration", "Final results", "Curves", "By staleness", "Events"]
    header = text[: text.index("<h2>Configuration")]
    for name in ("algorithm", "preset", "target", "staleness", "held-out", "reward"):
        assert f'<th scope="row">{name}</th>' in header
    assert header.count("BAPO: clipping bounds searched for each update") == 2
    assert "not recorded" in header  # of the young run
    assert "One run of each setting" in header
    assert text.count("Not measured.") == 1


def test_differences_by_hand() -> None:
    first = {"name": "a", "run_dir": "x", "logging.note": "n", "same": 1, "lr": 1e-6, "kind": "grpo"}
    second = {"name": "b", "run_dir": "y", "same": 1, "lr": 2e-6}
    assert setting_differences([first, second]) == [("kind", ['"grpo"', "–"]), ("lr", ["1e-06", "2e-06"])]  # noqa: RUF001
    assert setting_differences([first, first]) == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["run", "r1_distill_qwen_7b_64k_bapo_lr1e-6_reuse4_target0.45_" * 2])
def test_long_names_do_not_squeeze_a_plot(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The legend takes room below the axes, and none of it is cut off."""
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "write_png", lambda figure, _path, _dpi: drawn.append(figure))
    lengths = next(panel for panel in PANELS if panel.file == "response_length")
    steps, nothing = MetricTable([{"step": 1, "rollout/length_mean": 5.0}]), MetricTable([])
    runs = [RunRecord(tmp_path, steps, nothing, [], {"name": f"{name}{seed}"}) for seed in range(7)]
    draw_panel(lengths, runs, tmp_path)
    [figure] = drawn
    figure.draw_without_rendering()
    [axes] = figure.axes
    assert axes.get_position().width > 0.75
    assert axes.get_position().height * figure.get_size_inches()[1] > 1.2  # inches
    [legend] = [legend.get_window_extent() for legend in figure.legends]
    assert figure.bbox.x0 <= legend.x0 < legend.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= legend.y0


def test_a_legend_names_the_curves_of_one_run_and_the_runs_of_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run has the panel's colours, each of several its own, and the curves line styles."""
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "write_png", lambda figure, _path, _dpi: drawn.append(figure))
    clipped = next(panel for panel in PANELS if panel.file == "quadrant_clipped")
    steps = MetricTable([{"step": 1, **{curve.metric: 0.5 for curve in clipped.curves}}])
    runs = [RunRecord(tmp_path, steps, MetricTable([]), [], {"name": name}) for name in ("a", "b")]
    for shown in (runs[:1], runs):
        draw_panel(clipped, shown, tmp_path)
    (one, several), labels = drawn, [curve.label for curve in clipped.curves]
    assert [text.get_text() for text in one.legends[0].get_texts()] == labels
    thick = [line for line in one.axes[0].lines if line.get_linewidth() == 2]
    assert [line.get_color() for line in thick] == [curve.colour for curve in clipped.curves]
    assert [line.is_dashed() for line in thick] == [curve.dashed for curve in clipped.curves]
    assert [text.get_text() for text in several.legends[0].get_texts()] == ["a", "b"]
    thick = [line for line in several.axes[0].lines if line.get_linewidth() == 2]
    assert [line.get_color() for line in thick] == [*plots.COLOURS[:2]]
    draw_panel(replace(clipped, compared=(1, 2)), runs, tmp_path)
    assert [text.get_text() for text in drawn[2].legends[0].get_texts()] == ["a", "b", *labels[1:3]]
    thick = [line for line in drawn[2].axes[0].lines if line.get_linewidth() == 2]
    assert [line.is_dashed() for line in thick] == [False, True, False, True]


def test_ranges_are_of_one_run_and_resumes_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "write_png", lambda figure, _path, _dpi: drawn.append(figure))
    ratios = next(panel for panel in PANELS if panel.file == "clip_bounds")
    steps = MetricTable([{"step": step, "bapo/clip_high": 2.0} for step in (1, 2, 3)])
    resumed = [{"kind": "resume", "step": 2}]
    run = RunRecord(tmp_path, steps, MetricTable([]), resumed, {"name": "a", **BOUNDS})
    for shown in ([run], [run, run]):
        draw_panel(ratios, shown, tmp_path)
    told = [[text.get_text() for text in figure.axes[0].texts] for figure in drawn]
    assert told == [["allowed range", "allowed range"], []]
    marks = [[line for line in figure.axes[0].lines if [*line.get_xdata()] == [1.5, 1.5]] for figure in drawn]
    assert list(map(len, marks)) == [1, 2]
    assert all(mark.is_dashed() for line in marks for mark in line)


def test_runs_of_one_name_are_told_apart_by_their_folders() -> None:
    """Seeds of one recipe, a folder each: `bapo report seed1/demo seed2/demo`. All that was read stays."""
    held_out = MetricTable([{"step": 1, "eval/mean": 0.25}])
    places = (Path("x/one"), Path("two"))
    runs = [RunRecord(place, ONE_STEP, ONE_STEP, [], {"name": "d"}, held_out) for place in places]
    found = with_unique_names(runs)
    assert [run.name for run in found] == ["d (x/one)", "d (two)"]
    assert all(run.evaluations is held_out for run in found)
    assert with_unique_names(runs[:1])[0].name == "d"


@pytest.mark.usefixtures("few_pictures")
def test_the_command_chooses_the_page(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bapo(["report", str(runs[2]), "--output", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "one" / "index.html")
    assert bapo(["report", f"--output={tmp_path / 'two'}", str(runs[2])]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "two" / "index.html")
    assert bapo(["report", str(runs[2]), str(runs[1])]) == 0
    assert capsys.readouterr().out.strip() == str(runs[2] / "comparison" / "index.html")
    assert not (runs[0].parent / "comparison").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: bapo report RUN"),
        (["--output"], "usage: bapo report RUN"),
        (["{0}", "--output="], "usage: bapo report RUN"),
        (["{0}", "--wrong"], "usage: bapo report RUN"),
        (["{0}", "nowhere"], "is not a run directory"),
        ([f"run{number}" for number in range(8)], "8 runs are too many"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], message: str, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bapo(["report", *(argument.format(runs[0]) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
