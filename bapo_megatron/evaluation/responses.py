"""Output folder of one evaluated suite: writer and readers of its settings, responses and summary.

    OUTPUT/SUITE/  settings.json  responses.jsonl (one a line)  summary.json (when complete)

``open_folder`` locks it and yields the ``Responses`` to append to; ``read_responses`` and ``read_summary``
read it. A response is on disk before it counts, and is not sampled again after a kill. The last row of a
problem and sample counts: a rescored response has another row. A torn last line is cut off on reopening.
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
from bapo_megatron.runtime.files import sha256_of, write_atomically
from bapo_megatron.runtime.jsonl_log import JsonlLog, Row, whole_lines
from bapo_megatron.runtime.storage import writing

FORMAT = 1
SETTINGS, RESPONSES, SUMMARY = "settings.json", "responses.jsonl", "summary.json"

_OTHER_MODEL = (
    "(model.sha256 is of weights, configuration, tokenizer and chat template: a file of the model {folder} "
    "was changed, added or removed since, or an earlier version of this program also counted safetensors "
    "files that are not the model's)"
)
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
    Raises ConfigError if existing responses have other settings, or another process holds the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        if (folder / SETTINGS).exists():
            _check_settings(folder / SETTINGS, settings)
        elif leftovers := [name for name in (RESPONSES, SUMMARY) if os.path.lexists(folder / name)]:
            raise ConfigError(
                f"{folder} holds {leftovers[0]} without {SETTINGS}: no evaluation wrote it, or it lost its "
                "settings; name another --output, or move the file away"
            )
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
        if before.get("model.sha256") != now.get("model.sha256"):
            different.append(_OTHER_MODEL.format(folder=now.get("model.checkpoint")))
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
    """Return the first ``samples`` responses of each problem, without texts. Ignores a torn last line."""
    responses = {
        (response.problem, response.sample): response
        for response, _ in all_responses(path)
        if response.sample < samples
    }
    return [responses[place] for place in sorted(responses)]


def first_responses(path: Path, problems: int) -> dict[int, tuple[str, bool]]:
    """Return text and correctness of the first response to each of the first ``problems`` problems."""
    return {
        response.problem: (text, response.correct)
        for response, text in all_responses(path)
        if response.sample == 0 and response.problem < problems
    }


def all_responses(path: Path) -> Iterator[tuple[ScoredResponse, str]]:
    """Yield each response with its text. Raises ConfigError for an invalid line."""
    for number, line in enumerate(whole_lines(path) if path.exists() else (), 1):
        try:
            row = json.loads(line)
            response = ScoredResponse(**{name: row[name] for name in ScoredResponse.__dataclass_fields__})
            text = str(row["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number} is not a response: {error!r}; mend it or delete it"
            ) from None
        yield response, text


def write_summary(folder: Path, settings: Row, metrics: Row) -> None:
    """Write the suite's summary atomically."""
    content = {**settings, "responses_sha256": sha256_of(folder / RESPONSES), "metrics": metrics}
    write_atomically(folder / SUMMARY, json.dumps(content, indent=2) + "\n")


def read_summary(folder: Path) -> Row:
    """Return the summary of a finished suite. Raises ConfigError if it is not finished."""
    path = folder / SUMMARY
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {SUMMARY}: the evaluation is not finished; run it again")
    return _json(path)


def _json(path: Path) -> Row:
    try:
        content = json.loads(path.read_text())
        version = content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}") from None
    if version != FORMAT:
        raise ConfigError(f"{path} has format {version}, this version of the program reads {FORMAT}")
    return dict(content)
