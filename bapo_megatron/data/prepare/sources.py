"""Dataset sources: a JSONL, JSON or parquet file, a dataset of the hub, CHAMP, or generated problems.

``open_source(text)`` returns a ``Source``: its name, its unconverted rows and their digest. CHAMP's 270
contest problems come from the package champ-dataset; only those with a numeric answer are read, since other
answers are words or plain-text formulas.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bapo_megatron.data.prepare.reasoning_gym import PREFIX, generated_rows
from bapo_megatron.data.rows import (
    FORMATS,
    PARQUET_ROWS,
    Row,
    digest_of_rows,
    ending_of,
    iterate_rows,
    rows_of,
)
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import sha256_of

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")

CHAMP = "champ"

_CHAMP_PACKAGE, _CHAMP_FILE = "champ_dataset", "dataset_files/v0.json"
_ALTERNATIVE = re.compile(r",? or (?:equivalently|approximately) |(?<!\s)\s*\(i\.e\.")
_NUMBER = re.compile(r"-?\d+(?:\.\d+|/\d+)?")


@dataclass(frozen=True)
class Source:
    """Dataset source: ``rows`` yields its rows, unconverted, and ``digest`` returns their SHA-256 or the
    file's. Both raise ConfigError for an unreadable file."""

    name: str
    rows: Callable[[], Iterable[Row]]
    digest: Callable[[], str]


def _file(name: str, path: Path, read: Callable[[Path], Iterable[Row]]) -> Source:
    return Source(name, partial(read, path), partial(sha256_of, path))


def hub_source(name: str, dataset: Any) -> Source:
    """Return the source of a dataset that was loaded from the hub."""

    def rows() -> Iterator[Row]:
        for table in dataset.with_format("arrow").iter(PARQUET_ROWS):
            yield from rows_of(table)

    return Source(name, rows, lambda: digest_of_rows(rows()))


def champ_file() -> Path:
    """Return the file of CHAMP's problems. Raises ConfigError if the package is not installed."""
    spec = importlib.util.find_spec(_CHAMP_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"source {CHAMP}: run pip install --no-deps champ-dataset==1.0.0, which holds it")
    return Path(spec.origin).parent / _CHAMP_FILE


def _champ_rows(path: Path) -> Iterator[Row]:
    for problem in json.loads(path.read_text(encoding="utf-8"))["problems"].values():
        if answer := _champ_number(problem["_raw_answer"]):
            yield {
                "problem": problem["_text"],
                "answer": answer,
                "identifier": problem["identifier"],
                "category": problem["category"],
                "data_source": CHAMP,
            }


def _champ_number(answer: str | None) -> str | None:
    """Return the first numeric form of an answer, or None."""
    forms = _ALTERNATIVE.split((answer or "").replace("@@", ""))
    return next((form.strip() for form in forms if _NUMBER.fullmatch(form.strip())), None)


def open_source(
    text: str,
    split: str,
    revision: str | None,
    size: int | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Source:
    """Open a source: the file at the path ``text``, ``OWNER/NAME`` or ``OWNER/NAME:CONFIG`` on the hub,
    ``champ``, or ``size`` problems of ``reasoning-gym:TASK,TASK`` with ``seed`` and ``settings``.

    Raises ConfigError if it is none of these or cannot be loaded.
    """
    if text.startswith(PREFIX):
        generated = generated_rows(text, size, seed, settings)
        name = f"{text}, {size} problems, seed {seed}"
        return Source(name, lambda: generated, partial(digest_of_rows, generated))
    path = Path(text)
    if text == CHAMP and not path.exists():
        return _file(CHAMP, champ_file(), _champ_rows)
    if path.is_file():
        ending_of(path)
        return _file(path.name, path, iterate_rows)
    hub_id = _HUB_ID.fullmatch(text)
    if path.exists() or path.suffix in FORMATS or hub_id is None:
        raise ConfigError(f"source {text}: no such file, and no OWNER/NAME of the hub; give one of them")
    return hub_source(f"{text}, split {split}", _from_hub(hub_id[1], hub_id[2], split, revision))


def _from_hub(name: str, config: str | None, split: str, revision: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # raises whatever the hub, network or builder raises
        raise ConfigError(
            f"source {name}: cannot be loaded from the hub ({error}); check --split and --revision, or "
            f"download its files where there is a network and give their paths"
        ) from error
