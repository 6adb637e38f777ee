"""The outbox of one target: what it holds, when it sends, what a later process begins with."""

from __future__ import annotations

from typing import Any

from bapo_megatron.runtime.event_sender import QUIET_S, Outbox
from bapo_megatron.runtime.event_targets import Refused


class Target:
    def __init__(self) -> None:
        self.is_dead = False
        self.refuses: str | None = None
        self.tried = 0
        self.taken: list[tuple[str, int, int]] = []

    def __call__(self, event: dict[str, Any], count: int) -> None:
        self.tried += 1
        if self.is_dead or event["kind"] == self.refuses:
            raise Refused("dead")
        self.taken.append((event["kind"], event["step"], count))


def event(kind: str, step: int = 1) -> dict[str, Any]:
    return {"kind": kind, "step": step}


def test_events_of_a_kind_are_sent_at_once_then_together() -> None:
    target = Target()
    box = Outbox(target)
    box.add(event("lost", 1), 0)
    assert box.deliver(0.0) is None
    for step in (2, 3, 4):
        box.add(event("lost", step), 100 * step)
    box.add(event("gap", 5), 500)
    box.deliver(QUIET_S - 1)
    assert target.taken == [("lost", 1, 1), ("gap", 5, 1)]
    assert box.position(600) == 200  # before the oldest that waits
    box.deliver(QUIET_S)
    assert target.taken[2:] == [("lost", 4, 3)]
    assert box.position(600) == 600


def test_the_end_of_a_run_does_not_wait_for_quiet() -> None:
    target = Target()
    box = Outbox(target)
    for step in (1, 2):
        box.add(event("lost", step), step)
        box.deliver(0.0, at_once=True)
    assert target.taken == [("lost", 1, 1), ("lost", 2, 1)]
    assert box.is_empty()


def test_a_dead_target_is_retried_with_backoff_and_reported_once() -> None:
    target = Target()
    target.is_dead = True
    box = Outbox(target)
    box.add(event("lost", 1), 7)
    assert box.deliver(0.0) == "dead"
    tried = []
    for now in range(1, 1000):
        before = target.tried
        assert box.deliver(float(now)) is None  # once told, it is not told again
        if target.tried > before:
            tried.append(now)
    assert tried == [5, 15, 35, 75, 155, 315, 615, 915]  # 5, 10, 20 ... 300 seconds apart
    box.add(event("lost", 2), 8)
    assert box.position(9) == 7
    target.is_dead = False
    box.deliver(2000.0)
    assert target.taken == [("lost", 2, 2)]
    target.is_dead = True
    box.add(event("lost", 3), 9)
    assert box.deliver(4000.0) == "dead"  # it had worked in between


def test_a_refused_message_does_not_block_others() -> None:
    target = Target()
    target.refuses = "lost"
    box = Outbox(target)
    box.add(event("lost"), 0)
    box.add(event("done"), 1)
    assert box.deliver(0.0) == "dead"
    assert target.taken == [("done", 1, 1)]
    assert box.position(2) == 0
