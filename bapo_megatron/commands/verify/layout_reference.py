"""The layout reference: a batch and one layout's answers to it, in one file that another layout checks.

The file is an npz archive. It holds the inputs (token ids, log-probs of the rollout, advantages) and not the
seed they came from alone, so a comparison never depends on how a later version draws them.
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

from bapo_megatron.data.packing import Sample
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically

FORMAT = 1
"""Version of the file. A program that meets another refuses."""

_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class TokenAnswers:
    """One layout's log-probs and entropies: one array a sample, one number for each predicting position."""

    log_probs: list[np.ndarray]
    """Natural logs, float32."""
    entropies: list[np.ndarray]
    """Nats, float32."""


@dataclass(frozen=True)
class Totals:
    """One layout's totals over the batch as one update."""

    sums: np.ndarray
    """float64: the contribution sums at every candidate, under every measure (``measured_sums``)."""
    low: float
    """The bound c_low that the search chose on them."""
    high: float
    """The bound c_high."""
    loss: float
    """Mean over the response tokens, at the bounds of the reference."""
    grad_norm: float
    """Norm of that loss's gradient, before clipping."""


@dataclass(frozen=True)
class LayoutReference:
    """A batch and one layout's answers to it."""

    identity: dict[str, Any]
    """Fields that two references must share to be comparable, as flat JSON values."""
    made: dict[str, Any]
    """Layout and versions; printed, not compared."""
    samples: list[Sample]
    tokens: TokenAnswers
    totals: Totals


def write_layout_reference(path: Path, certificate: LayoutReference) -> None:
    """Write the file, whole or not at all. Its folder must exist."""
    about = {"format": FORMAT, "identity": certificate.identity, "made": certificate.made}
    totals = certificate.totals
    buffer = io.BytesIO()
    np.savez(
        buffer,
        about=np.array(json.dumps(about)),
        **_sample_columns(certificate.samples),
        log_probs=np.concatenate(certificate.tokens.log_probs),
        entropies=np.concatenate(certificate.tokens.entropies),
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
            return _certificate(about, columns)
    except FileNotFoundError:
        raise ConfigError(f"certificate {path} does not exist; make one with --save") from None
    except _UNREADABLE as error:
        raise ConfigError(f"certificate {path} is damaged or is none ({error}); make it again") from None
    raise ConfigError(f"certificate {path} has format {version}, this version of the program reads {FORMAT}")


def identity_differences(certificate: LayoutReference, identity: dict[str, Any]) -> list[str]:
    """Every field in which ``identity`` is not the reference's, with both values."""
    stored = certificate.identity
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


def _certificate(about: dict[str, Any], columns: dict[str, np.ndarray]) -> LayoutReference:
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
        tokens=TokenAnswers(
            _split(columns["log_probs"], lengths - 1), _split(columns["entropies"], lengths - 1)
        ),
        totals=Totals(columns["sums"], low, high, loss, grad_norm),
    )


def _split(column: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """A concatenated column as one array a sample."""
    if len(column) != lengths.sum():
        raise ValueError(f"{len(column)} numbers where {lengths.sum()} belong")
    return np.split(column, np.cumsum(lengths)[:-1])
