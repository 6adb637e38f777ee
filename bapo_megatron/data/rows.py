"""Rows of a dataset: the only reader of dataset files, field validation, and the difficulty filter.

``iterate_rows`` yields the rows of a JSONL, JSON or parquet file, ``read_rows`` returns all; both raise
ConfigError for a bad file. ``messages_of``, ``ground_truth_of`` and ``extra_info_of`` return a field of a row
in Skywork-OR1-RL-Data's schema, and raise RowError if it is invalid. ``within_difficulty`` takes loaded
prompts and returns those rated within the run's bounds; it drops unrated ones, too.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from bapo_megatron.config import DataConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.code_tests import are_tests
from bapo_megatron.types import Prompt

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
Message = dict[str, Any]
"""Chat message: role, content, and other fields of the template (name, tool_calls, tool_call_id)."""

FORMATS = (".jsonl", ".json", ".parquet")
"""File name endings; a JSON file's first value shows whether it has objects or one list."""
_GZIP, _GZIP_ENDING = b"\x1f\x8b", ".gz"

PARQUET_ROWS = 256
"""Parquet rows read at a time: rows of code problems have megabytes of tests."""

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of media in a prompt, as in verl, referenced by places such as ``<image>`` in its text."""
_DECODER, _NO_BLANK = json.JSONDecoder(), re.compile(r"\S")


def read_rows(path: Path, field: str = "data.path") -> list[Row]:
    """Return all rows in file order. Raises ConfigError, with the ``field`` that names the file, for a
    missing, empty or invalid one."""
    if not path.is_file():
        raise ConfigError(
            f"{field}={path}: no such file; give a JSONL or parquet file, or a folder that "
            "`bapo data prepare` wrote"
        )
    try:
        return list(iterate_rows(path))
    except ConfigError as error:  # the message begins with the path
        raise ConfigError(f"{field}={error}") from error


def iterate_rows(path: Path) -> Iterator[Row]:
    """Yield rows in file order, with values as written. Raises ConfigError, which begins with the path, for
    an empty or unreadable file."""
    read = _parquet if ending_of(path) == ".parquet" else _json
    number = -1
    for number, row in enumerate(read(path)):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, row {number} (the first is 0): it is not an object: {row!r:.80}")
        yield row
    if number < 0:
        raise ConfigError(f"{path}: the file has no rows")


def ending_of(path: Path) -> str:
    """Return the one of ``FORMATS`` that ends the file name, before ``.gz`` for JSON. Raises ConfigError."""
    ending = path.suffix
    if ending == _GZIP_ENDING and (inner := Path(path.stem).suffix) != ".parquet":
        ending = inner
    if ending not in FORMATS:
        raise ConfigError(f"{path}: unknown ending; give one of {', '.join(FORMATS)}")
    return ending


def _json(path: Path) -> Iterator[Any]:
    number = 0
    try:
        with _text(path) as text:
            for value in _values(text):
                rows = value if isinstance(value, list) and number == 0 else [value]
                yield from rows
                number += len(rows)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}, row {number} (the first is 0): cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # including UnicodeDecodeError
        raise ConfigError(f"{path}, row {number} (the first is 0): not JSON: {error}") from error


def _values(text: TextIO) -> Iterator[Any]:
    """Yield successive JSON values: line by line, or of the whole text if a value spans lines."""
    for line in text:
        try:
            values = list(_values_of(line))
        except ValueError:
            yield from _values_of(line + text.read())
            return
        yield from values


def _values_of(text: str) -> Iterator[Any]:
    end = 0
    while begins := _NO_BLANK.search(text, end):
        value, end = _DECODER.raw_decode(text, begins.start())
        yield value


def _text(path: Path) -> TextIO:
    """Open a UTF-8 file, perhaps gzipped, skipping a byte order mark."""
    with path.open("rb") as file:
        zipped = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path, "rt", encoding="utf-8-sig") if zipped else path.open(encoding="utf-8-sig")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet  # slow, and needed only here

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_ROWS):
                yield from rows_of(batch)
    except (pyarrow.ArrowException, OSError, ValueError, RecursionError) as error:  # including invalid UTF-8
        raise ConfigError(f"{path}: cannot be read as parquet: {error}") from error


def rows_of(table: pyarrow.Table | pyarrow.RecordBatch) -> Iterator[Row]:
    """Yield an Arrow table's rows, without the keys that Arrow adds to an object, with None as value, because
    objects of other rows have them."""
    columns = {field.name: _own_keys(field.type) for field in table.schema}
    for row in table.to_pylist():
        yield {name: columns[name](value) for name, value in row.items()}


def _own_keys(kind: pyarrow.DataType) -> Callable[[Any], Any]:
    """Return the converter of Arrow values of a column type to plain values."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):  # ``datasets`` writes this for objects that differ
        return lambda text: None if text is None else json.loads(text)
    if isinstance(kind, pyarrow.StructType):
        keys = {field.name: _own_keys(field.type) for field in kind}
        return lambda found: found and {k: of(found[k]) for k, of in keys.items() if found[k] is not None}
    if isinstance(kind, (pyarrow.ListType, pyarrow.LargeListType, pyarrow.FixedSizeListType)):
        of = _own_keys(kind.value_type)
        return of if of is _unchanged else lambda found: found and [of(one) for one in found]
    return _unchanged


