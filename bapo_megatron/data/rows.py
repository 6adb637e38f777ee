"""Rows of a dataset: files read without a user cache, validated fields, and the difficulty filter.

``read_rows`` holds all rows of a JSONL or parquet file in memory; ``iterate_jsonl`` gives one after the
other. ConfigError for a bad file, RowError for a field that is not as in Skywork-OR1-RL-Data's schema. A
row's difficulty, by which too easy and too hard problems are dropped, is a number in its ``extra_info``. Used
in ``commands/doctor/``, this folder, ``data/prepare/`` and ``evaluation/``.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import json
import math
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

from bapo_megatron.config import DataConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.code_tests import are_tests
from bapo_megatron.types import Prompt

Row = dict[str, Any]

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""File name endings, and the loader of ``datasets`` for each."""

MAX_DEPTH = 100
"""Limit of nested lists and objects: Arrow's reader is recursive, and a deeper one crashes the process."""

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z|\\\Z)|[\[{\]}]', re.DOTALL)
r"""A string, or a bracket outside of strings. An unterminated string extends to the end of the line: else
every quote in it would be tried as a beginning."""
_CONVERTED = re.compile(r"timestamp\[|Json\(")
"""Types of columns whose texts the loader changes: dates, and texts beside other types (05 becomes 5)."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of what a prompt shows, as verl has them, beside places such as ``<image>`` in its text."""
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
            if path.suffix == ".jsonl" and _CONVERTED.search(str(dataset.features)):
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


def digest_of_rows(rows: Iterable[Row]) -> str:
    """SHA-256 of rows as JSON, a line each."""
    found = hashlib.sha256()
    for row in rows:
        found.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return found.hexdigest()


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


_RAW = {"problem", "question"}
"""Columns of a raw dataset, which `bapo data prepare` converts."""


class RowError(Exception):
    """Invalid dataset row; callers add the file and the row's number, and raise ConfigError or count it."""


def field_of(row: Row, name: str, kind: type, kind_name: str) -> Any:
    """Value of ``row[name]``. RowError if it is not of type ``kind``."""
    value = row.get(name)
    if not isinstance(value, kind):
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise RowError(f"{name} is {found}; it must be {kind_name}")
    return value


def messages_of(row: Row) -> list[dict[str, str]]:
    """Chat messages of the row's ``prompt``. RowError if there are none or one is empty."""
    if "prompt" not in row and _RAW & {name.lower() for name in row}:
        raise RowError(
            f"prompt is missing; the row has {', '.join(sorted(row))}: `bapo data prepare FILE --output DIR` "
            f"converts such rows"
        )
    messages: list[dict[str, str]] = field_of(row, "prompt", list, "a list of {role, content}")
    if not messages:
        raise RowError("prompt is empty; it must hold at least one message {role, content}")
    for message in messages:
        if not isinstance(message, dict):
            raise RowError(f"prompt holds {message!r}; a message must be {{role, content}}")
        for key in ("role", "content"):
            value = message.get(key)
            if not isinstance(value, str) or not value.strip():
                raise RowError(f"prompt has a message whose {key} is {value!r}; it must be text, not empty")
    return messages


def media_problem(row: Row, messages: Sequence[Mapping[str, str]]) -> str | None:
    """The error of a row whose prompt is about what it shows: only its text reaches the model. Else None."""
    for name in _MEDIA:
        place = f"<{name.removesuffix('s')}>"
        if row.get(name) not in (None, []) and any(place in one["content"] for one in messages):
            return f"its prompt is about its {name}, and models here read text alone: leave it out"
    return None


def ground_truth_of(row: Row, several: bool = False) -> str:
    """Ground truth of the row, ``reward_model.ground_truth``, as text: one answer, or the tests of a program.

    ``several``: for a user's reward function, which gets lists, objects and other values as JSON text.
    """
    value = field_of(row, "reward_model", dict, 'an object with "ground_truth"').get("ground_truth")
    answer = _json_of(value) if are_tests(value) else _unwrapped(value, several)
    if isinstance(answer, int) and not isinstance(answer, bool):
        answer = str(answer)
    if several and isinstance(answer, (bool, float, list, dict)):
        answer = _json_of(answer)
    if not isinstance(answer, str) or not answer.strip():
        any_value = "" if several or not isinstance(value, (float, list, dict)) else _OWN
        raise RowError(
            f"reward_model.ground_truth is {value!r}; it must be the answer as text, not empty{any_value}"
        )
    return answer


