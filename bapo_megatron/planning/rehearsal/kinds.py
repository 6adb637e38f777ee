"""Labels of the ledger's blocks: their kind of memory, and the module that made them.

A block is one allocated storage. Weights, gradients, optimizer state and the frozen reference are labelled by
``label_model_state``, after the build and after each update, the host copies of an offloaded policy by
``label_offloaded_state``. Saved activations and module names are recorded by hooks. Used by ``rank.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from bapo_megatron.planning.records import OFFLOADED, REFERENCE
from bapo_megatron.planning.rehearsal.fake.ledger import Ledger
from bapo_megatron.policy.megatron import MegatronPolicy


def label_model_state(ledger: Ledger, policy: MegatronPolicy) -> None:
    """Label the blocks of weights, gradients, optimizer states, and of the frozen reference on the host."""
    for block in policy._reference.host.blocks if policy._reference is not None else ():
        _mark(ledger, block, REFERENCE)
    for chunk in policy._model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            _mark(ledger, buffer.grad_data, "gradients")
            if buffer.param_data is not None:
                _mark(ledger, buffer.param_data, "weights")
        for parameter in chunk.parameters():
            _mark(ledger, parameter, "weights")
    for part in policy._optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                _mark(ledger, parameter, "optimizer")
                for value in part.optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor):
                        _mark(ledger, value, "optimizer")


def label_offloaded_state(ledger: Ledger, policy: MegatronPolicy) -> None:
    """Label the host copies of an offloaded policy."""
    for block in policy._offload.host.blocks:
        _mark(ledger, block, OFFLOADED)


def _mark(ledger: Ledger, tensor: Tensor, kind: str) -> None:
    block = ledger.block(tensor)
    if block is not None and not block.kind:
        block.kind = kind


class ModuleNames:
    """Stack of the modules in their forward pass, innermost last, such as ``decoder.layers.*.mlp``.

    ``watch`` registers hooks for all modules of the process; ``learn`` gives the names, once the model is
    built.
    """

    def __init__(self, running: list[str]) -> None:
        self._running = running
        self._names: dict[int, str] = {}

    def learn(self, chunks: list[Any]) -> None:
        """Read the module names of the model's chunks. Until then a module is named by its class."""
        for chunk in chunks:
            while hasattr(chunk, "module"):
                chunk = chunk.module
            for name, one in chunk.named_modules():
                self._names[id(one)] = re.sub(r"\.\d+(?=\.|$)", ".*", name)

    def watch(self) -> None:
        """Register forward hooks for all modules of this process."""
        torch_module.register_module_forward_pre_hook(self._enter)
        torch_module.register_module_forward_hook(self._leave, always_call=True)

    def _enter(self, one: torch.nn.Module, _inputs: Any) -> None:
        self._running.append(self._names.get(id(one)) or type(one).__name__)

    def _leave(self, _one: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()


@contextmanager
def marking_saved_activations(ledger: Ledger) -> Iterator[None]:
    """Context manager that labels the tensors which autograd saves for a backward pass."""

    def keep(tensor: Tensor) -> Tensor:
        block = ledger.block(tensor) if tensor.layout is torch.strided else None
        if block is not None:
            block.saved = True
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
