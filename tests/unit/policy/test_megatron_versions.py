"""The differences between releases of megatron-core, on both sides of each; slow tests run it on both."""

from __future__ import annotations

import sys
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common

from bapo_megatron.policy import megatron_versions
from bapo_megatron.policy.megatron_versions import (
    activation,
    common_state,
    marks_cut_experts,
    release,
    replace_triton_kernels,
    save_arguments,
    split_tensor_factory,
    submodules_of,
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


def test_the_common_state_is_read_by_ours_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in (((0, 18), "load_common"), ((0, 19), "load_common_state_dict")):
        monkeypatch.setattr(megatron_versions, "release", lambda number=number: number)
        theirs = object()
        monkeypatch.setattr(serialization, name, theirs, raising=False)
        with common_state(lambda: {"iteration": 5}) as arguments:
            assert arguments == {}
            assert getattr(serialization, name)("folder") == {"iteration": 5}
        assert getattr(serialization, name) is theirs
    monkeypatch.setattr(megatron_versions, "release", lambda: (0, 16))  # a strategy, which went with 0.17
    base = getattr(common, "TorchCommonLoadStrategy", object)
    monkeypatch.setattr(common, "TorchCommonLoadStrategy", base, raising=False)
    with common_state(lambda: {"iteration": 5}) as arguments:
        assert arguments["common_strategy"].load_common("folder") == {"iteration": 5}


def test_specs_of_mlps_are_read_in_both_forms() -> None:
    inner = SimpleNamespace()
    assert submodules_of(SimpleNamespace(submodules=inner)) is inner
    assert submodules_of(partial(print, submodules=inner)) is inner


def test_an_activation_is_a_function_or_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_versions, "release", lambda: (0, 16))
    assert activation.__wrapped__(torch.neg) is torch.neg
    monkeypatch.setattr(megatron_versions, "release", lambda: (0, 17))
    module = activation.__wrapped__(torch.neg)(config=None)
    assert isinstance(module, torch.nn.Module)
    assert not module.state_dict()
    assert module(torch.ones(1)) == -1
