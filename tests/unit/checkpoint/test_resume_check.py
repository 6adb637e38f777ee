"""The resume check: which differences between a checkpoint's fingerprint and the present one count."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.checkpoint import resume_check
from bapo_megatron.checkpoint.resume_check import Fingerprint, fingerprint_differences, state_fingerprint
from bapo_megatron.config import DataConfig, ModelConfig, RunConfig
from bapo_megatron.data.canary import CanarySpec, canary_sequences, with_token_indices
from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats
from bapo_megatron.types import PackLayout

TOKENS = 150
LOG_PROBS = np.random.default_rng(1).uniform(-20, -0.1, TOKENS)
STORED: Fingerprint = {
    "dtype": "bfloat16",
    "version": 8,
    "state": {"weights": ["aa"], "param": ["bb"], "exp_avg": ["cc"], "exp_avg_sq": ["dd"], "step": ["8"]},
    "canary": {"log_probs": LOG_PROBS.tolist()},
    "learning_rate": 1e-6,
    "sampler": {"taken": 10, "served": 4, "next_number": 12},
}


def config(dtype: str = "bfloat16", allow_change: tuple[str, ...] = ()) -> RunConfig:
    return RunConfig("test", ModelConfig(Path("m"), dtype), DataConfig(Path("d")), allow_change=allow_change)


def found(allow_change: tuple[str, ...] = (), dtype: str = "bfloat16", **changed: Any) -> dict[str, str]:
    return fingerprint_differences(config(dtype, allow_change), STORED, {**STORED, **changed})


def state(**changed: list[str]) -> dict[str, list[str]]:
    return {**STORED["state"], **changed}


def with_noise(scale: float, seed: int) -> dict[str, list[float]]:
    noise = np.random.default_rng(seed).normal(scale=scale, size=TOKENS)
    return {"log_probs": (LOG_PROBS + noise).tolist()}


def test_the_same_state_passes_and_the_sampler_may_be_ahead() -> None:
    assert found() == {}
    assert found(sampler={"taken": 11, "served": 5, "next_number": 12}) == {}


@pytest.mark.parametrize(
    ("changed", "name", "values"),
    [
        ({"version": 9}, "version", "8 in the checkpoint, 9 now"),
        ({"state": state(weights=["ab"])}, "weights", "weights aa in the checkpoint, ab now"),
        ({"state": state(weights=["aa", "ab"])}, "weights", "weights aa in the checkpoint, aa and ab now"),
        (
            {"state": state(exp_avg=["c0"], step=["7", "8"])},
            "optimizer",
            "exp_avg cc in the checkpoint, c0 now; step 8 in the checkpoint, 7 and 8 now",
        ),
        ({"learning_rate": 2e-6}, "learning_rate", "1e-06 in the checkpoint, 2e-06 now"),
        ({"sampler": {**STORED["sampler"], "served": 3}}, "sampler", "at least 4 in the checkpoint, 3 now"),
        ({"canary": {"log_probs": [float("nan"), *LOG_PROBS[1:]]}}, "canary", ""),
        ({"canary": {"log_probs": [*LOG_PROBS[1:]]}}, "canary", ""),
    ],
)
def test_each_difference_has_a_line(changed: dict[str, Any], name: str, values: str) -> None:
    assert list(told := found(**changed)) == [name]
    assert told[name].endswith(values)


def test_noise_of_bfloat16_passes_and_another_computation_does_not() -> None:
    """0.05 nats a token; twenty draws, since one could be lucky. The sum of such log-probs, each times a
    random sign, nearly cancels: a tolerance relative to it refuses good checkpoints.

    0.2 nats a token, or a bias of 0.15, are another temperature, position or norm.
    """
    for seed in range(20):
        assert found(canary=with_noise(0.05, seed)) == {}
        assert list(found(canary=with_noise(0.2, seed))) == ["canary"]
    assert list(found(canary={"log_probs": (LOG_PROBS - 0.15).tolist()})) == ["canary"]
    assert found(dtype="float32", canary=with_noise(1e-4, 0)) == {}
    told = found(dtype="float32", canary=with_noise(0.05, 0))
    assert "0.001 is the most that noise explains" in told["canary"]


def test_a_learning_rate_that_was_allowed_to_change_may_differ() -> None:
    assert found(("optimizer.lr",), learning_rate=2e-6) == {}
    # Of a decay that is stretched over more updates, as the message of check_same_run proposes.
    for name in ("steps", "algorithm.reuse_epochs", "algorithm.updates_per_epoch"):
        assert found((name,), learning_rate=2e-6) == {}, name
    assert list(found(("seed",), learning_rate=2e-6)) == ["learning_rate"]


def test_bits_of_weights_of_another_type_are_not_compared() -> None:
    assert found(dtype="float32", state=state(weights=["11"])) != {}
    now = {**STORED, "dtype": "float32", "state": state(weights=["11"])}
    assert fingerprint_differences(config("float32"), STORED, now) == {}
    now["state"] = state(weights=["11"], exp_avg=["12"])
    assert list(fingerprint_differences(config("float32"), STORED, now)) == ["optimizer"]


class FixedPolicy:
    """A policy whose log-prob of a token is -1 - 0.01 label, in float32."""

    version, learning_rate, pack_layout = 8, 1e-6, PackLayout()

    def token_sums(self, batches: list[MicroBatch], fn: TokenFn) -> torch.Tensor:
        return sum(fn(TokenStats(-1 - 0.01 * b.label_T, torch.zeros(b.label_T.shape)), b) for b in batches)

    def state_digest(self) -> dict[str, list[str]]:
        return STORED["state"]


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The canary of a vocabulary of 100 tokens."""
    sequences = canary_sequences(
        CanarySpec(seed=20, tokens=192, longest=64, vocab=100), config().algorithm.bounds
    )
    monkeypatch.setattr(resume_check, "_canary", lambda _config: sequences)
    monkeypatch.setattr(resume_check, "read_model_shape", lambda _folder: SimpleNamespace(experts=None))
    return sequences


def test_the_fingerprint_has_each_token_at_its_place(canary: list[Any]) -> None:
    """Whatever packs the tokens lie in: several here, in another order than the sequences'."""
    told = state_fingerprint(config(), FixedPolicy(), None)  # type: ignore[arg-type]
    labels = np.concatenate([s.token_ids[-s.response_tokens :] for s in with_token_indices(canary)])
    np.testing.assert_allclose(told["canary"]["log_probs"], -1 - 0.01 * labels, atol=1e-6)
    assert len(labels) > 100
    assert json.loads(json.dumps(told)) == told
    assert told["sampler"] == {"taken": 0, "served": 0, "next_number": 0}
