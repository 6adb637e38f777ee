"""``optimizer.device=cpu``: the updates, checkpoints and digests of an optimizer that is with the model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.algo.bounds import search_bounds
from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy import optimizer as host_optimizer
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.policy.optimizer import HostAdamW
from tests.support.bapo_objective import loss_fn
from tests.support.layouts import layout
from tests.support.models import EXPERTS, save_tiny_model
from tests.support.policies import weights_of
from tests.support.saves import complete
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

FEW = 300
"""Elements of a bucket: then each matrix of a tiny model is one."""
UPDATES = 3
Weights = dict[str, torch.Tensor]
Digests = dict[str, list[str]]
Outcome = tuple[list[float], Weights, int]


def build(folder: Path, text: str, dtype: str, device: str) -> MegatronPolicy:
    """A policy whose gradients are clipped, with a schedule and weight decay.

    Its eps is above every gradient, so that steps are proportional to them: with a small one the sign of a
    gradient that is nearly zero decides.
    """
    optimizer = OptimizerConfig(
        1.0,
        eps=1.0,
        warmup_updates=2,
        clip_grad=0.01,
        device=device,  # type: ignore[arg-type]
    )
    batch = BatchConfig(pack_tokens=96, logprob_chunk_tokens=40)
    return MegatronPolicy(ModelConfig(folder, dtype), layout(text).parallel, batch, optimizer, 8)


def train(policy: MegatronPolicy, samples: list[Sample], updates: int = UPDATES) -> list[float]:
    """The gradient norms of some updates."""
    packs = pack_samples(samples, 96, "token", policy.pack_layout)
    loss = loss_fn(search_bounds(torch.zeros(2, dtype=torch.float64), grpo()), grpo(), 0)
    return [policy.update(packs, loss).grad_norm for _ in range(updates)]


def outcome(
    folder: Path,
    samples: list[Sample],
    text: str,
    dtype: str,
    device: str,
    bucket: int,
    updates: int = UPDATES,
) -> Outcome:
    """Gradient norms and weights after the updates, and the number of buckets."""
    host_optimizer.BUCKET = bucket
    policy = build(folder, text, dtype, device)
    norms = train(policy, samples, updates)
    inner = [part.optimizer for part in policy._optimizer.chained_optimizers]
    buckets = sum(len(one._copies.buckets) for one in inner if isinstance(one, HostAdamW))
    return norms, weights_of(policy), buckets


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(EXPERTS, tmp_path_factory.mktemp("experts"))


LAYOUTS = {"float32": ("tp2-sp-cp2",), "bfloat16": ("pp2-vpp2",)}
QUICK = [(text, dtype) for text in ("one", "dp2-cp2") for dtype in LAYOUTS]
MORE = [(text, dtype) for dtype, texts in LAYOUTS.items() for text in texts]


@pytest.mark.parametrize(("text", "dtype"), slow_but([*QUICK, *MORE], *QUICK))
def test_updates_are_those_of_the_models_device(
    text: str, dtype: str, qwen2: Path, samples: list[Sample]
) -> None:
    check_updates(qwen2, samples, text, dtype)


EXPERT_LAYOUTS = [("dp4-ep2", "bfloat16"), ("tp2-sp-etp2", "float32"), ("dp2-pp2-ep2", "float32")]


@pytest.mark.parametrize(("text", "dtype"), slow_but(EXPERT_LAYOUTS, EXPERT_LAYOUTS[0]))
def test_updates_of_experts_are_those_of_the_models_device(
    text: str, dtype: str, experts: Path, samples: list[Sample]
) -> None:
    """Experts have an optimizer of their own in the chain, whose state other ranks share."""
    check_updates(experts, samples, text, dtype)


def outcomes(folder: Path, samples: list[Sample], text: str, dtype: str) -> tuple[Outcome, Outcome]:
    """With the model, and on the host, after two updates: the second steps from the state of the first."""
    plain, host = (outcome(folder, samples, text, dtype, device, FEW, 2) for device in ("model", "cpu"))
    return plain, host


def check_updates(folder: Path, samples: list[Sample], text: str, dtype: str) -> None:
    """Torch's fused AdamW rounds otherwise than its plain one, by the last bits."""
    found = run_layout(outcomes, layout(text).parallel, folder, samples, text, dtype)
    # One rounding of bfloat16, where the last bit of a master weight decides it.
    near = {"rtol": 2**-7, "atol": 1e-6} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-7}
    for (norms, weights, none), (host_norms, host_weights, buckets) in found:
        assert none == 0
        assert buckets > 2
        assert host_norms == pytest.approx(norms, rel=1e-3 if dtype == "bfloat16" else 1e-5)
        assert weights.keys() == host_weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(host_weights[name], tensor, **near)


def masters_alive(folder: Path) -> tuple[int, int]:
    """The masters that megatron made on the device, and how many of them are still there."""
    made: list[weakref.ref[torch.Tensor]] = []
    build_shard = host_optimizer._shard_of

    def noted(part: Any, parameter: torch.Tensor, master: torch.Tensor) -> Any:
        made.append(weakref.ref(master))
        return build_shard(part, parameter, master)

    host_optimizer._shard_of = noted
    policy = build(folder, "one", "bfloat16", "cpu")
    gc.collect()
    found = len(made), sum(one() is not None for one in made)
    del policy
    return found


