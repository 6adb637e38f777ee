"""Reads the rows of a dataset file with ``datasets``; nothing is left in the user's cache."""

from __future__ import annotations

import glob
import json
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError

Row = dict[str, Any]

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""File name endings and the loader that reads them."""


def read_rows(path: Path) -> list[Row]:
    """All rows in the order of the file. Raises ConfigError that names what is wrong with the file."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"data.path={path}: no such file; give a JSONL or parquet file")
    if path.suffix not in FORMATS:
        raise ConfigError(f"data.path={path}: unknown ending; give one of {', '.join(FORMATS)}")
    rows = _load(path) if path.stat().st_size else []
    if not rows:
        raise ConfigError(f"data.path={path}: the file has no rows")
    return rows


def _load(path: Path) -> list[Row]:
    import datasets  # takes seconds, and only this function needs it

    with tempfile.TemporaryDirectory(prefix="bapo_prompts_") as cache, _quiet(datasets):
        try:
            dataset = datasets.load_dataset(
                FORMATS[path.suffix], data_files=glob.escape(str(path)), split="train", cache_dir=cache
            )
            return list(dataset)  # while its files exist
        except Exception as error:  # the loaders raise whatever their parser raises
            cause = _broken_line(path) or repr(error.__cause__ or error)
            raise ConfigError(f"data.path={path}: cannot be read: {cause}") from error


def iterate_jsonl(path: Path) -> Iterator[Any]:
    """The values of a JSONL file, without Arrow's conversions. ConfigError with the row's number."""
    with path.open(encoding="utf-8") as lines:
        number = 0
        try:
            for line in lines:
                if line.strip():
                    yield json.loads(line)
                    number += 1
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError too
            raise ConfigError(f"{path}, row {number} (the first is 0): not JSON: {error}") from error


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _broken_line(path: Path) -> str | None:
    """The first row that is not JSON, as text; the parser's own number counts from the start of its block."""
    try:
        if FORMATS[path.suffix] == "json":
            deque(iterate_jsonl(path), maxlen=0)
    except ConfigError as error:
        return str(error)
    return None
