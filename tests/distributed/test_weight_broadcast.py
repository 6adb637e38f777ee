"""The sending side of a weight broadcast, against receivers that do what a server does and nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.rollout.weight_sync.broadcast import BroadcastError, WeightBroadcast
from bapo_megatron.types import BroadcastGroup, BucketSpec
from benchmarks.receiver import ReceiverProcess
from tests.support.tiers import slow_but

pytestmark = pytest.mark.distributed

TIMEOUT_S = 300.0
"""Nobody waits so long, unless somebody is missing."""
SHORT_S = 10.0
"""For tests in which somebody is."""
BUCKET_MB = 1.0


@pytest.fixture
def start() -> Iterator[Callable[[int], list[ReceiverProcess]]]:
    started: list[ReceiverProcess] = []

    def some(count: int) -> list[ReceiverProcess]:
        started.extend(ReceiverProcess(keep=True, method="fork") for _ in range(count))
        return started[-count:]

    yield some
    for receiver in started:
        receiver.process.kill()


@pytest.fixture
def sender() -> Iterator[WeightBroadcast]:
    found = WeightBroadcast(torch.device("cpu"), bucket_mb=BUCKET_MB, timeout_s=TIMEOUT_S)
    yield found
    found.close()


@pytest.fixture
def impatient() -> Iterator[WeightBroadcast]:
    found = WeightBroadcast(torch.device("cpu"), bucket_mb=BUCKET_MB, timeout_s=SHORT_S)
    yield found
    found.close()


def together(futures: list[Future[Any]]) -> Future[list[Any]]:
    """All of their results, or the first error."""
    found: Future[list[Any]] = Future()
    left = len(futures)

    def one_done(one: Future[Any]) -> None:
        nonlocal left
        left -= 1
        if found.done():
            return
        if error := one.exception():
            found.set_exception(error)
        elif not left:
            found.set_result([future.result() for future in futures])

    for future in futures:
        future.add_done_callback(one_done)
    return found


def join(receivers: list[ReceiverProcess]) -> Callable[[BroadcastGroup], Future[list[None]]]:
    return lambda place: together([one.join(place, rank) for rank, one in enumerate(receivers, 1)])


def receive(receivers: list[ReceiverProcess]) -> Callable[[BucketSpec], Future[list[None]]]:
    return lambda bucket: together([one.receive(bucket) for one in receivers])


def some_weights(count: int = 6) -> list[tuple[str, Tensor]]:
    """Of 0.8 MB each, one in bfloat16, and one that is larger than a bucket."""
    torch.manual_seed(0)
    small = [(str(n), torch.randn(400, 500)) for n in range(count)]
    return [*small, ("half", torch.randn(800, 500).bfloat16()), ("large", torch.randn(1000, 1000)), small[0]]


def assert_received(receiver: ReceiverProcess, weights: list[tuple[str, Tensor]]) -> None:
    found = receiver.weights().result(timeout=600)
    assert found.keys() == dict(weights).keys()
    for name, tensor in weights:
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_every_receiver_gets_every_byte(start: Any, sender: WeightBroadcast) -> None:
    receivers = start(3)
    sender.open(3, join(receivers))
    weights = some_weights()
    for _ in range(2):
        sender.send(iter(weights), receive(receivers))
        for receiver in receivers:
            assert_received(receiver, weights)


def test_a_tensor_is_not_used_after_the_iterator_has_moved_on(start: Any, sender: WeightBroadcast) -> None:
    """As when each is gathered into the same memory; small ones, and one that travels without a copy."""
    receivers = start(2)
    sender.open(2, join(receivers))
    memory = torch.empty(1_000_000)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number in range(12):
            count = 1_000_000 if number % 4 == 0 else 200_000
            yield str(number), memory[:count].fill_(number)

    sender.send(weights(), receive(receivers))
    for receiver in receivers:
        found = receiver.weights().result(timeout=600)
        for number in range(12):
            assert found[str(number)].unique().tolist() == [number]


def test_the_next_bucket_is_gathered_while_one_is_sent(start: Any, sender: WeightBroadcast) -> None:
    """A bucket is held up until the iterator was asked for tensors of the next but one."""
    [receiver] = start(1)
    sender.open(1, join([receiver]))
    asked: list[str] = []
    told: list[int] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in some_weights()[:4]:
            asked.append(name)
            yield name, tensor

    def on_bucket(bucket: BucketSpec) -> Future[None]:
        told.append(len(asked))
        return receiver.receive(bucket)

    sender.send(weights(), on_bucket)
    # Each bucket is one tensor, and is closed by the one that does not fit.
    assert told == [2, 3, 4, 4]


@pytest.mark.parametrize(
    ("number", "lost"),
    slow_but(
        [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGKILL, 0), (signal.SIGKILL, 2)],
        (signal.SIGKILL, 1),
        (signal.SIGSTOP, 1),
    ),
)
def test_a_receiver_is_lost(number: int, lost: int, start: Any, impatient: WeightBroadcast) -> None:
    """Whichever it is: gloo sends along a tree, in which receivers pass data on."""
    receivers, sender = start(3), impatient
    sender.open(3, join(receivers))
    taken: list[str] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in some_weights(40):
            if name == "4":
                os.kill(receivers[lost].process.pid, number)
            taken.append(name)
            yield name, tensor

    began = time.monotonic()
    with pytest.raises(BroadcastError, match="the servers: .*; the broadcast: "):
        sender.send(weights(), receive(receivers))
    assert time.monotonic() - began < 20 * SHORT_S
    assert taken[-1] == "0"  # the last of them: other ranks take part in the gathering to its end
    assert len(taken) == 43

    receivers[lost].process.kill()
    rest = [one for one in receivers if one is not receivers[lost]]
    for one in rest:
        one.leave().result(timeout=TIMEOUT_S)
        one.weights().result(timeout=TIMEOUT_S)
    sender.open(2, join(rest))
    weights_again = some_weights()
    sender.send(iter(weights_again), receive(rest))
    for one in rest:
        assert_received(one, weights_again)


def test_a_refusal_ends_the_wait_at_once(start: Any, sender: WeightBroadcast) -> None:
    """The server says no, and takes nothing: the broadcast alone would wait for its deadline."""
    receivers = start(1)
    sender.open(1, join(receivers))

    def refuse(_bucket: BucketSpec) -> Future[None]:
        refused: Future[None] = Future()
        refused.set_exception(RuntimeError("server A has no such tensor"))
        return refused

    began = time.monotonic()
    with pytest.raises(BroadcastError, match="server A has no such tensor"):
        sender.send(iter([("a", torch.zeros(40_000_000))]), refuse)
    assert time.monotonic() - began < TIMEOUT_S
    with pytest.raises(BroadcastError, match="open one first"):
        sender.send(iter([]), refuse)


def test_an_error_of_the_caller_is_not_hidden(start: Any, sender: WeightBroadcast) -> None:
    receivers = start(1)
    sender.open(1, join(receivers))

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield from some_weights()
        raise KeyError("no counterpart")

    with pytest.raises(KeyError, match="no counterpart"):
        sender.send(weights(), receive(receivers))
    assert not sender.is_open


def test_a_receiver_that_never_joins(start: Any, impatient: WeightBroadcast) -> None:
    receivers, sender = start(1), impatient
    began = time.monotonic()
    with pytest.raises(BroadcastError, match="the servers: not done in time; the group: "):
        sender.open(2, join(receivers))
    assert time.monotonic() - began < 20 * SHORT_S
    assert not sender.is_open


def test_an_address_that_is_not_this_machine() -> None:
    sender = WeightBroadcast(torch.device("cpu"), address="no.such.host.invalid", timeout_s=2)
    with pytest.raises(RuntimeError, match=r"cannot listen at no\.such\.host\.invalid"):
        sender.open(1, lambda _place: Future())
