"""Layout reference (``--save``, ``--certificate``): a batch, and the outputs of one parallel layout on it.

The file is an npz archive. It holds the inputs themselves (token ids, rollout log-probs, advantages), not
only their seed, so a comparison never depends on how a later version draws them. Used by ``check.py``,
``comparison.py``.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.data.samples import Sample
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically

FORMAT = 1
"""Version of the file format; a file of another version is refused."""

_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class TokenOutputs:
    """Per-token outputs of one layout: log-probs and entropies, an array for each sample, [positions]."""

    log_probs: list[np.ndarray]
    """Natural logs, float32."""
    entropies: list[np.ndarray]
    """Nats, float32."""


@dataclass(frozen=True)
class Totals:
    """Totals of one layout over the batch, taken as one update: sums, bounds, loss, gradient norm."""

    sums: np.ndarray
    """float64: the contribution sums at every candidate, under every measure (``measured_sums``)."""
    low: float
    """The bound c_low that the search found from ``sums``."""
    high: float
    """The bound c_high."""
    loss: float
    """Mean over the response tokens, at the bounds of the reference."""
    grad_norm: float
    """Norm of that loss's gradient, before clipping."""


@dataclass(frozen=True)
class LayoutReference:
    """Content of a layout reference: a batch, and the outputs and totals that one layout computes on it."""

    identity: dict[str, Any]
    """Fields that two references must share to be comparable, as flat JSON values."""
    made: dict[str, Any]
    """Layout and versions; printed, not compared."""
    samples: list[Sample]
    tokens: TokenOutputs
    totals: Totals


def write_layout_reference(path: Path, reference: LayoutReference) -> None:
    """Write the layout reference to ``path``, atomically. Its folder must exist."""
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
    """The layout reference in ``path``. ConfigError if it is absent, damaged or of another format."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            columns = {name: stored[name] for name in stored.files}  # reading all checks every CRC
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
    """Fields in which ``identity`` differs from the reference's, a line with both values for each."""
    stored = reference.identity
    return [
        f"{name}: {stored.get(name)!r} in the certificate, {identity.get(name)!r} here"
        for name in sorted(stored.keys() | identity.keys())
        if stored.get(name) != identity.get(name)
    ]


def _sample_columns(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "lengths": np.array([len(sample.token_ids) for sample in samples], np.int64),
        "responses": np.array([sample.response_tokens for sample in samples], np.int64),
        "advantages": np.array([sample.advantage for sample in samples], np.float64),
        "token_ids": np.concatenate([sample.token_ids for sample in samples]),
        "rollout_log_probs": np.concatenate([sample.log_probs_R for sample in samples]),
        "versions": np.concatenate([sample.versions_R for sample in samples]),
    }


def _reference_from(about: dict[str, Any], columns: dict[str, np.ndarray]) -> LayoutReference:
    lengths, responses = columns["lengths"], columns["responses"]
    low, high, loss, grad_norm = columns["totals"].tolist()
    parts = (
        _split(columns["token_ids"], lengths),
        _split(columns["rollout_log_probs"], responses),
        _split(columns["versions"], responses),
        columns["advantages"].tolist(),
    )
    return LayoutReference(
        identity=dict(about["identity"]),
        made=dict(about["made"]),
        samples=[Sample(*fields) for fields in zip(*parts, strict=True)],
        tokens=TokenOutputs(
            _split(columns["log_probs"], lengths - 1), _split(columns["entropies"], lengths - 1)
        ),
        totals=Totals(columns["sums"], low, high, loss, grad_norm),
    )


def _split(column: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """A concatenated column, split into one array for each sample."""
    if len(column) != lengths.sum():
        raise ValueError(f"{len(column)} numbers where {lengths.sum()} belong")
    return np.split(column, np.cumsum(lengths)[:-1])
