"""The CPU-offloaded AdamW: steps by hand and against the literal algorithm, bucketing, order of copies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.config import OptimizerConfig
from bapo_megatron.policy import optimizer as host_optimizer
from bapo_megatron.policy.optimizer import HostAdamW, _Copies, _Shard, buckets_of, rank_threads


def shard(values: list[float], dtype: torch.dtype = torch.float32) -> _Shard:
    master = torch.tensor(values, dtype=torch.float32)
    return _Shard(master, master.to(dtype, copy=True))


def adam_of(shards: list[_Shard], decay: float = 0.0, **settings: Any) -> HostAdamW:
    config = OptimizerConfig(**settings)
    group = {"params": [s.master for s in shards], "lr": config.lr, "weight_decay": decay}
    return HostAdamW([group], {s.master: s for s in shards}, config)


def test_the_first_step_by_hand() -> None:
    """m = 0.1 g and v = 0.05 g^2, corrected to g and g^2: a step of lr g / (|g| + eps), after decay by
    1 - 0.1 x 0.5. 2 becomes 2 x 0.95 - 0.1 = 1.8, and -1 becomes -0.95 + 0.1 x 4 / (4 + 4) = -0.9."""
    one, other = shard([2.0]), shard([-1.0])
    one.grad, other.grad = torch.tensor([3e6]), torch.tensor([-4.0])
    adam = adam_of([one, other], decay=0.5, lr=0.1, eps=4.0)
    adam.step()
    assert one.weights.item() == pytest.approx(1.8, rel=1e-5)
    assert other.weights.item() == pytest.approx(-0.9, rel=1e-6)
    assert one.master.item() == one.weights.item()
    assert one.grad is None
    assert one.master.grad is None


@pytest.mark.parametrize("bucket", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_literal_adamw(bucket: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) in float64, five steps of parameters of all sizes."""
    monkeypatch.setattr(host_optimizer, "BUCKET", bucket)
    draws = np.random.default_rng(0)
    sizes = (3, 5, 1, 9, 2)
    shards = [shard(list(draws.normal(size=size)), dtype) for size in sizes]
    adam = adam_of(shards, decay=0.1, lr=0.05, beta1=0.9, beta2=0.95, eps=1e-3)
    weights = [s.master.double().numpy().copy() for s in shards]
    first, second = ([np.zeros(size) for size in sizes] for _ in range(2))
    for step in range(1, 6):
        for place, one in enumerate(shards):
            one.grad = torch.tensor(draws.normal(size=sizes[place]), dtype=torch.float32)
            g = one.grad.double().numpy()
            first[place] = 0.9 * first[place] + 0.1 * g
            second[place] = 0.95 * second[place] + 0.05 * g * g
            mean, spread = first[place] / (1 - 0.9**step), second[place] / (1 - 0.95**step)
            weights[place] *= 1 - 0.05 * 0.1
            weights[place] -= 0.05 * mean / (np.sqrt(spread) + 1e-3)
        adam.step()
    for one, expected in zip(shards, weights, strict=True):
        np.testing.assert_allclose(one.master.numpy(), expected, rtol=2e-6, atol=1e-7)
        assert torch.equal(one.weights, one.master.to(dtype))


def test_bucketing_by_hand() -> None:
    """At most 5 elements, or one shard that is larger; a type of weights each."""
    shards = [shard([0.0] * size) for size in (2, 3, 1, 9, 4)] + [shard([0.0], torch.bfloat16)]
    found = [[len(s.master) for s in bucket] for bucket in buckets_of(shards, 5)]
    assert found == [[2, 3], [1], [9], [4], [1]]


def test_a_type_has_buffers_as_large_as_its_largest_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third bucket would else be rounded in the first one's; and a few float32 weights beside those of a
    bfloat16 model, as hybrids have, pin no large buffer."""
    monkeypatch.setattr(host_optimizer, "BUCKET", 1)
    sizes = ((6, torch.bfloat16), (4, torch.bfloat16), (2, torch.float32), (1, torch.bfloat16))
    shards = [shard([1.000877] * size, dtype) for size, dtype in sizes]
    adam = adam_of(shards, lr=1e-4)
    for one in shards:
        one.grad = torch.ones(len(one.master))
    adam.step()
    for one in shards:
        assert torch.equal(one.weights, one.master.to(one.weights.dtype))
    buffers = {(key[0], key[2], buffer.numel()) for key, buffer in adam._copies._buffers.items()}
    assert {size for direction, _, size in buffers if direction == "fetch"} == {6}
    sent = {(dtype, size) for direction, dtype, size in buffers if direction == "send"}
    assert sent == {(torch.bfloat16, 6), (torch.float32, 2)}


class Machine:
    """A GPU's streams and events as a log of what was asked, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream_names = iter(("fetch", "send"))

    def stream(self) -> Any:
        machine, name = self, next(self.stream_names)

        class Event:
            def __init__(self, copy: int) -> None:
                self.copy = copy

            def synchronize(self) -> None:
                machine.log.append(f"wait {name} {self.copy}")

        class Stream:
            copies = 0

            def wait_stream(self, _other: Any) -> None:
                machine.log.append(f"{name} after current")

            def record_event(self) -> Event:
                self.copies += 1
                return Event(self.copies - 1)

        return Stream()

    @contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        self.log.append(f"copy {stream.copies}")
        yield


def test_no_buffer_is_used_before_its_last_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four buckets through two buffers a direction. Gradients are waited for before they are stepped; weights
    of bucket 2 before those of bucket 0 have left the buffer would overwrite them."""
    machine = Machine()
    current = type("Current", (), {"wait_stream": lambda *_: machine.log.append("current after send")})()
    monkeypatch.setattr(_Copies, "_new_stream", lambda _self: machine.stream())
    monkeypatch.setattr(torch.cuda, "stream", machine.inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    monkeypatch.setattr(host_optimizer, "BUCKET", 1)
    shards = [shard([1.0]) for _ in range(4)]
    adam = adam_of(shards, lr=0.1)
    for one in shards:
        one.grad = torch.ones(1)
    adam.step()
    assert machine.log == [
        *("fetch after current", "copy 0"),
        *("copy 1", "wait fetch 0", "copy 0"),
        *("copy 2", "wait fetch 1", "copy 1"),
        *("copy 3", "wait fetch 2", "wait send 0", "copy 2"),
        *("wait fetch 3", "wait send 1", "copy 3"),
        "current after send",
    ]
    assert all(math.isclose(one.weights.item(), 0.9, rel_tol=1e-5) for one in shards)


def test_thread_count_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 cores and 8 ranks: six each, for the step alone."""
    said: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", said.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(48)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with rank_threads():
        assert said == [6]
    assert said == [6, 1]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with rank_threads():
        assert said == [6, 1]
