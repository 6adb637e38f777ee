"""``Policy.offload`` and ``reload``: updates, digests and checkpoints are those of a policy that stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.algo.bounds import search_bounds
from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy import offload
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.tensor_types import TokenStats
from tests.support.bapo_objective import loss_fn
from tests.support.layouts import layout
from tests.support.models import save_tiny_model
from tests.support.policies import weights_of
from tests.support.saves import complete
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

UPDATES = 3
BLOCK = 5000
"""Bytes of a block on the host: less than a parameter, so that copies are cut."""
Device = Literal["model", "cpu"]
Outcome = tuple[list[float], list[float], dict[str, list[str]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen2 has biases, and an output layer of its own; the embedding of llama is tied."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "llama"):
        save_tiny_model(family, folder / family)
    return folder


def build(folder: Path, text: str, dtype: str, device: Device, temperature: float = 1.0) -> MegatronPolicy:
    offload.BLOCK = BLOCK
    optimizer = OptimizerConfig(1e-2, warmup_updates=2, clip_grad=0.1, device=device)
    batch = BatchConfig(pack_tokens=96, logprob_chunk_tokens=40)
    return MegatronPolicy(ModelConfig(folder, dtype), layout(text).parallel, batch, optimizer, 8, temperature)


def update(policy: MegatronPolicy, samples: list[Sample]) -> tuple[float, float]:
    """The gradient's norm and the first metric of one update."""
    packs = pack_samples(samples, 96, "token", policy.pack_layout)
    loss = loss_fn(search_bounds(torch.zeros(2, dtype=torch.float64), grpo()), grpo(), 0)
    result = policy.update(packs, loss)
    return result.grad_norm, float(result.sums[0])


def log_probs(policy: MegatronPolicy, samples: list[Sample]) -> list[float]:
    packs = pack_samples(samples, 96, "token", policy.pack_layout)
    return [float(stats.log_prob_T.sum()) for stats in policy.log_probs(packs)]


def sample(policy: MegatronPolicy) -> None:
    """What happens to a policy while engines sample: they read its weights, then its memory is theirs."""
    weights = weights_of(policy)
    policy.offload(keep_weights=True)
    kept = {tensor.untyped_storage()._cdata for tensor in policy._weights.local.values()}
    for tensor in memory(policy):
        assert (tensor.untyped_storage().nbytes() == 0) != (tensor.untyped_storage()._cdata in kept)
    for name, tensor in policy.hf_weights():
        assert torch.equal(weights.pop(name), tensor)
    assert not weights
    policy.offload()
    for tensor in memory(policy):
        assert tensor.untyped_storage().nbytes() == 0
    assert not parallel_state.get_global_memory_buffer().buffer  # of sequence parallel layers
    policy.reload()
    for chunk in policy._model:
        for buffer in chunk.buffers:
            buffer.grad_data.fill_(float("nan"))


