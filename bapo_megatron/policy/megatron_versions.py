"""What differs between the releases of megatron-core, each with the release that it begins with.

A policy runs on those that setup.py permits; 0.16.1 and 0.19.2 are tested. The files of a checkpoint are in
``checkpoints_tools/formats/distcp.py``, which reads those of all releases by what is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_TRITON_KERNELS = "megatron.core.transformer.moe.ops.paged_stash"


def replace_triton_kernels() -> None:
    """Let megatron-core be imported where triton is not installed: beside a CPU build of torch. Idempotent.

    From 0.19 on the pipeline schedules import three names of kernels that a policy never calls.
    """
    if _TRITON_KERNELS not in sys.modules and find_spec("triton") is None:
        module: Any = ModuleType(_TRITON_KERNELS, "Stand-in without kernels: triton is not installed.")
        module.GLOBAL_BLOCK_SIZE = 1024
        module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None
        sys.modules[_TRITON_KERNELS] = module


@cache
def release() -> tuple[int, int]:
    """Major and minor version of the megatron-core that this process imports."""
    from megatron.core import __version__

    major, minor, *_ = __version__.split(".")
    return int(major), int(minor)


def save_arguments() -> dict[str, str]:
    """Further arguments of ``dist_checkpointing.save``: megatron-core's own writer.

    From 0.17 on the default is that of nvidia-resiliency-ext.
    """
    return {"async_strategy": "mcore"} if release() >= (0, 17) else {}


def writer_forks() -> bool:
    """Whether the writer of a checkpoint forks a process for each file; from 0.17 on it has threads."""
    return release() < (0, 17)


@contextmanager
def common_state(read: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A context in which ``dist_checkpointing.load`` takes the common state from ``read``.

    It yields further arguments of ``load``: before 0.17 a strategy reads the common state. From then on a
    function does, which is patched; from 0.19 on it is another one.
    """
    if release() < (0, 17):
        yield {"common_strategy": _common_strategy(read)}
        return
    from megatron.core.dist_checkpointing import serialization

    name = "load_common_state_dict" if release() >= (0, 19) else "load_common"
    usual = getattr(serialization, name)
    setattr(serialization, name, lambda _folder: read())
    try:
        yield {}
    finally:
        setattr(serialization, name, usual)


def _common_strategy(read: Callable[[], dict[str, Any]]) -> Any:
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    class CommonState(TorchCommonLoadStrategy):  # type: ignore[misc]
        def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
            return read()

    return CommonState()


def marks_cut_experts() -> bool:
    """Whether all weights of experts that ETP cuts are marked so, by which the gradient norm counts them.

    Before 0.19 those of Transformer Engine's layers are not, on Transformer Engine 2.20.
    """
    return release() >= (0, 19)


def split_tensor_factory() -> Callable[..., Any]:
    """megatron-core's function that stores sections of a tensor under keys of their own; it moved in 0.19."""
    name = "megatron.core.ssm.utils" if release() >= (0, 19) else "megatron.core.ssm.gated_delta_net"
    return import_module(name)._split_tensor_factory  # type: ignore[no-any-return]


def submodules_of(spec: Any) -> Any:
    """The submodules in the spec of an MLP or of experts, which is a partial call from 0.18 on."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


@cache
def activation(function: Callable[[Any], Any]) -> Any:
    """``function`` as an MLP's activation, which megatron-core wants as a module from 0.17 on, not before."""
    if release() < (0, 17):
        return function
    from torch.nn import Module

    class Activation(Module):
        def __init__(self, config: Any) -> None:
            super().__init__()

        def forward(self, stacked: Any) -> Any:
            return function(stacked)

    return Activation
