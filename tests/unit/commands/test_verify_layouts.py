"""``bapo verify-parallel``: reference files round trip exactly, the comparison names what differs first."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.commands import layout_reference as module
from bapo_megatron.commands.layout_reference import (
    LayoutReference,
    QuantityRow,
    Tolerances,
    compare_layouts,
    first_differing_row,
    first_not_finite,
    identity_differences,
    not_measured,
    read_layout_reference,
    write_layout_reference,
)
from bapo_megatron.commands.verify import measure_totals
from bapo_megatron.config import AlgorithmConfig, DataConfig, ModelConfig, PartConfig, RunConfig
from bapo_megatron.data.samples import Sample
from bapo_megatron.errors import ConfigError
from bapo_megatron.types import RESPONSE_COLUMNS
from tests.support.layout_references import BOUNDS, handmade
from tests.support.small_steps import ShiftedPolicy

POLICY = Path(__file__).parents[3] / "recipes/demo/policy"


ARRAYS = ["about", "lengths", "responses", "advantages", "token_ids", "rollout_log_probs", "versions"]
OUTPUTS = ["log_probs", "entropies", "sums", "totals"]


def optional_columns(sample: Sample) -> dict[str, np.ndarray]:
    table = {name: column for name, column in RESPONSE_COLUMNS.items() if column.fill is not None}
    return {name: np.arange(sample.response_tokens).astype(one.dtype or "u1") for name, one in table.items()}


@pytest.mark.parametrize("optional", [[], ["loss_masks", "routes", "teacher_log_probs"]])
def test_round_trip(tmp_path: Path, optional: list[str]) -> None:
    """All columns of the responses; the arrays of a file without optional ones are as they always were."""
    written = handmade()
    if optional:
        samples = [dataclasses.replace(one, **optional_columns(one)) for one in written.samples]
        written = dataclasses.replace(written, samples=samples)
    write_layout_reference(tmp_path / "c.npz", written)
    with np.load(tmp_path / "c.npz") as stored:
        assert stored.files == [*ARRAYS, *optional, *OUTPUTS]
    read = read_layout_reference(tmp_path / "c.npz")
    assert (read.identity, read.made) == (written.identity, written.made)
    for one, two in zip(read.samples, written.samples, strict=True):
        for item in dataclasses.fields(one):
            ours, theirs = getattr(one, item.name), getattr(two, item.name)
            np.testing.assert_array_equal(ours, theirs)
            assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)
    for name in ("log_probs", "entropies"):
        for ours, theirs in zip(getattr(read.tokens, name), getattr(written.tokens, name), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(read.totals.sums, written.totals.sums)
    assert dataclasses.replace(read.totals, sums=None) == dataclasses.replace(written.totals, sums=None)
    assert [path.name for path in tmp_path.iterdir()] == ["c.npz"]


def test_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated, with a changed byte, of unequal columns, of another format, and no file at all."""
    path = tmp_path / "c.npz"

    def refused(says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            read_layout_reference(path)

    refused("does not exist; make one with --save")
    write_layout_reference(path, handmade())
    whole = path.read_bytes()
    place = whole.index(np.float32(-7).tobytes())  # the last log-prob
    changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for content in (b"notes", changed, whole[: len(whole) // 2], b""):
        path.write_bytes(content)
        refused(r"c\.npz is damaged or is none")
    tokens = dataclasses.replace(handmade().tokens, log_probs=handmade().tokens.log_probs[:1])
    write_layout_reference(path, dataclasses.replace(handmade(), tokens=tokens))
    refused("2 numbers where 5 belong")
    with monkeypatch.context() as patch:
        patch.setattr(module, "FORMAT", 2)
        write_layout_reference(path, handmade())
    refused("has format 2, this version of the program reads 1")


def test_the_loss_of_a_layout_has_the_terms_of_the_run() -> None:
    """An entropy of 1 for each token, by half of it."""
    run = RunConfig("t", ModelConfig(POLICY), DataConfig(Path("none")))
    found = []
    for terms in ((), (PartConfig("entropy_bonus", {"coefficient": 0.5}),)):
        config = dataclasses.replace(run, algorithm=AlgorithmConfig(terms=terms))
        policy: Any = ShiftedPolicy()
        found.append(measure_totals(policy, config, handmade().samples).loss)
    assert found[1] == pytest.approx(found[0] - 0.5)


QUANTITIES = ["log-probs", "entropies", "contribution sums", "bounds (low, high)", "loss", "gradient norm"]


def rows_of(
    ours: LayoutReference, reference: LayoutReference | None = None, **tolerances: float
) -> list[QuantityRow]:
    wanted = Tolerances(**tolerances)
    return compare_layouts(reference or handmade(), ours.tokens, ours.totals, BOUNDS, wanted)


def with_totals(**changes: object) -> LayoutReference:
    ours = handmade()
    return dataclasses.replace(ours, totals=dataclasses.replace(ours.totals, **changes))


def with_token(name: str, sample: int, position: int, value: float) -> LayoutReference:
    ours = handmade()
    getattr(ours.tokens, name)[sample][position] = value
    return ours


def test_equal_certificates_agree_also_with_one_of_an_earlier_version() -> None:
    """It has sums of other readings behind those of the search, and a setting that is gone."""
    one = handmade()
    older = dataclasses.replace(
        one,
        identity={**one.identity, "algorithm.bounds.negative_weight": "present"},
        totals=dataclasses.replace(one.totals, sums=np.concatenate([one.totals.sums, np.ones(12)])),
    )
    assert identity_differences(older, one.identity) == []
    for rows in (rows_of(one), rows_of(one, older)):
        assert [row.quantity for row in rows] == QUANTITIES
        assert {(row.verdict, row.worst_absolute) for row in rows} == {("ok", 0.0)}
        assert first_differing_row(rows) is None


def test_the_first_token_is_named() -> None:
    ours = with_token("log_probs", 1, 1, -5.001)
    ours.tokens.log_probs[1][2] = -7.5
    ours.tokens.entropies[0][0] = 9.0
    rows = rows_of(ours)
    assert [row.verdict for row in rows[:3]] == ["DIFFERS", "DIFFERS", "ok"]
    first = first_differing_row(rows)
    assert first.quantity == "log-probs"
    # Position 1 of the second sample predicts its token 2, the first of its response.
    assert "at sample 1, token 2 of 4 (0 of the response, id 10): -5 in the reference" in first.detail
    assert "2 of 5 tokens differ" in first.detail
    assert "most by 5.00e-01 at sample 1, token 3 of 4 (1 of the response, id 11)" in first.detail
    assert first.worst_absolute == pytest.approx(0.5)
    assert first.worst_relative == pytest.approx(0.5 / 7)


@pytest.mark.parametrize(
    ("tolerances", "is_within"),
    [
        # One of five tokens is 0.25 from -4: 0.05 on average.
        ({"token_relative": 0.05, "token_absolute": 0.04}, False),
        ({"token_relative": 0.05, "token_absolute": 0.06}, True),
        ({"token_absolute": 0.3, "token_mean": 0.04}, False),
        ({"token_absolute": 0.3, "token_mean": 0.06}, True),
    ],
)
def test_the_tolerance_is_absolute_plus_relative(tolerances: dict[str, float], is_within: bool) -> None:
    first = first_differing_row(rows_of(with_token("log_probs", 0, 1, -4.25), **tolerances))
    assert (first is None) is is_within
    if first and "token_mean" in tolerances:
        assert "on average they are 5.00e-02 apart, more than 0.04" in first.detail
        assert "most at sample 0, token 2 of 3 (0 of the response, id 7): -4" in first.detail


def test_a_sum_or_a_total_is_named() -> None:
    """Each kind of total has a tolerance of its own."""
    totals = handmade().totals
    sums = totals.sums.copy()
    sums[2:4] *= 1.001
    first = first_differing_row(rows_of(with_totals(sums=sums)))
    assert first.quantity == "contribution sums"
    assert first.detail == ("N(c_low=0.8), the first of 2 that differ: 3 in the reference, 3.003 here")
    for name, quantity, relative in (("loss", "loss", 1e-5), ("grad_norm", "gradient norm", 5e-4)):
        value = getattr(totals, name)
        assert first_differing_row(rows_of(with_totals(**{name: value * (1 + relative / 2)}))) is None
        first = first_differing_row(rows_of(with_totals(**{name: value * (1 + relative * 5)})))
        assert first.quantity == quantity
        assert f"{value:g} in the reference" in first.detail
    ours = with_totals(loss=totals.loss * 1.01, grad_norm=totals.grad_norm * 1.01)
    assert [row.verdict for row in rows_of(ours, norm_relative=0.02)][4:] == ["DIFFERS", "ok"]
    assert [row.verdict for row in rows_of(ours, total_relative=0.02)][4:] == ["ok", "DIFFERS"]


def test_non_finite_values_differ() -> None:
    ours = with_token("log_probs", 0, 1, -math.inf)
    assert first_not_finite(ours.tokens, ours.samples) == ("sample 0, token 2 of 3 (0 of the response, id 7)")
    totals = not_measured(ours.totals)
    rows = rows_of(dataclasses.replace(ours, totals=totals), token_absolute=1e9, token_mean=1e9)
    assert [row.verdict for row in rows] == ["DIFFERS", "ok", *["DIFFERS"] * 4]
    assert "sample 0, token 2" in rows[0].detail
    assert first_not_finite(handmade().tokens, handmade().samples) is None


def test_bounds_differ() -> None:
    """Bounds that do not follow from their sums, and bounds that follow from other sums."""
    first = first_differing_row(rows_of(with_totals(high=1.2)))
    assert first.quantity == "bounds (low, high)"
    assert first.detail == "(0.8, 1.4) in the reference, (0.8, 1.2) here"
    sums = handmade(3.5).totals.sums
    rows = rows_of(with_totals(sums=sums, high=1.2))
    assert [row.quantity for row in rows if row.verdict == "DIFFERS"] == QUANTITIES[2:4]


def test_a_tie_is_no_difference() -> None:
    """P(1.2) = N(0.8) = 3 but for rounding: one search stops there, the other continues."""
    below, above = handmade(3.0 - 1e-6), handmade(3.0 + 1e-6)
    above = dataclasses.replace(above, totals=dataclasses.replace(above.totals, high=1.2))
    for ours, reference in ((above, below), (below, above)):
        rows = rows_of(ours, reference)
        assert rows[3].verdict == "tie"
        assert rows[3].detail.endswith(" here, by contribution sums that agree")
        assert first_differing_row(rows) is None
    strict = rows_of(above, below, total_relative=1e-8, total_absolute=1e-8)
    assert [row.quantity for row in strict if row.verdict == "DIFFERS"] == QUANTITIES[2:4]
    # Neither layout's bounds may be others than its search found.
    assert rows_of(handmade(), with_totals(high=1.2))[3].verdict == "DIFFERS"