def memory(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Every tensor that should have no memory meanwhile, found without the code under test."""
    found = list(policy._weights.local.values())
    for chunk in policy._model:
        for buffer in chunk.buffers:
            found += [buffer.grad_data, *(bucket.param_data for bucket in buffer.buckets)]
        found += [one.main_grad for one in chunk.module.parameters()]
    for part in policy._optimizer.chained_optimizers:
        if hasattr(part.optimizer, "shards"):  # the masters are on the host already
            found += [shard.weights for shard in part.optimizer.shards]
            continue
        groups = [*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups, *part.shard_float16_groups]
        found += [master for group in groups for master in group if master is not None]
        found += [one for state in part.optimizer.state.values() for one in state.values()]
    return found


def outcome(
    folder: Path, samples: list[Sample], text: str, dtype: str, device: Device, away: bool
) -> Outcome:
    """Gradient norms and losses, log-probs, digests and weights of updates, offloaded between, or not."""
    policy = build(folder, text, dtype, device)
    metrics: list[float] = []
    for _ in range(UPDATES):
        if away:
            sample(policy)
        metrics += update(policy, samples)
    if away:
        sample(policy)
    found = log_probs(policy, samples)
    return metrics, found, policy.state_digest(), weights_of(policy)


CASES = [
    *(("dp2", "bfloat16", "model", "qwen2"), ("tp2-sp", "float32", "model", "llama")),
    *(("pp2-vpp2", "bfloat16", "cpu", "llama"), ("cp2", "bfloat16", "model", "llama")),
    *(("pp2", "float32", "model", "qwen2"), ("dp2-tp2-sp", "bfloat16", "cpu", "qwen2")),
]
"""Families alternate; pipeline stages have both, as llama's share its tied embedding."""


@pytest.mark.parametrize(("text", "dtype", "device", "family"), slow_but(CASES, *CASES[:3]), ids=str)
def test_updates_are_those_of_a_policy_that_stays(
    text: str, dtype: str, device: Device, family: str, models: Path, samples: list[Sample]
) -> None:
    """Bit for bit, from before the first update on, when there are no moments yet."""
    parallel, folder = layout(text).parallel, models / family
    stays = run_layout(outcome, parallel, folder, samples, text, dtype, device, False)
    moves = run_layout(outcome, parallel, folder, samples, text, dtype, device, True)
    for (metrics, found, digest, weights), (own, own_found, own_digest, own_weights) in zip(
        stays, moves, strict=True
    ):
        assert own == metrics
        assert own_found == found
        assert own_digest == digest
        assert digest["step"] == [str(UPDATES)]
        assert own_weights.keys() == weights.keys()
        assert all(torch.equal(own_weights[name], tensor) for name, tensor in weights.items())


def freed(
    folder: Path, samples: list[Sample], dtype: str, device: Device
) -> tuple[list[int], list[int], int]:
    """Bytes freed and bytes on the host: before the first update, after it, once more. The parameters."""
    policy = build(folder, "one", dtype, device)
    sizes, host = [], []
    for number in range(3):
        parts = [policy.offload(keep_weights=True) for _ in range(2 * (number == 1))]  # once in two parts
        assert parts[1:] == [0] * (number == 1)
        sizes += [sum(parts) + policy.offload(), policy.offload(), policy.offload(keep_weights=True)]
        policy.reload()
        policy.reload()
        host.append(sum(block.nbytes for block in policy._offload.host.blocks))
        update(policy, samples)
    return sizes, host, sum(buffer.numel for buffer in policy._model[0].buffers)


@pytest.mark.parametrize(
    ("dtype", "device", "first", "later"),
    [
        ("bfloat16", "model", 2 + 4 + 4, 2 + 4 + 4 + 8),
        ("bfloat16", "cpu", 2 + 4, 2 + 4),
        ("float32", "model", 4 + 4, 4 + 4 + 8),
    ],
)
def test_offload_frees_weights_gradients_masters_and_moments(
    dtype: str, device: Device, first: int, later: int, models: Path, samples: list[Sample]
) -> None:
    """Bytes of a parameter; before the first update there are no moments. Gradients are not on the host."""
    parallel = layout("one").parallel
    [(sizes, host, parameters)] = run_layout(freed, parallel, models / "qwen2", samples, dtype, device)
    assert sizes[1::3] == sizes[2::3] == [0, 0, 0]  # offloaded already
    assert sizes[::3] == pytest.approx([first * parameters, *[later * parameters] * 2], rel=0.02)
    assert host == pytest.approx([(size - 4 * parameters) for size in sizes[::3]], rel=0.2)
    assert host[1] == host[2]


def refusals(folder: Path, samples: list[Sample], path: Path) -> list[str]:
    policy = build(folder, "one", "bfloat16", "model")
    packs = pack_samples(samples, 96, "token", policy.pack_layout)

    def fn(stats: TokenStats, _part: Any) -> torch.Tensor:
        return stats.log_prob_T.sum()[None]

    calls: list[Callable[[], object]] = [
        *(lambda: update(policy, samples), lambda: policy.token_sums(packs, fn)),
        *(lambda: policy.log_probs(packs), policy.state_digest, policy.hf_weights),
        *(lambda: policy.save(path), lambda: policy.load(path, 1)),
    ]
    told = []
    for keep_weights in (False, True):
        policy.offload(keep_weights=keep_weights)
        for call in calls:
            if keep_weights and call == policy.hf_weights:
                assert len(dict(policy.hf_weights())) > 10
                continue
            with pytest.raises(RuntimeError, match="the policy is offloaded") as raised:
                call()
            told.append(str(raised.value))
        policy.reload()
    update(policy, samples)
    return told


def test_an_offloaded_policy_refuses_calls_that_need_its_weights(
    models: Path, samples: list[Sample], tmp_path: Path
) -> None:
    [told] = run_layout(refusals, layout("one").parallel, models / "qwen2", samples, tmp_path / "none")
    needs = ("update", "token_sums", "log_probs", "state_digest", "hf_weights", "save", "load")
    assert told[:7] == [f"{name}: the policy is offloaded; call reload() first" for name in needs]
    assert not (tmp_path / "none").exists()


class OutOfMemory(Exception):
    """Stands for torch's."""


def interrupted(folder: Path, samples: list[Sample]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Digests before an offload, and after a reload that fails at first: engines keep their memory."""
    policy = build(folder, "one", "bfloat16", "model")
    update(policy, samples)
    before = policy.state_digest()
    policy.offload()
    storages = policy._offload._copied
    policy._offload._copied = [*storages[:5], _Full(), *storages[5:]]  # type: ignore[list-item]
    with pytest.raises(OutOfMemory):
        policy.reload()
    with pytest.raises(RuntimeError, match="offloaded"):
        policy.state_digest()
    policy._offload._copied = storages
    policy.reload()
    return before, policy.state_digest()


class _Full:
    def untyped_storage(self) -> _Full:
        return self

    def numel(self) -> int:
        return 8

    def resize_(self, _size: int) -> None:
        raise OutOfMemory


def test_a_reload_that_found_no_memory_may_be_repeated(models: Path, samples: list[Sample]) -> None:
    [(before, after)] = run_layout(interrupted, layout("one").parallel, models / "qwen2", samples)
    assert before == after


class LateDevice:
    """A GPU's stream as the host sees it: copies that need not be waited for happen when it synchronizes.

    RuntimeError if memory is given up that such a copy would still read or write.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copies = 0
        self._copy, self._resize = torch.Tensor.copy_, torch.UntypedStorage.resize_

    def install(self) -> None:
        """Take the place of torch's functions in this process, for good."""
        device, tensor, storage = self, torch.Tensor, torch.UntypedStorage

        def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if not non_blocking:
                return device._copy(target, source)
            device.waiting.append((target, source))
            device.copies += 1
            return target

        def resize(given: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            busy = {one.untyped_storage()._cdata for pair in device.waiting for one in pair}
            if given._cdata in busy:
                raise RuntimeError("memory is given up before its copy is done")
            return device._resize(given, size)

        tensor.copy_, storage.resize_ = copy, resize  # type: ignore[method-assign,assignment]
        torch.cuda.synchronize = self.synchronize  # type: ignore[assignment]
        offload.has_cuda = lambda: True

    def synchronize(self) -> None:
        for target, source in self.waiting:
            self._copy(target, source)
        self.waiting.clear()


def on_a_late_device(folder: Path, samples: list[Sample]) -> tuple[Any, Any, int, list[int]]:
    """Digests before and after the policy was away; copies made, and those not done when a call returned."""
    policy = build(folder, "one", "bfloat16", "model")
    update(policy, samples)
    before = policy.state_digest()
    device = LateDevice()
    device.install()
    left = []
    for call in (lambda: policy.offload(keep_weights=True), policy.offload, policy.reload):
        call()
        left.append(len(device.waiting))
    return before, policy.state_digest(), device.copies, left


def test_gpu_memory_is_freed_after_its_copy_to_the_host(models: Path, samples: list[Sample]) -> None:
    """Weights, masters and moments go in two parts and come back; nothing waits for the next synchronize."""
    parallel = layout("one").parallel
    [(before, after, copies, left)] = run_layout(on_a_late_device, parallel, models / "qwen2", samples)
    assert after == before
    assert copies > 100
    assert left == [0, 0, 0]


Saved = tuple[dict[str, list[str]], dict[str, list[str]]]


def save(folder: Path, samples: list[Sample], text: str, dtype: str, device: Device, path: Path) -> Saved:
    """Digests at the moment of the save, and of the state after what happens while it is written."""
    policy = build(folder, text, dtype, device)
    sample(policy)
    update(policy, samples)
    digest = policy.state_digest()
    saving = policy.save(path)
    sample(policy)
    update(policy, samples)
    policy.offload()
    complete(saving)
    policy.reload()
    return digest, policy.state_digest()


def load(
    folder: Path, samples: list[Sample], text: str, dtype: str, device: Device, path: Path
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Digests after the load into a policy that was offloaded before, and after one more update."""
    policy = build(folder, text, dtype, device)
    sample(policy)
    policy.load(path, 1)
    digest = policy.state_digest()
    sample(policy)
    update(policy, samples)
    dist.barrier()
    return digest, policy.state_digest()


@pytest.mark.parametrize(
    ("text", "dtype", "device", "other"),
    slow_but(
        [
            *(("dp2", "float32", "model", "one"), ("dp2", "bfloat16", "cpu", "dp2")),
            ("dp2-tp2-sp", "bfloat16", "model", "dp2-tp2-sp"),
        ],
        ("dp2", "bfloat16", "cpu", "dp2"),
        ("dp2", "float32", "model", "one"),
    ),
    ids=str,
)
def test_a_checkpoint_is_of_the_moment_of_its_save(
    text: str, dtype: str, device: Device, other: str, models: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """While a fork writes it the policy is offloaded, loaded again, updated and offloaded once more."""
    path, folder = tmp_path / "checkpoint", models / "qwen2"
    saved = run_layout(save, layout(text).parallel, folder, samples, text, dtype, device, path)
    found = run_layout(load, layout(other).parallel, folder, samples, other, dtype, device, path)
    assert all(one == saved[0] for one in saved)
    assert all(digest == saved[0][0] for digest, _ in found)
    if other == text:
        assert all(after == saved[0][1] for _, after in found)
