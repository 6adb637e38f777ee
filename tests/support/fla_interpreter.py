"""Program: errors of flash-linear-attention's kernels in triton's interpreter, on a CPU, as a line of JSON.

    TRITON_INTERPRET=1 python -m tests.support.fla_interpreter float32

The interpreter cannot time, so each kernel has the first of its configurations, and it makes Python's numbers
of loop indices, which the kernels convert (``.to``). A kernel that asks the bounds of a pack for its chunks
is an error: on a GPU it would wait.
"""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

from bapo_megatron.layers.delta_net import DeltaNet

KIND = DeltaNet(key_heads=1, value_heads=2, key_dim=32, value_dim=32, kernel=4)
LENGTHS = (65, 1, 20)
_plain = Autotuner.__init__


def _first_configuration(self: Any, fn: Any, names: Any, configs: Any, *others: Any, **named: Any) -> None:
    _plain(self, fn, names, configs[:1], *others, **named)


class Index(int):
    """A loop's index, as in a compiled kernel."""

    def to(self, _dtype: Any) -> Index:
        return self


def loop(*limits: Any) -> Iterator[Index]:
    """``range`` of indices that can be converted."""
    return map(Index, builtins.range(*map(int, limits)))


def no_chunks(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a kernel asks for the chunks of a pack, which it was given")


def main(dtype: str) -> None:
    Autotuner.__init__ = _first_configuration  # before the kernels are made
    import fla.modules.causal_conv1d
    import fla.ops.gated_delta_rule  # noqa: F401

    from bapo_megatron.policy.delta_net import kernel_rule
    from bapo_megatron.trainer.kernel_check import rule_errors

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            if name.startswith("fla.ops.common."):
                vars(module)["range"] = loop
            if hasattr(module, "prepare_chunk_indices"):
                module.prepare_chunk_indices = no_chunks
    print(json.dumps(rule_errors(kernel_rule, KIND, getattr(torch, dtype), torch.device("cpu"), LENGTHS)))


if __name__ == "__main__":
    main(sys.argv[1])
