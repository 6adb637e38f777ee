"""Differences between megatron-core releases: arguments and patches that the installed release needs.

A policy runs on the releases permitted by setup.py; 0.16.1 and 0.19.2 are tested. For checkpoint files,
``checkpoints_tools/formats/distcp.py`` detects the format of every release from the content.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_TRITON_KERNELS = "megatron.core.transformer.moe.ops.paged_stash"


def replace_triton_kernels() -> None:
    """Make megatron-core importable without triton, beside a CPU build of torch. Idempotent. From 0.19 on the
    pipeline schedules import three kernel names that a policy never uses."""
    if _TRITON_KERNELS not in sys.modules and find_spec("triton") is None:
        module: Any = ModuleType(_TRITON_KERNELS, "Stand-in without kernels: triton is not installed.")
        module.GLOBAL_BLOCK_SIZE = 1024
        module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None
        sys.modules[_TRITON_KERNELS] = module


@cache
def release() -> tuple[int, int]:
    """Major and minor version of the imported megatron-core."""
    from megatron.core import __version__

    major, minor, *_ = __version__.split(".")
    return int(major), int(minor)


def save_arguments() -> dict[str, str]:
    """Extra arguments of ``dist_checkpointing.save``: megatron-core's writer. From 0.17 on the default is
    nvidia-resiliency-ext's."""
    return {"async_strategy": "mcore"} if release() >= (0, 17) else {}


def writer_forks() -> bool:
    """Whether the checkpoint writer forks a process per file; from 0.17 on it uses threads."""
    return release() < (0, 17)


def marks_cut_experts() -> bool:
    """Whether megatron sets ``tensor_model_parallel`` on all ETP-sharded expert weights, by which the
    gradient norm counts them. Before 0.19 Transformer Engine's layers (2.20) lack it."""
    return release() >= (0, 19)


def split_tensor_factory() -> Callable[..., Any]:
    """megatron-core's function that stores sections of a tensor under separate keys; 0.19 moved it."""
    name = "megatron.core.ssm.utils" if release() >= (0, 19) else "megatron.core.ssm.gated_delta_net"
    return import_module(name)._split_tensor_factory  # type: ignore[no-any-return]


def submodules_of(spec: Any) -> Any:
    """The submodules in the spec of an MLP or experts, which is a partial call from 0.18 on."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


@cache
def activation(function: Callable[[Any], Any]) -> Any:
    """``function`` as an MLP activation; megatron-core expects a module from 0.17 on."""
    if release() < (0, 17):
        return function
    from torch.nn import Module

    class Activation(Module):
        def __init__(self, config: Any) -> None:
            super().__init__()

        def forward(self, stacked: Any) -> Any:
            return function(stacked)

    return Activation