def _unchanged(value: Any) -> Any:
    return value


def digest_of_rows(rows: Iterable[Row]) -> str:
    """Return the SHA-256 of rows as JSON lines."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


_RAW = {"problem", "question"}
"""Columns of a raw dataset, to be converted by `bapo data prepare`."""


class RowError(Exception):
    """Raised for an invalid row; callers add file and row number, and raise ConfigError or count it."""


def field_of(row: Row, name: str, kind: type, kind_name: str) -> Any:
    """Return ``row[name]``. Raises RowError if it is not of type ``kind``."""
    value = row.get(name)
    if not isinstance(value, kind):
        problem = "missing" if value is None else f"of type {type(value).__name__}"
        raise RowError(f"{name} is {problem}; it must be {kind_name}")
    return _whole(name, value) if isinstance(value, str) else value


def _whole(name: str, text: str) -> str:
    """Return the text. Raises RowError for a lone surrogate (half a character), which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise RowError(f"{name} has {half}, half of a character: mend it, or leave the row out") from None
    return text


def messages_of(row: Row) -> list[Message]:
    """Return the chat messages of a row's ``prompt``, with all fields that have a value; a turn that only
    calls tools may lack content. Raises RowError if there are none or one is empty."""
    if "prompt" not in row and _RAW & {name.lower() for name in row}:
        raise RowError(
            f"prompt is missing; the row has {', '.join(sorted(row))}: `bapo data prepare FILE --output DIR` "
            f"converts such rows"
        )
    messages: list[Any] = field_of(row, "prompt", list, "a list of {role, content}")
    if not messages:
        raise RowError("prompt is empty; it must hold at least one message {role, content}")
    return [_message_of(message) for message in messages]


def _message_of(message_value: Any) -> Message:
    if not isinstance(message_value, dict):
        raise RowError(f"prompt holds {message_value!r}; a message must be {{role, content}}")
    message = _without_none(message_value)
    if message.get("tool_calls") and not message.get("content"):
        message["content"] = ""
    for key in ("role", "content"):
        value = message.get(key)
        calls = key == "content" and value == "" and message.get("tool_calls")
        if not isinstance(value, str) or not (value.strip() or calls):
            raise RowError(f"prompt has a message whose {key} is {value!r}; it must be text, not empty")
    return _plain("prompt", message)


