"""What the device needs, said before a run begins."""

from __future__ import annotations

import pytest
import torch

from bapo_megatron.policy import device


def on_gpu(monkeypatch: pytest.MonkeyPatch, release: str, transformer_engine: bool) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(device, "uses_transformer_engine", lambda dtype: transformer_engine)
    monkeypatch.setattr(torch, "__version__", release)


@pytest.mark.parametrize(
    ("release", "transformer_engine", "dtype", "missing"),
    [
        ("2.10.1+cu130", False, "bfloat16", True),
        ("2.9.0a0+git12ab", False, "bfloat16", True),
        ("2.10.1+cu130", True, "bfloat16", False),
        ("2.10.1+cu130", False, "float32", False),
        ("2.11.0", False, "bfloat16", False),
        ("3.0.0", False, "bfloat16", False),
    ],
)
def test_attention_of_a_gpu(
    release: str, transformer_engine: bool, dtype: str, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, release, transformer_engine)
    problem = device.attention_problem(getattr(torch, dtype))
    assert (problem is not None) == missing
    if problem:
        assert release in problem
        assert "install transformer-engine[pytorch], or a newer torch" in problem


def test_transformer_engine_is_for_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    assert device.uses_transformer_engine(torch.bfloat16)
    assert not device.uses_transformer_engine(torch.float32)
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert not device.uses_transformer_engine(torch.bfloat16)


def test_a_cpu_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    assert device.attention_problem(torch.bfloat16) is None