def test_the_device_keeps_no_master(qwen2: Path) -> None:
    """Megatron holds its masters in several places."""
    [(made, alive)] = run_layout(masters_alive, layout("one").parallel, qwen2)
    assert made > 20
    assert alive == 0


def test_the_size_of_a_bucket_changes_no_bit(qwen2: Path, samples: list[Sample]) -> None:
    parallel = layout("dp2").parallel
    small = run_layout(outcome, parallel, qwen2, samples, "dp2", "bfloat16", "cpu", FEW)
    large = run_layout(outcome, parallel, qwen2, samples, "dp2", "bfloat16", "cpu", 2**26)
    for (norms, weights, many), (large_norms, large_weights, one) in zip(small, large, strict=True):
        assert many > one == 1
        assert norms == large_norms
        for name, tensor in weights.items():
            assert torch.equal(tensor, large_weights[name])


def as_with_transformer_engine() -> None:
    """Let megatron save and load as on a GPU's node, where FusedAdam counts its steps in its groups."""
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def save(
    folder: Path, samples: list[Sample], text: str, dtype: str, device: str, path: Path, te: bool = False
) -> Digests:
    policy = build(folder, text, dtype, device)
    if te:
        as_with_transformer_engine()
    train(policy, samples, 2)
    digests = policy.state_digest()
    saving = policy.save(path)
    train(policy, samples, 1)  # while the fork writes
    complete(saving)
    return digests


def load(
    folder: Path, samples: list[Sample], text: str, dtype: str, device: str, path: Path, te: bool = False
) -> tuple[Digests, list[float], Weights]:
    """The digests after the load, then one more update."""
    policy = build(folder, text, dtype, device)
    if te:
        as_with_transformer_engine()
    policy.load(path, 2)
    digests = policy.state_digest()
    norms = train(policy, samples, 1)
    dist.barrier()
    return digests, norms, weights_of(policy)


@pytest.fixture(scope="module")
def written(
    qwen2: Path, experts: Path, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, str, str], tuple[list[Digests], Path]]:
    """The digests of each rank and the checkpoint of a model, layout, type and device, each written once."""

    def write(family: str, text: str, dtype: str, device: str) -> tuple[list[Digests], Path]:
        path = tmp_path_factory.mktemp("written") / "checkpoint"
        folder = experts if family == EXPERTS else qwen2
        return run_layout(save, layout(text).parallel, folder, samples, text, dtype, device, path), path

    return cache(write)


MOVES = [
    ("qwen2", "bfloat16", ("dp2-cp2", "cpu"), ("tp2-pp2", "model")),
    (EXPERTS, "bfloat16", ("dp2-ep2", "cpu"), ("tp2-sp", "model")),
    ("qwen2", "bfloat16", ("tp2-sp-pp2", "model"), ("dp3", "cpu")),
    ("qwen2", "float32", ("one", "cpu"), ("dp3", "cpu")),
    (EXPERTS, "bfloat16", ("tp2-sp-etp2", "model"), ("dp2-ep2", "cpu")),
]


@pytest.mark.parametrize(("family", "dtype", "wrote", "reads"), slow_but(MOVES, *MOVES[:3]), ids=str)
def test_checkpoints_move_between_host_and_device(
    family: str,
    dtype: str,
    wrote: tuple[str, str],
    reads: tuple[str, str],
    qwen2: Path,
    experts: Path,
    samples: list[Sample],
    written: Callable[[str, str, str, str], tuple[list[Digests], Path]],
) -> None:
    """Every bit of weights, masters and moments comes back, at other layouts; training continued
    meanwhile."""
    (text, device), (other, onto) = wrote, reads
    saved, path = written(family, text, dtype, device)
    folder = experts if family == EXPERTS else qwen2
    found = run_layout(load, layout(other).parallel, folder, samples, other, dtype, onto, path)
    assert all(digests == saved[0] for digests in [*saved, *(one[0] for one in found)])
    assert saved[0]["step"] == ["2"]


@pytest.mark.parametrize(
    ("wrote", "reads", "dtype", "te"),
    slow_but(
        [
            *(("cpu", "cpu", "float32", False), ("cpu", "cpu", "bfloat16", True)),
            *(("cpu", "model", "bfloat16", True), ("model", "cpu", "bfloat16", True)),
        ],
        ("cpu", "cpu", "float32", False),
        ("cpu", "model", "bfloat16", True),
        ("model", "cpu", "bfloat16", True),
    ),
)
def test_a_loaded_state_is_what_the_next_update_steps_from(
    wrote: str, reads: str, dtype: str, te: bool, qwen2: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """Not the weights from before the load, nor their moments. With Transformer Engine (``te``) megatron
    saves and loads the count of steps of the groups alone."""
    path, parallel = tmp_path / "checkpoint", layout("one").parallel
    [digests] = run_layout(save, parallel, qwen2, samples, "one", dtype, wrote, path, te)
    [(loaded, norms, weights)] = run_layout(load, parallel, qwen2, samples, "one", dtype, reads, path, te)
    assert loaded == digests
    assert loaded["step"] == ["2"]
    [(all_norms, expected, _)] = run_layout(outcome, parallel, qwen2, samples, "one", dtype, wrote, 2**26)
    assert norms == all_norms[-1:]
    near = {"rtol": 2**-7, "atol": 1e-6} if te else {"rtol": 0.0, "atol": 0.0}
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], **near)