def media_problem(row: Row, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return an error if the prompt refers to its row's media, since only text reaches the model; or None."""
    for name in _MEDIA:
        place = f"<{name.removesuffix('s')}>"
        if row.get(name) not in (None, []) and any(place in message["content"] for message in messages):
            return f"its prompt is about its {name}, and models here read text alone: leave it out"
    return None


def ground_truth_of(row: Row, several: bool = False) -> str:
    """Return the ground truth, ``reward_model.ground_truth``, as text: one answer, or a program's tests.
    ``several``: for a user's reward function, which receives lists, objects and other values as JSON text."""
    value = field_of(row, "reward_model", dict, 'an object with "ground_truth"').get("ground_truth")
    answer = _json_of(value) if are_tests(value) else _unwrapped(value, several)
    if isinstance(answer, float) and answer.is_integer() and not several:
        answer = int(answer)  # a missing value turns a column of integers into floats
    if isinstance(answer, int) and not isinstance(answer, bool):
        answer = str(answer)
    if several and isinstance(answer, (bool, float, list, dict)):
        answer = _json_of(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise RowError(f"reward_model.ground_truth is {value!r}; it must be the answer as text, not empty")
    return _whole("reward_model.ground_truth", answer)


def _json_of(value: Any) -> str:
    """Return a ground truth as JSON text; "" if missing: an object without values, or pandas' NaN."""
    plain = _without_none(value)
    try:
        return "" if plain == {} else json.dumps(plain, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        return ""


def _without_none(value: Any) -> Any:
    """Return the value; if an object, without keys whose value is None."""
    if isinstance(value, dict):
        return {key: inner for key, inner in value.items() if inner is not None}
    return value


def _reader_of(text: str, several: bool) -> Callable[[str], Any] | None:
    """Return the parser of a text that begins as a JSON list, or as Python's if not for a user's reward."""
    if text.lstrip().startswith('["'):
        return json.loads
    return ast.literal_eval if text.lstrip().startswith("['") and not several else None


def _unwrapped(value: object, several: bool) -> object:
    """Return the answer inside ``'["34"]'``, Skywork's form of some answers, or ``"['34']"``, a Python list;
    any other value unchanged."""
    inner: object = value
    if isinstance(value, str) and (read := _reader_of(value, several)):
        try:
            inner = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return value
    if isinstance(inner, list) and all(isinstance(item, str) for item in inner):
        if len(inner) > 1 and all(item.lstrip().startswith("assert") for item in inner):
            return json.dumps(inner)  # tests of a code problem
        if len(inner) == 1:
            return inner[0]
        if several:
            return value if isinstance(value, str) else json.dumps(inner, ensure_ascii=False)
        # Several in Python's form are left to the ground truth check: earlier runs began with them.
        if not (isinstance(value, str) and value.lstrip().startswith("['")):
            raise RowError(f"reward_model.ground_truth is {value!r}, {len(inner)} answers; give one")
    return value


def extra_info_of(row: Row, others: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return ``extra_info`` and the ``others`` columns as plain JSON, without keys that have no value."""
    info = row.get("extra_info")
    if info is not None and not isinstance(info, dict):
        raise RowError(f"extra_info is of type {type(info).__name__}; it must be an object")
    return _plain("extra_info", {**others, **(info or {})})


def _plain(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return the object as JSON, without keys whose value is None or NaN (pandas' missing value)."""

    def constant(text: str) -> None:
        if text != "NaN":
            raise RowError(f"{name} has {text}, which JSON has not: write a number, or leave it out")

    text = _whole(name, json.dumps(value, default=str, ensure_ascii=False))
    plain: dict[str, Any] = _without_none(json.loads(text, parse_constant=constant))
    return plain


def within_difficulty(prompts: Sequence[Prompt], data: DataConfig) -> tuple[Prompt, ...]:
    """Return the prompts whose ``data.difficulty`` is within its bounds, inclusive; all if it is not set.

    Skywork-OR1-RL-Data has ``model_difficulty.DeepSeek-R1-Distill-Qwen-7B`` and the like in ``extra_info``.
    Drops prompts without the number. Raises ConfigError if none is left.
    """
    if data.difficulty is None:
        return tuple(prompts)
    rated = [(prompt, difficulty_of(prompt.extra_info, data.difficulty)) for prompt in prompts]
    kept = [
        prompt
        for prompt, value in rated
        if value is not None and data.min_difficulty <= value <= data.max_difficulty
    ]
    if not kept:
        values = [value for _, value in rated if value is not None]
        there = f"they span {min(values)} to {max(values)}" if values else "no row has that number"
        raise ConfigError(
            f"data.difficulty={data.difficulty}: no prompt lies between data.min_difficulty="
            f"{data.min_difficulty} and data.max_difficulty={data.max_difficulty}; {there}"
        )
    return tuple(kept)


def difficulty_of(info: Any, path: str) -> float | None:
    """Return the difficulty at the dotted ``path``, whose keys may contain dots, as model names do. A number,
    or a text with one: ``0.96875``, as in OpenMathReasoning."""
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
        number = float(value)
    except (ValueError, OverflowError):  # "n/a"
        return None
    return number if math.isfinite(number) else None
