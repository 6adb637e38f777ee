"""Errors of the sampler in the training loop: raised on every rank, after a save of what was trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.trainer import flow_control


@pytest.mark.parametrize(
    ("error", "step", "saved"),
    [
        (RunStopped("no engine"), 0, [0]),
        (RunStopped("no engine"), 7, [7]),
        (ConfigError("step_000008.npz is damaged"), 7, [7]),
        (ConfigError("step_000008.npz is damaged"), 5, [5]),
        (ConfigError("all scores of the first step failed"), 4, []),  # nothing was trained since the start
    ],
)
def test_an_error_of_the_sampler_ends_the_run_after_a_save(
    error: Exception, step: int, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    sent: list[Any] = []
    monkeypatch.setattr(flow_control, "stop_if_preempted", lambda *_: None)
    monkeypatch.setattr(flow_control, "finalize_checkpoint", lambda *_: None)
    monkeypatch.setattr(flow_control, "save_now", lambda _run, at: found.append(at))
    monkeypatch.setattr(flow_control, "broadcast_from_main", lambda one: sent.append(one) or one)

    def ask(_sampler: Any) -> Any:
        raise error

    with pytest.raises(type(error), match=str(error)):
        flow_control.wait_for_sampler(SimpleNamespace(sampler=object(), first_step=5), step, ask)  # type: ignore[arg-type]
    assert sent == [error], "the other ranks get it, too"
    assert found == saved
