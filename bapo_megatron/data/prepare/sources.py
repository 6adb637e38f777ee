"""Dataset sources: a JSONL, JSON or parquet file, a dataset of the hub, CHAMP, or generated problems.

``open_source(text)`` returns one. A source has ``name``, ``digest()``, and ``rows()``, which yields
unconverted rows and may be called repeatedly. CHAMP's 270 contest problems come from the package
champ-dataset; only those with a numeric answer are read, since other answers are words or plain-text
formulas.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bapo_megatron.data.prepare.reasoning_gym import PREFIX, GeneratedSource, tasks_of
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
class FileSource:
    """Dataset source in a JSONL, JSON or parquet file; each call of ``rows`` reads it anew."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def rows(self) -> Iterator[Row]:
        """Yield all rows in file order. Raises ConfigError with the row's number."""
        yield from iterate_rows(self.path)

    def digest(self) -> str:
        return sha256_of(self.path)


@dataclass(frozen=True)
class HubSource:
    """Dataset source on the Hugging Face hub: a dataset split, downloaded when ``open_source`` opens it."""

    name: str
    dataset: Any

    def rows(self) -> Iterator[Row]:
        for table in self.dataset.with_format("arrow").iter(PARQUET_ROWS):
            yield from rows_of(table)

    def digest(self) -> str:
        return digest_of_rows(self.rows())


class ChampSource:
    """Dataset source of the installed package champ-dataset: contest problems with a numeric answer."""

    name = CHAMP

    def rows(self) -> Iterator[Row]:
        """Yield the problems in their order. Raises ConfigError if the package is not installed."""
        for problem in json.loads(self._path.read_text(encoding="utf-8"))["problems"].values():
            if answer := _champ_number(problem["_raw_answer"]):
                yield {
                    "problem": problem["_text"],
                    "answer": answer,
                    "identifier": problem["identifier"],
                    "category": problem["category"],
                    "data_source": CHAMP,
                }

    def digest(self) -> str:
        return sha256_of(self._path)

    @cached_property
    def _path(self) -> Path:
        spec = importlib.util.find_spec(_CHAMP_PACKAGE)
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"source {CHAMP}: run pip install --no-deps champ-dataset==1.0.0, which holds it"
            )
        return Path(spec.origin).parent / _CHAMP_FILE


def _champ_number(answer: str | None) -> str | None:
    """Return the first numeric form of an answer, or None."""
    forms = _ALTERNATIVE.split((answer or "").replace("@@", ""))
    return next((form.strip() for form in forms if _NUMBER.fullmatch(form.strip())), None)


Source = FileSource | HubSource | GeneratedSource | ChampSource


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
        return tasks_of(text, size, seed, settings)
    path = Path(text)
    if text == CHAMP and not path.exists():
        return ChampSource()
    if path.is_file():
        ending_of(path)
        return FileSource(path)
    hub_id = _HUB_ID.fullmatch(text)
    if path.exists() or path.suffix in FORMATS or hub_id is None:
        raise ConfigError(f"source {text}: no such file, and no OWNER/NAME of the hub; give one of them")
    return HubSource(f"{text}, split {split}", _from_hub(hub_id[1], hub_id[2], split, revision))


def _from_hub(name: str, config: str | None, split: str, revision: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # raises whatever the hub, network or builder raises
        raise ConfigError(
            f"source {name}: cannot be loaded from the hub ({error}); check --split and --revision, or "
            f"download its files where there is a network and give their paths"
        ) from error
