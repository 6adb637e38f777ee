"""Layout reference of ``bapo verify-parallel``: a stored batch with one layout's outputs, and comparisons.

``write_layout_reference`` and ``read_layout_reference`` store a ``LayoutReference`` as an npz archive
(``--save``, ``--certificate``); ``compare_layouts`` compares another layout's outputs on the same batch. The
archive holds the inputs themselves (token ids, rollout log-probs, advantages), not just a seed, so that a
comparison does not depend on how a later version draws them. A comparison has one row per quantity in order
of computation: the first that differs is closest to the cause.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bapo_megatron.algo.bounds import BoundsConfig, high_values, low_values, search_bounds, sum_count
from bapo_megatron.config.removed import without_removed
from bapo_megatron.data.samples import Sample
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.text_table import text_table
from bapo_megatron.types import RESPONSE_COLUMNS, ResponseTokens

FORMAT = 1
"""File format version; files of another version are rejected."""

_ARRAYS = {name: column.array for name, column in RESPONSE_COLUMNS.items() if name != "token_ids_R"}
"""Array of each response column, by field; token ids are stored with the prompts'."""
_ARRAYS["log_probs_R"] = "rollout_log_probs"  # log_probs are the layout's

_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class TokenOutputs:
    """Per-token outputs of one layout: log-probs and entropies, one array [positions] per sample."""

    log_probs: list[np.ndarray]
    """Natural logs, float32."""
    entropies: list[np.ndarray]
    """Nats, float32."""


@dataclass(frozen=True)
class Totals:
    """Totals of one layout, with the batch as one update: contribution sums, bounds, loss, gradient norm."""

    sums: np.ndarray
    """Contribution sums at every candidate (``contribution_sums``), float64."""
    low: float
    """Bound c_low, found by the search from ``sums``."""
    high: float
    """Bound c_high."""
    loss: float
    """Mean over trained tokens, at the reference's bounds."""
    grad_norm: float
    """Norm of the loss's gradient before clipping."""


@dataclass(frozen=True)
class LayoutReference:
    """Content of a layout reference: the batch's samples, one layout's per-token outputs and totals on it,
    the identity that comparable layouts share (model, batch, objective), and how it was made."""

    identity: dict[str, Any]
    """Fields that must be equal in comparable references, as flat JSON values."""
    made: dict[str, Any]
    """Layout and versions; printed, not compared."""
    samples: list[Sample]
    tokens: TokenOutputs
    totals: Totals


def write_layout_reference(path: Path, reference: LayoutReference) -> None:
    """Write the layout reference atomically to ``path``, in an existing folder."""
    about = {"format": FORMAT, "identity": reference.identity, "made": reference.made}
    totals = reference.totals
    buffer = io.BytesIO()
    np.savez(
        buffer,
        about=np.array(json.dumps(about)),
        **_sample_columns(reference.samples),
        log_probs=np.concatenate(reference.tokens.log_probs),
        entropies=np.concatenate(reference.tokens.entropies),
        sums=totals.sums,
        totals=np.array([totals.low, totals.high, totals.loss, totals.grad_norm]),
    )
    write_atomically(path, buffer.getvalue())


def read_layout_reference(path: Path) -> LayoutReference:
    """Read a layout reference. Raises ConfigError if it is missing, damaged or of another format."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            columns = {name: stored[name] for name in stored.files}  # reading all arrays checks every CRC
        about = json.loads(str(columns["about"]))
        version = about["format"]
        if version == FORMAT:
            return _reference_from(about, columns)
    except FileNotFoundError:
        raise ConfigError(f"certificate {path} does not exist; make one with --save") from None
    except _UNREADABLE as error:
        raise ConfigError(f"certificate {path} is damaged or is none ({error}); make it again") from None
    raise ConfigError(f"certificate {path} has format {version}, this version of the program reads {FORMAT}")


def identity_differences(reference: LayoutReference, identity: dict[str, Any]) -> list[str]:
    """Return a line with both values for each field in which ``identity`` differs from the reference's."""
    stored = without_removed(reference.identity)
    return [
        f"{name}: {stored.get(name)!r} in the certificate, {identity.get(name)!r} here"
        for name in sorted(stored.keys() | identity.keys())
        if stored.get(name) != identity.get(name)
    ]


