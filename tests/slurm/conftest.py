"""One cluster for all Slurm tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster.cluster import Cluster, reason_not_to_run


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slurm cluster of four nodes with eight fake GPUs each."""
    if reason := reason_not_to_run():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The cluster, whole at the beginning of each test and empty at its end."""
    yield started
    started.call("scancel", "--user=root")
    started.finalize()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"
