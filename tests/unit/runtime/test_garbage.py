"""What a process does about garbage once it has imported: as much as ever."""

from __future__ import annotations

import gc

from bapo_megatron.runtime import garbage


def test_collections_are_as_usual_after_the_imports() -> None:
    usual = gc.get_threshold()
    garbage.collect_rarely()
    assert gc.get_threshold() != usual
    garbage.keep_imports()
    assert gc.get_threshold() == usual