_OWN = "; a reward function of yours takes any JSON value (--reward module:function of `bapo data prepare`)"
"""Hint at a ground truth that no built-in reward reads."""


def _json_of(value: Any) -> str:
    """The JSON text of a ground truth; empty for one that is missing: an object without a value, or NaN,
    which pandas has in place of a missing value."""
    plain = _without_none(value)
    try:
        return "" if plain == {} else json.dumps(plain, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        return ""


def _without_none(value: Any) -> Any:
    """The value without the keys of other rows' objects, which Arrow fills with None."""
    if isinstance(value, dict):
        return {key: inner for key, inner in value.items() if inner is not None}
    return value


def _reader_of(text: str, several: bool) -> Callable[[str], Any] | None:
    """What reads a text that begins as a list of texts; not Python's form, for a user's reward function."""
    if text.lstrip().startswith('["'):
        return json.loads
    return ast.literal_eval if text.lstrip().startswith("['") and not several else None


def _unwrapped(value: object, several: bool) -> object:
    """Answer inside ``'["34"]'``, Skywork's form of some answers, or ``"['34']"``, a list that was written as
    Python; any other value unchanged."""
    inner: object = value
    if isinstance(value, str) and (read := _reader_of(value, several)):
        try:
            inner = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return value
    if isinstance(inner, list) and all(isinstance(item, str) for item in inner):
        if len(inner) > 1 and all(item.lstrip().startswith("assert") for item in inner):
            return json.dumps(inner)  # the tests of a code problem
        if len(inner) == 1:
            return inner[0]
        if several:
            return value if isinstance(value, str) else json.dumps(inner, ensure_ascii=False)
        # Several in Python's form are left to the check of ground truths: runs began with them.
        if not (isinstance(value, str) and value.lstrip().startswith("['")):
            raise RowError(f"reward_model.ground_truth is {value!r}, {len(inner)} answers; give one")
    return value


def extra_info_of(row: Row) -> dict[str, Any]:
    """The row's ``extra_info`` as plain JSON, without keys of other rows (Arrow fills those with None)."""
    info = row.get("extra_info")
    if info is not None and not isinstance(info, dict):
        raise RowError(f"extra_info is of type {type(info).__name__}; it must be an object")
    plain: dict[str, Any] = _without_none(json.loads(json.dumps(info or {}, default=str)))
    return plain


def within_difficulty(prompts: Sequence[Prompt], data: DataConfig) -> tuple[Prompt, ...]:
    """Prompts whose ``data.difficulty`` is between its bounds, both included; all if it is not set.

    Skywork-OR1-RL-Data has ``model_difficulty.DeepSeek-R1-Distill-Qwen-7B`` and the like in ``extra_info``.
    Prompts without the number are left out. Raises ConfigError if none is left.
    """
    if data.difficulty is None:
        return tuple(prompts)
    found = [(prompt, difficulty_of(prompt.extra_info, data.difficulty)) for prompt in prompts]
    kept = [
        prompt
        for prompt, value in found
        if value is not None and data.min_difficulty <= value <= data.max_difficulty
    ]
    if not kept:
        values = [value for _, value in found if value is not None]
        there = f"they span {min(values)} to {max(values)}" if values else "no row has that number"
        raise ConfigError(
            f"data.difficulty={data.difficulty}: no prompt lies between data.min_difficulty="
            f"{data.min_difficulty} and data.max_difficulty={data.max_difficulty}; {there}"
        )
    return tuple(kept)


def difficulty_of(info: Any, path: str) -> float | None:
    """Difficulty at the dotted ``path``; keys may have dots themselves, as names of models do.

    A number, or a text with one: ``0.96875``, as OpenMathReasoning has it, or ``7/8``.
    """
    if isinstance(info, dict):
        for key, value in info.items():
            if key == path:
                return _number(value)
            if path.startswith(f"{key}."):
                return difficulty_of(value, path[len(key) + 1 :])
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        # Not all texts as a Fraction, which takes minutes for "1e99999999"; a ratio has no exponent.
        found = float(Fraction(value.strip()) if isinstance(value, str) and "/" in value else value)
    except (ValueError, ZeroDivisionError, OverflowError):  # "n/a"
        return None
    return None if isinstance(value, str) and not math.isfinite(found) else found