def _sample_columns(samples: Sequence[Sample]) -> dict[str, Any]:
    responses = []
    for sample in samples:
        ids_R = sample.token_ids[len(sample.token_ids) - sample.response_tokens :]
        responses.append(ResponseTokens(ids_R, **{name: getattr(sample, name) for name in _ARRAYS}))
    columns = ResponseTokens.joined(responses).columns
    return {
        "lengths": np.array([len(sample.token_ids) for sample in samples], np.int64),
        "responses": np.array([sample.response_tokens for sample in samples], np.int64),
        "advantages": np.array([sample.advantage for sample in samples], np.float64),
        "token_ids": np.concatenate([sample.token_ids for sample in samples]),
        **{array: columns[name] for name, array in _ARRAYS.items() if columns[name] is not None},
    }


def _reference_from(about: dict[str, Any], columns: dict[str, np.ndarray]) -> LayoutReference:
    lengths, responses = columns["lengths"], columns["responses"]
    low, high, loss, grad_norm = columns["totals"].tolist()
    parts = {
        name: _split(columns[array], responses)
        for name, array in _ARRAYS.items()
        if RESPONSE_COLUMNS[name].fill is None or array in columns
    }
    parts["token_ids"] = _split(columns["token_ids"], lengths)
    parts["advantage"] = columns["advantages"].tolist()
    return LayoutReference(
        identity=dict(about["identity"]),
        made=dict(about["made"]),
        samples=[
            Sample(**dict(zip(parts, values, strict=True))) for values in zip(*parts.values(), strict=True)
        ],
        tokens=TokenOutputs(
            _split(columns["log_probs"], lengths - 1), _split(columns["entropies"], lengths - 1)
        ),
        totals=Totals(columns["sums"], low, high, loss, grad_norm),
    )


