"""``bapo data prepare``: ``prepare(options)`` filters sources into a dataset folder and returns its ``Card``.

The folder has data.jsonl, card.json and README.md, and is renamed into place when complete. Equal sources and
options give equal bytes, so data.jsonl's digest identifies a dataset. Raises ConfigError for bad options or
sources, if too many rows are invalid, or if none is left; fewer invalid rows are dropped and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bapo_megatron.config.flags import parse_options
from bapo_megatron.data.prepare.card import Card, Dropped, as_markdown, summary
from bapo_megatron.data.prepare.filters import (
    INVALID,
    Contamination,
    Duplicates,
    EvaluationProblem,
    Filter,
    difficulty_filter,
    first_reason,
    length_filter,
    scorable,
)
from bapo_megatron.data.prepare.options import CARD_FILE, CARD_TEXT, DATA_FILE, PrepareOptions
from bapo_megatron.data.prepare.problems import (
    Problem,
    problem_of,
    with_columns,
    with_source,
    without_columns,
)
from bapo_megatron.data.prepare.sources import Source, open_source
from bapo_megatron.data.rows import RowError, media_problem
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.runtime.files import sha256_of
from bapo_megatron.runtime.written_folders import (
    check_replaceable,
    content_besides,
    new_folder,
)

_WRITER = "bapo data prepare"


def prepare(options: PrepareOptions) -> Card:
    """Prepare a dataset: write the folder ``options.output`` atomically; return its data card."""
    options.check()
    check_dataset_output(options.output, options.overwrite)
    instruct = options.instruct and not options.own_reward  # an own reward reads neither box nor block
    options = replace(options, reward=options.reward_function, instruct=instruct)
    generated = options.size, options.seed, json.loads(options.task_settings)
    sources = [open_source(text, options.split, options.revision, *generated) for text in options.sources]
    duplicates = Duplicates()
    card = Card(sources=[], options=options)
    filters = _filters(options, duplicates, card)
    with new_folder(options.output, _WRITER, _foreign) as folder:
        _write(folder / DATA_FILE, sources, filters, duplicates, card)
        card.sha256 = sha256_of(folder / DATA_FILE)
        _check_result(card, options)
        (folder / CARD_FILE).write_text(json.dumps(card.as_json(), indent=2, ensure_ascii=False) + "\n")
        (folder / CARD_TEXT).write_text(as_markdown(card))
    return card


def check_dataset_output(output: Path, overwrite: bool) -> None:
    """Raise ConfigError if the output folder exists and may not be replaced."""
    check_replaceable(output, _WRITER, _foreign)
    if not overwrite and (output / CARD_FILE).exists():
        raise ConfigError(f"output={output} exists: name another, or give --overwrite")


def _foreign(folder: Path, _writer: str) -> str | None:
    """Return foreign content of ``folder``, in words; None if it is just a prepared dataset."""
    if (content := content_besides(folder, {DATA_FILE, CARD_FILE, CARD_TEXT})) is not None:
        return content
    return None if (folder / CARD_FILE).is_file() else "is not a prepared dataset"


def _problems(source: Source, options: PrepareOptions) -> Iterator[Problem | RowError]:
    """Yield a source's rows as problems or errors."""
    names = {options.question_column: "problem", options.answer_column: "answer"}
    for number, fields in enumerate(source.rows()):
        try:
            row = without_columns(with_source(fields, options.source_column), options.drop_columns)
            row = with_columns(row, names)
            problem = problem_of(row, source.name, number, options.instruct, options.own_reward)
            if why := media_problem({name.lower(): fields[name] for name in fields}, problem.messages):
                raise RowError(why)
            yield problem.with_system(options.system_prompt)
        except RowError as error:
            yield error


def _filters(options: PrepareOptions, duplicates: Duplicates, card: Card) -> list[tuple[str, Filter]]:
    filters: list[tuple[str, Filter]] = [("duplicate", duplicates.repeated)]
    if options.difficulty is not None:
        bounds = options.min_difficulty, options.max_difficulty
        filters.append(("difficulty", difficulty_filter(options.difficulty, *bounds)))
    if options.against:
        problems = [problem for text in options.against for problem in _evaluation_set(text, options, card)]
        index = Contamination(problems, options.ngram_words, options.ngram_share)
        filters.append(("contaminated", index.overlap))
    filters.append((INVALID, scorable(options.reward_function)))
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
        filters.append(("too long", length_filter(tokenizer, options.max_prompt_tokens, card.lengths)))
    return filters


def _evaluation_set(text: str, options: PrepareOptions, card: Card) -> Iterator[EvaluationProblem]:
    suite = options.suites / text / DATA_FILE
    path = suite if suite.is_file() else Path(text)
    if not path.is_file():
        raise ConfigError(
            f"against: {text} is neither a file nor a suite ({suite} does not exist): prepare it first, or "
            f"give the path of its file"
        )
    source, rows = open_source(str(path), options.split, None), 0
    # Columns of the sources may have other names.
    plain = PrepareOptions(options.sources, options.output, instruct=options.instruct, reward=options.reward)
    for problem in _problems(source, plain):
        if isinstance(problem, RowError):
            raise ConfigError(f"against: {path}, row {rows} (the first is 0): {problem}")
        yield EvaluationProblem(text, rows, problem.dialogue)
        rows += 1
    card.against.append({"name": text, "sha256": source.digest(), "rows": rows})


def _write(
    path: Path, sources: list[Source], filters: list[tuple[str, Filter]], duplicates: Duplicates, card: Card
) -> None:
    """Write the kept rows; count the others, and the sources, in ``card``."""
    with path.open("w", encoding="utf-8") as file:
        for source in sources:
            number = -1
            for number, problem in enumerate(_problems(source, card.options)):
                if isinstance(problem, RowError):
                    card.drop(Dropped(INVALID, source.name, number, str(problem), ""))
                elif reason := first_reason(problem, filters):
                    card.drop(Dropped(reason[0], source.name, number, reason[1], problem.question))
                else:
                    file.write(json.dumps(problem.row(), ensure_ascii=False) + "\n")
                    duplicates.keep(problem)
                    card.keep(problem)
            card.sources.append({"name": source.name, "sha256": source.digest(), "rows": number + 1})


def _check_result(card: Card, options: PrepareOptions) -> None:
    rows = sum(source["rows"] for source in card.sources)
    first = "".join(f"\n{invalid.source}, row {invalid.row}: {invalid.why}" for invalid in card.invalid[:5])
    if len(card.invalid) > options.max_invalid * rows:
        raise ConfigError(
            f"{len(card.invalid)} of {rows} rows are invalid, more than --max-invalid {options.max_invalid}; "
            f"nothing was written. The first (rows count from 0):{first}"
        )
    if not card.kept:
        told = ", ".join(f"{name} {count}" for name, count in card.dropped.items()) or "there are none"
        raise ConfigError(f"no row of {rows} is left ({told}); nothing was written{first}")


def data_command(arguments: Sequence[str]) -> None:
    """Run `bapo data` with ``arguments``: prepare the dataset and print its summary."""
    if arguments[:1] != ["prepare"]:
        raise ConfigError("usage: bapo data prepare SOURCE ... --output DIR [flags]; --help lists the flags")
    options = parse_options(PrepareOptions, "bapo data prepare", arguments[1:])
    print(summary(prepare(options)), end="")
