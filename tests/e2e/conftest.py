"""Runs that tests of several files compare theirs with, each made once a session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.once import made_once
from tests.support.short_runs import TWO, TWO_JUDGES, audited, finish, start


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, of an interpreter of its own: forked ones must make the same bits.

    With two reward workers, as by default: most runs that are compared with it have one.
    """

    def make(folder: Path) -> None:
        with audited(folder / "run"):
            output = finish(start(folder / "run", *TWO_JUDGES, launcher=(sys.executable,)))
        assert "step 5/5" in output
        assert "reward 0." in output

    return made_once(tmp_path_factory, "whole", make) / "run"


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that was left alone."""
    make = lambda folder: finish(start(folder / "run", *TWO))  # noqa: E731
    return made_once(tmp_path_factory, "alone", make) / "run"
