"""What a process does about garbage once it has imported: as much as ever."""

from __future__ import annotations

import gc

import pytest

from bapo_megatron.runtime import garbage


def test_collections_are_as_usual_after_the_imports() -> None:
    """Also after an import that fails."""
    usual = gc.get_threshold()
    garbage.collect_rarely()
    assert gc.get_threshold() != usual
    garbage.keep_imports()
    assert gc.get_threshold() == usual
    before, imported = gc.get_freeze_count(), []
    with pytest.raises(ImportError), garbage.importing():
        assert not gc.isenabled()
        imported += [[] for _ in range(1000)]
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(imported)
