"""CPU mode: what megatron asks of a GPU, a rank without one gets on the CPU, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

from bapo_megatron.config import ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.policy import device
from tests.support.models import HYBRID, random_samples, save_tiny_model
from tests.support.policies import small_policy
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
LIKE = torch.ones(2, 3)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "empty": (2, 3),
    "zeros_like": (LIKE,),
    "tensor": ([1.0, 2.0],),
    "arange": (3,),
    "full": ((2, 3), 1.0),
}
ALIKE: dict[str, tuple[Any, ...]] = {"new_empty": ((2, 3),), "new_tensor": ([1.0],)}
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "cuda": lambda tensor: tensor.cuda(),
    "cuda by number": lambda tensor: tensor.cuda(0, non_blocking=True),
    "to a device": lambda tensor: tensor.to(torch.device("cuda", 0), torch.float64),
    "to a keyword": lambda tensor: tensor.to(device="cuda:0", dtype=torch.float64),
    "to another's": lambda tensor: tensor.to(LIKE),
    "to a type": lambda tensor: tensor.to(torch.float64),
    "a module's": lambda tensor: torch.nn.Linear(2, 3, device="cuda").to("cuda").cuda().weight,
}


taken_before = torch.empty
"""As a default argument of megatron's, which is bound before the mode is on."""


def on_cuda() -> dict[str, tuple[str, bool]]:
    """The device of what each function makes or moves, and whether it is pinned."""
    made = {name: getattr(torch, name)(*given, device="cuda") for name, given in ARGUMENTS.items()}
    made |= {name: getattr(LIKE, name)(*given, device="cuda:0") for name, given in ALIKE.items()}
    made |= {name: move(LIKE) for name, move in MOVES.items()}
    made["taken before"] = taken_before(2, device="cuda")
    made["pinned"] = torch.empty(2, pin_memory=True)
    return {name: (tensor.device.type, tensor.is_pinned()) for name, tensor in made.items()}


def names_of_types() -> tuple[object, ...]:
    device.cpu_mode()  # again: it changes nothing twice
    half = LIKE.to(torch.bfloat16)
    stays = LIKE.cuda() is LIKE and LIKE.to("cuda") is LIKE
    return LIKE.type(), half.type(), LIKE.type(torch.float64).dtype, LIKE.to(half).dtype, stays


@WITHOUT_GPU
def test_a_cuda_device_is_the_cpu() -> None:
    [found] = run_layout(on_cuda, ParallelConfig())
    assert found == dict.fromkeys([*ARGUMENTS, *ALIKE, *MOVES, "taken before", "pinned"], ("cpu", False))


@WITHOUT_GPU
def test_types_go_by_the_names_of_a_gpu() -> None:
    """The distributed optimizer tells dtypes apart by them; conversions stay, and moves copy nothing."""
    [found] = run_layout(names_of_types, ParallelConfig())
    expected = ("torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", torch.float64, torch.bfloat16, True)
    assert found == expected


def compilations(folder: Path) -> dict[str, int]:
    """What torch.compile counts of a hybrid's log-probs: megatron-core decorates its output gate."""
    policy = small_policy(folder)
    policy.log_probs(pack_samples(random_samples(2), 96, "token", policy.pack_layout))
    return dict(torch._dynamo.utils.counters["stats"])


@WITHOUT_GPU
def test_nothing_is_compiled(tmp_path: Path) -> None:
    """It took ten seconds of every process."""
    folder = save_tiny_model(HYBRID, tmp_path / "model")
    assert run_layout(compilations, ParallelConfig(), folder) == [{}]
