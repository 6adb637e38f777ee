"""Fixtures: one process for each Transformer Engine version, tiny models and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.data.samples import Sample
from bapo_rehearsal.te_sources import VERSIONS, te_version
from tests.distributed.test_layouts import Answer, answer
from tests.support.layouts import layout
from tests.support.models import random_samples, save_tiny_model
from tests.support.te_process import Choices, TransformerEngineProcess
from tests.support.tiers import slow_but

PINNED, *NEWER = VERSIONS[VERSIONS.index(te_version()) :]
"""The version that is tested with the installed megatron-core, and newer ones, with theirs."""


def at_versions(
    cases: Iterable[tuple[Any, ...]], *quick: tuple[Any, ...], newer: Sequence[tuple[Any, ...]] | None = None
) -> list[Any]:
    """Parameters, ``te`` first: all cases at the pinned version, some (the quick ones) at newer ones, too.

    ``make test`` has the quick ones at the pinned version.
    """
    more = [(version, *case) for version in NEWER for case in (quick if newer is None else newer)]
    return slow_but([*((PINNED, *case) for case in cases), *more], *((PINNED, *case) for case in quick))


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[[str], TransformerEngineProcess]]:
    """The process of a version, which is started when it is first asked for."""
    started: dict[str, TransformerEngineProcess] = {}

    def process_of(version: str) -> TransformerEngineProcess:
        if version not in started:
            started[version] = TransformerEngineProcess(version)
        return started[version]

    yield process_of
    for process in started.values():
        process.close()


# Of each test: parameters of a session would have pytest mix the tests of all files.
@pytest.fixture(params=slow_but([PINNED, *NEWER], PINNED))
def te(
    request: pytest.FixtureRequest, processes: Callable[[str], TransformerEngineProcess]
) -> TransformerEngineProcess:
    """Each tested version; the newest in `make test-slow`."""
    return processes(request.param)


def answers(
    te: TransformerEngineProcess, text: str, folder: Path, samples: list[Sample], **choices: Any
) -> list[Answer]:
    """What every rank of a layout says after one update."""
    where = layout(text)
    return te.run(answer, where.parallel, folder, samples, where, 1, choices=Choices(**choices))


@pytest.fixture(scope="module")
def reference_of() -> Callable[[TransformerEngineProcess, Path, list[Sample]], Answer]:
    """What one process says on torch's layers and torch's AdamW, once for each version."""
    found: dict[str, Answer] = {}

    def reference(te: TransformerEngineProcess, folder: Path, samples: list[Sample]) -> Answer:
        if te.version not in found:
            [found[te.version]] = answers(te, "one", folder, samples, layers=False, fused_adam=False)
            assert not te.calls, "on a login node its kernels would end the process"
        return found[te.version]

    return reference


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    return random_samples(12, seed=3)
