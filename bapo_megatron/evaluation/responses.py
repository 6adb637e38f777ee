"""Output folder of one evaluated suite: writer and readers of its settings, responses and summary.

    OUTPUT/SUITE/  settings.json  responses.jsonl (one a line)  summary.json (when complete)

``open_folder`` locks it and yields the ``Responses`` to append to; ``read_responses`` and ``read_summary``
read it. A response is on disk before it counts, and is not sampled again after a kill. A rescored response
has several rows, of which the last counts. A torn last line is cut off on reopening.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bapo_megatron.checkpoint.run_directory import only_writer
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.scoring import ScoredResponse
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.jsonl_log import JsonlLog, Row, whole_lines
from bapo_megatron.runtime.storage import writing

FORMAT = 1
SETTINGS, RESPONSES, SUMMARY = "settings.json", "responses.jsonl", "summary.json"

_MAY_CHANGE = ("samples", "model.checkpoint", "suite.name", "suite.path", "code_version")


class Responses(JsonlLog):
    """Response file of one suite, open for appending; ``append_all`` is durable on return."""

    def append_all(self, rows: Sequence[Row]) -> None:
        """Append the rows durably (fsync). Raises RunStopped if the disk refuses them."""
        for row in rows:
            self.append(row)
        with writing("a response", self.path):
            os.fsync(self._file.fileno())


@contextmanager
def open_folder(folder: Path, settings: Row) -> Iterator[Responses]:
    """Open and lock the responses in ``folder`` for an evaluation with ``settings``, and write the settings.
    Raises ConfigError if existing responses have other settings than these (but for ``_MAY_CHANGE``), or if
    another process has locked the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        if (folder / SETTINGS).exists():
            _check_settings(folder / SETTINGS, settings)
        elif leftovers := [name for name in (RESPONSES, SUMMARY) if (folder / name).exists()]:
            raise ConfigError(f"{folder} holds {leftovers[0]} without {SETTINGS}: name another --output")
        write_atomically(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")
        log = Responses(folder / RESPONSES)
        try:
            yield log
        finally:
            log.close()


def _check_settings(path: Path, settings: Row) -> None:
    before, now = flat_settings(_json(path)), flat_settings(settings)
    different = [
        f"{name}: {before.get(name)!r} then, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name not in _MAY_CHANGE
    ]
    if different:
        raise ConfigError(
            f"{path.parent} holds responses that were sampled with other settings:\n"
            + "\n".join(different)
            + "\ngive them as they were to continue, or another --output"
        )


def flat_settings(settings: Row) -> Row:
    """Return evaluation settings with one level of nesting flattened to dotted names."""
    flat: Row = {}
    for name, value in settings.items():
        flat |= (
            {f"{name}.{key}": item for key, item in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return flat


def read_responses(path: Path, samples: int) -> list[ScoredResponse]:
    """Return the stored ones of the first ``samples`` responses of each problem, sorted, without texts."""
    responses = {
        (response.problem, response.sample): response
        for response, _ in all_responses(path)
        if response.sample < samples
    }
    return [responses[place] for place in sorted(responses)]


def all_responses(path: Path) -> Iterator[tuple[ScoredResponse, str]]:
    """Yield each row's response and text, in file order. Ignores a torn last line."""
    for line in whole_lines(path) if path.exists() else ():
        row = json.loads(line)
        yield ScoredResponse(**{name: row[name] for name in ScoredResponse.__dataclass_fields__}), row["text"]


def write_summary(folder: Path, settings: Row, metrics: Row) -> None:
    """Write the summary of a complete suite atomically: settings and metrics."""
    write_atomically(folder / SUMMARY, json.dumps({**settings, "metrics": metrics}, indent=2) + "\n")


def read_summary(folder: Path) -> Row:
    """Return the summary of a finished suite. Raises ConfigError for another format."""
    return _json(folder / SUMMARY)


def _json(path: Path) -> Row:
    content: Row = json.loads(path.read_text())
    if content["format"] != FORMAT:
        raise ConfigError(
            f"{path} has format {content['format']}, this version of the program reads {FORMAT}"
        )
    return content
