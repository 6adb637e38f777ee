"""Verification of a weight sync on real SGLang servers: their tensor digests against the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from bapo_megatron.rollout.engines.sent_weights import DigestMismatch, SentCheck, SentDigests
from bapo_megatron.rollout.engines.sglang.fused_weights import fused_digests
from tests.support.tiers import slow_but

from .blocking import BlockingEngine
from .conftest import FAMILIES, LLAMA3_ROPE, Servers
from .references import tensors

MakeModel = Callable[..., Path]
Update = Callable[[Iterable[tuple[str, Tensor]], int], None]
LATER = "model.layers.1.self_attn."


def digests_of(weights: Iterable[tuple[str, Tensor]], model: Path) -> SentDigests:
    digester = fused_digests(model, 1, "cpu")
    for name, tensor in weights:
        digester.add(name, tensor)
    return digester.result()


def matches(engine: BlockingEngine, sent: SentDigests, check: SentCheck) -> bool:
    """Whether the engine's reported digests of its last weights match those sent."""
    return check.is_sent(sent, engine.engine.name, engine.digests[-1])


TRAINED_ROPE = {"original_max_position_embeddings": 8192}
"""The one that megatron-core has: the digests of a model that no policy can be are not computed."""


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen2"))
def test_every_tensor_digest_of_a_server_matches_the_sent_one(
    family: str, servers: Servers, make_model: MakeModel
) -> None:
    events: list[tuple[str, Any]] = []
    check = SentCheck(lambda kind, **fields: events.append((kind, fields)))
    more = {"rope_parameters": {**LLAMA3_ROPE, **TRAINED_ROPE}} if family == "llama3" else {}
    engine = servers.engine(make_model(family))  # as in test_broadcast.py: no weight depends on these
    for seed in (1, 2):
        new = make_model(family, seed, **more)
        engine.update_weights(tensors(new), seed)
        sent = digests_of(tensors(new), new)
        assert matches(engine, sent, check)
    ((kind, fields),) = events
    assert kind == "digests_compared", events
    assert fields["tensors"] == len(sent.ranks[0]) >= 15
    engine.close()


def test_a_server_with_one_old_tensor_is_detected_by_every_transport(
    servers: Servers, make_model: MakeModel
) -> None:
    """It is a single server: there is no other digest to compare. (By broadcast: test_broadcast.py.)"""
    engine = servers.engine(make_model("qwen2"))
    check = SentCheck(lambda kind, **fields: None)
    old, model = dict(tensors(make_model("qwen2", 1))), make_model("qwen2", 2)
    new = dict(tensors(model))
    sent = digests_of(new.items(), model)

    def wake(weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        engine.release_memory()
        engine.wake_by_handles(list(weights), version)

    ways: dict[str, Update] = {"disk": engine.update_weights, "ipc": wake}
    kept = {**new, (name := f"{LATER}o_proj.weight"): old[name]}
    for update in ways.values():
        update(new.items(), 1)
        assert matches(engine, sent, check)
        update(kept.items(), 2)
        with pytest.raises(DigestMismatch, match=rf"sent: other values in {LATER}o_proj\.weight on rank 0$"):
            matches(engine, sent, check)
    engine.close()
