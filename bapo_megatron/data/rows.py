"""Dataset file reader: the rows of a JSONL or parquet file, by ``datasets``, without its user cache.

``read_rows`` holds all rows in memory; ``iterate_jsonl`` gives one after the other. ConfigError for a bad
file. Used in ``commands/doctor/``, this folder, ``data/prepare/`` and ``evaluation/``.
"""

from __future__ import annotations

import glob
import json
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError

Row = dict[str, Any]

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""File name endings, and the loader of ``datasets`` for each."""

MAX_DEPTH = 100
"""Limit of nested lists and objects: Arrow's reader is recursive, and a deeper one crashes the process."""

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z|\\\Z)|[\[{\]}]', re.DOTALL)
r"""A string, or a bracket outside of strings. An unterminated string extends to the end of the line: else
every quote in it would be tried as a beginning."""
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_rows(path: Path) -> list[Row]:
    """All rows in the order of the file. ConfigError for a missing, empty or invalid file."""
    path = Path(path)
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(
            f"data.path={path}: no such file{where}; give a JSONL or parquet file, or a folder that "
            "`bapo data prepare` wrote"
        )
    if path.suffix not in FORMATS:
        raise ConfigError(f"data.path={path}: unknown ending; give one of {', '.join(FORMATS)}")
    rows = _load(path) if path.stat().st_size else []
    if not rows:
        raise ConfigError(f"data.path={path}: the file has no rows")
    return rows


def _load(path: Path) -> list[Row]:
    import datasets  # takes seconds, and only this function needs it

    if FORMATS[path.suffix] == "json":
        with path.open(encoding="utf-8", errors="replace") as lines:
            deque(within_depth(path, lines), maxlen=0)
    with tempfile.TemporaryDirectory(prefix="bapo_prompts_") as cache, _quiet(datasets):
        try:
            dataset = datasets.load_dataset(
                FORMATS[path.suffix], data_files=glob.escape(str(path)), split="train", cache_dir=cache
            )
            # Arrow reads texts that are dates as timestamps.
            if path.suffix == ".jsonl" and "timestamp[" in str(dataset.features):
                return list(iterate_jsonl(path))
            return list(dataset)  # while its files exist
        except Exception as error:  # the loaders raise whatever their parser raises
            cause = _broken_line(path)
            if cause is None and path.suffix == ".jsonl":  # JSON, but columns of several types
                rows = list(iterate_jsonl(path))
                if all(isinstance(row, dict) for row in rows):
                    return rows
            cause = cause or repr(error.__cause__ or error)
            raise ConfigError(f"data.path={path}: cannot be read: {cause}") from error


def within_depth(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """Depth check of the lines of a JSON file: ConfigError where they nest deeper than ``MAX_DEPTH``.

    Brackets of earlier lines that are still open count.
    """
    depth = number = 0
    for line in lines:
        for token in _BRACKETS.finditer(line):
            depth = max(0, depth + _STEPS.get(token.group(), 0))
            if depth > MAX_DEPTH:
                row = f"row {number} (the first is 0)" if path.suffix == ".jsonl" else f"line {number + 1}"
                raise ConfigError(f"{path}, {row}: more than {MAX_DEPTH} brackets within each other")
        yield line
        number += bool(line.strip()) or path.suffix != ".jsonl"


def iterate_jsonl(path: Path) -> Iterator[Any]:
    """Values of a JSONL file, without Arrow's conversions. ConfigError with the row's number."""
    with path.open(encoding="utf-8") as lines:
        number = 0
        try:
            for line in within_depth(path, lines):
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
    """First row that is not JSON, as text: the parser's own number counts from the start of its block."""
    try:
        if FORMATS[path.suffix] == "json":
            deque(iterate_jsonl(path), maxlen=0)
    except ConfigError as error:
        return str(error)
    return None
