"""Folders that a session makes once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.once import made_once


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of a session without workers."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return SimpleNamespace(getbasetemp=lambda: tmp_path)


def test_it_is_made_once(factory: Any) -> None:
    made: list[Path] = []
    first = made_once(factory, "a", made.append)
    assert made_once(factory, "a", made.append) == first
    assert made == [first]
    assert made_once(factory, "b", made.append) != first


def test_what_failed_is_made_anew(factory: Any) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        made_once(factory, "a", fail)
    folder = made_once(factory, "a", lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_workers_share_it(factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's own folder lies in that of the session."""
    made: list[Path] = []
    alone = made_once(factory, "a", made.append)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    worker: Any = SimpleNamespace(getbasetemp=lambda: factory.getbasetemp() / "popen-gw3")
    assert made_once(worker, "a", made.append) == alone
    assert made == [alone]