def _split(column: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    if len(column) != lengths.sum():
        raise ValueError(f"{len(column)} numbers where {lengths.sum()} belong")
    return np.split(column, np.cumsum(lengths)[:-1])


# --- the comparison --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerances:
    """Allowed differences between two layouts, ``absolute + relative * abs(reference)``: of tokens, totals,
    gradient norm.

    The defaults are for float32. A log-prob is a difference of numbers of the logits' size, so it is never
    more exact than they are. The absolute parts cover the largest float32 errors against float64 on a canary
    of random tokens: 3.3e-4 nats and 2.2e-4 of the norm, measured with transformers' Llama and SmolLM2-135M,
    whose first activations of a sequence are large.
    """

    token_relative: float = 1e-5
    token_absolute: float = 5e-4
    token_mean: float = math.inf
    total_relative: float = 1e-5
    norm_relative: float = 5e-4
    """The gradient norm accumulates errors of the backward pass."""
    total_absolute: float = 2e-6


# bfloat16 activations and logits have 8 significant bits, and layouts sum in different orders: docs/doctor.md
# has the differences of sound layouts. Only a float32 check is sharp.
TOLERANCES = {"float32": Tolerances(), "bfloat16": Tolerances(0.05, 0.5, 0.1, 0.25, 0.25, 5e-3)}


@dataclass(frozen=True)
class QuantityRow:
    """Row of a comparison: a quantity, both values, largest differences, tolerance, ok or tie or DIFFERS."""

    quantity: str
    reference: str
    ours: str
    worst_absolute: float
    worst_relative: float
    tolerance: str
    verdict: Literal["ok", "tie", "DIFFERS"]
    detail: str = ""
    """Where the quantity differs first, or why the difference is a tie."""


def compare_layouts(
    reference: LayoutReference,
    tokens: TokenOutputs,
    totals: Totals,
    config: BoundsConfig,
    tolerances: Tolerances,
) -> list[QuantityRow]:
    """Return the comparison: one row per quantity, in order of computation. ``config``: of both searches."""
    samples, said = reference.samples, reference.tokens
    # Files of earlier versions have other sums after the search's.
    ours, theirs = totals, replace(reference.totals, sums=reference.totals.sums[: sum_count(config)])
    relative, absolute = tolerances.total_relative, tolerances.total_absolute
    names = [f"P(c_high={high:g})" for high in high_values(config)]
    names += [f"N(c_low={low:g})" for low in low_values(config)]
    sums = _total_row("contribution sums", theirs.sums, ours.sums, relative, absolute, names)
    return [
        _token_row("log-probs", said.log_probs, tokens.log_probs, samples, tolerances),
        _token_row("entropies", said.entropies, tokens.entropies, samples, tolerances),
        sums,
        _bounds_row(theirs, ours, config, sums),
        _total_row("loss", theirs.loss, ours.loss, relative, absolute),
        _total_row("gradient norm", theirs.grad_norm, ours.grad_norm, tolerances.norm_relative, absolute),
    ]


def first_differing_row(rows: Sequence[QuantityRow]) -> QuantityRow | None:
    """Return the first row that differs, or None; later ones may follow from it."""
    return next((row for row in rows if row.verdict == "DIFFERS"), None)


def comparison_table(rows: Sequence[QuantityRow]) -> str:
    """Return the comparison as an aligned table."""
    heads = ("quantity", "reference", "this layout", "worst abs", "worst rel", "tolerance", "ok")
    cells = []
    for row in rows:
        distances = (f"{row.worst_absolute:.2e}", f"{row.worst_relative:.2e}")
        cells.append((row.quantity, row.reference, row.ours, *distances, row.tolerance, row.verdict))
    return "\n".join(text_table(cells, heads=heads))


def first_not_finite(tokens: TokenOutputs, samples: Sequence[Sample]) -> str | None:
    """Return the place of the first log-prob that is nan or inf; None if all are finite."""
    bad = np.flatnonzero(~np.isfinite(np.concatenate(tokens.log_probs)))
    return _place(int(bad[0]), samples) if len(bad) else None


def _token_row(
    name: str,
    reference: Sequence[np.ndarray],
    ours: Sequence[np.ndarray],
    samples: Sequence[Sample],
    tolerances: Tolerances,
) -> QuantityRow:
    there, here = (np.concatenate(values).astype(np.float64) for values in (reference, ours))
    apart = np.abs(here - there)
    allowed = tolerances.token_absolute + tolerances.token_relative * np.abs(there)
    bad = np.flatnonzero(~(apart <= allowed))  # nan is bad
    mean_is_bad = not apart.mean() <= tolerances.token_mean
    detail = ""
    if len(bad):
        worst = int(bad[np.nanargmax(apart[bad])]) if np.isfinite(apart[bad]).any() else int(bad[0])
        detail = (
            f"at {_place(int(bad[0]), samples)}: {there[bad[0]]:.7g} in the reference, "
            f"{here[bad[0]]:.7g} here; {len(bad)} of {len(there)} tokens differ, most by "
            f"{apart[worst]:.2e} at {_place(worst, samples)}"
        )
    elif mean_is_bad:
        worst = int(apart.argmax())
        detail = (
            f"each token is within its tolerance, but on average they are {apart.mean():.2e} apart, more "
            f"than {tolerances.token_mean:g}; most at {_place(worst, samples)}: {there[worst]:.7g} in the "
            f"reference, {here[worst]:.7g} here"
        )
    return QuantityRow(
        name,
        f"mean {there.mean():.6g}",
        f"mean {here.mean():.6g}",
        *_worst(there, apart),
        _stated(tolerances.token_relative, tolerances.token_absolute, tolerances.token_mean),
        "DIFFERS" if detail else "ok",
        detail,
    )


def _place(position: int, samples: Sequence[Sample]) -> str:
    ends = np.cumsum([sample.positions for sample in samples])
    number = int(np.searchsorted(ends, position, side="right"))
    sample = samples[number]
    token, length = position - int(ends[number]) + len(sample.token_ids), len(sample.token_ids)
    prompt = length - sample.response_tokens
    part = f"{token - prompt} of the response" if token >= prompt else "in the prompt"
    return f"sample {number}, token {token} of {length} ({part}, id {sample.token_ids[token]})"


def _total_row(
    name: str,
    reference: float | np.ndarray,
    ours: float | np.ndarray,
    relative: float,
    absolute: float,
    names: Sequence[str] = (),
) -> QuantityRow:
    there, here = (np.atleast_1d(np.asarray(value, np.float64)) for value in (reference, ours))
    apart = np.abs(here - there)
    bad = np.flatnonzero(~(apart <= absolute + relative * np.abs(there)))
    detail = ""
    if len(bad):
        which = f"{names[bad[0]]}, the first of {len(bad)} that differ: " if names else ""
        detail = f"{which}{there[bad[0]]:.9g} in the reference, {here[bad[0]]:.9g} here"
    mean = "mean " if names else ""
    return QuantityRow(
        name,
        f"{mean}{there.mean():.6g}",
        f"{mean}{here.mean():.6g}",
        *_worst(there, apart),
        _stated(relative, absolute),
        "DIFFERS" if detail else "ok",
        detail,
    )


def _bounds_row(theirs: Totals, ours: Totals, config: BoundsConfig, sums: QuantityRow) -> QuantityRow:
    """Return the row of the bounds. Unequal ones are a tie if each layout's follow from its own contribution
    sums, and these agree: the search stops where a contribution reaches the target, so rounding decides."""
    there, here = np.array([theirs.low, theirs.high]), np.array([ours.low, ours.high])
    verdict: Literal["ok", "tie", "DIFFERS"] = "ok"
    detail = ""
    if not np.array_equal(there, here):
        detail = f"({there[0]:g}, {there[1]:g}) in the reference, ({here[0]:g}, {here[1]:g}) here"
        is_tie = sums.verdict == "ok" and _follow(theirs, config) and _follow(ours, config)
        verdict = "tie" if is_tie else "DIFFERS"
        detail += ", by contribution sums that agree" if is_tie else ""
    return QuantityRow(
        "bounds (low, high)",
        f"{theirs.low:g}, {theirs.high:g}",
        f"{ours.low:g}, {ours.high:g}",
        *_worst(there, np.abs(here - there)),
        "equal, or a tie",
        verdict,
        detail,
    )


def _follow(totals: Totals, config: BoundsConfig) -> bool:
    """Whether a layout's bounds are those that its contribution sums give."""
    found = search_bounds(totals.sums.tolist(), config)
    return (found.low, found.high) == (totals.low, totals.high)


def _worst(reference: np.ndarray, apart: np.ndarray) -> tuple[float, float]:
    size = np.abs(reference)
    relative = np.divide(apart, size, out=np.where(apart == 0, 0.0, np.inf), where=size > 0)
    return float(apart.max()), float(relative.max())


def _stated(relative: float, absolute: float, mean: float = math.inf) -> str:
    text = f"{absolute:g}" + (f" + {relative:g} rel" if relative else "")
    return text if math.isinf(mean) else f"{text}, mean {mean:g}"


def not_measured(totals: Totals) -> Totals:
    """Return nan totals in the shape of ``totals``, for a layout whose log-probs are not finite."""
    sums = np.full_like(totals.sums, np.nan)
    return Totals(sums, low=math.nan, high=math.nan, loss=math.nan, grad_norm=math.nan)
