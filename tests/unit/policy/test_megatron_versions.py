"""The differences between releases of megatron-core, on both sides of each; slow tests run it on both."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import pytest

from bapo_megatron.policy import megatron_versions
from bapo_megatron.policy.megatron_versions import (
    marks_cut_experts,
    release,
    replace_triton_kernels,
    save_arguments,
    split_tensor_factory,
    writer_forks,
)

KERNELS = "megatron.core.transformer.moe.ops.paged_stash"


def test_the_release_is_the_imported_one() -> None:
    assert release() == tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
    assert callable(split_tensor_factory())


@pytest.mark.parametrize(
    ("number", "saves", "forks", "marks"),
    [
        ((0, 16), {}, True, False),
        ((0, 17), {"async_strategy": "mcore"}, False, False),
        ((0, 18), {"async_strategy": "mcore"}, False, False),
        ((0, 19), {"async_strategy": "mcore"}, False, True),
    ],
)
def test_each_difference_begins_with_its_release(
    number: tuple[int, int], saves: dict[str, str], forks: bool, marks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_versions, "release", lambda: number)
    assert (save_arguments(), writer_forks(), marks_cut_experts()) == (saves, forks, marks)


@pytest.mark.parametrize("triton", [None, object()])
def test_kernels_are_replaced_where_triton_is_missing(triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    monkeypatch.setattr(megatron_versions, "find_spec", {"triton": triton}.get)
    replace_triton_kernels()
    module = sys.modules.get(KERNELS)
    assert (module is not None) == (triton is None)
    if module is not None:
        names = {name for name in vars(module) if not name.startswith("__")}
        assert names == {"GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel"}
