"""Program of one rank, one method per phase: build, update, weight sync, save, sampling, load.

The caller orders and measures the phases. The rehearsal runs them on fake tensors; tests run them on real
ranks to validate it. Packs are synthetic, the same at each call: random token ids, in sequences of the
recipe's greatest length and one that fills the rest, with teacher log-probs in a distillation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch.distributed as dist

from bapo_megatron.config import RunConfig
from bapo_megatron.config.transports import TRANSPORTS
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.hf.config import ModelShape, read_model_shape
from bapo_megatron.hf.reader import TensorReader
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.rollout.weight_sync.buckets import Buckets
from bapo_megatron.rollout.weight_sync.ipc import shareable
from bapo_megatron.step_header import RouteShape
from bapo_megatron.tensor_types import MicroBatch
from bapo_megatron.trainer.build import build_policy
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import PackLayout
from bapo_rehearsal.records import HAND_OVER, SAMPLE, SEARCH, UPDATE

_SHORTEST = 256
"""Minimum tokens in the rest of a pack for a sequence of its own."""


class RankProgram:
    """Phases of one rank, as methods; call ``build`` first. Process groups must exist. ``phase`` maps a phase
    name to the context manager in which the caller measures the phase."""

    def __init__(self, config: RunConfig, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        self._config, self._phase = config, phase
        self.policy: MegatronPolicy

    def build(self, reader: TensorReader) -> None:
        """Build the policy from ``reader``'s weights, and the frozen reference of the same shape."""
        with self._phase("build"):
            self.policy = build_policy(self._config, reader)
        if self._config.algorithm.reference_kl.enabled:
            with self._phase("load reference"):
                self.policy.load_reference(self._config.model.hf_path, reader)

    def packs(self, number: int) -> list[MicroBatch]:
        shape = read_model_shape(self._config.model.hf_path)
        return full_packs(self._config, self.policy.pack_layout, shape, number)

    def update(self, packs: list[MicroBatch], number: int) -> None:
        """Run update ``number``: log-probs of pi_old and reference (first only), search, optimizer step."""
        algorithm = self._config.algorithm
        update_loss = UpdateLoss(algorithm, self._config.batch.hold_forwards, self._config.data.source_names)
        if algorithm.old_log_probs == "trainer" and number == 1:
            with self._phase("old log-probs"):
                self.policy.log_probs(packs, trained_only=True)
        if algorithm.reference_kl.enabled and number == 1:
            with self._phase("reference log-probs"):
                self.policy.reference_log_probs(packs)
        with self._phase(f"{SEARCH} {number}"):
            loss = update_loss.loss(self.policy, packs, on_policy=False)
        with self._phase(f"{UPDATE} {number}"):
            self.policy.update(packs, loss)
        gc.collect()

    def weight_sync(self) -> None:
        """Gather weights; rank 0 also fills broadcast buckets."""
        engine = self._config.rollout.engine_config
        sends = dist.get_rank() == 0 and engine.sync == "broadcast"
        with self._phase("weight sync"):
            if not sends:
                for _name, tensor in self.policy.hf_weights():
                    del tensor
                return
            buckets = Buckets(int(engine.bucket_mb * 2**20), self.policy.device)
            for bucket in buckets.cut(self.policy.hf_weights()):
                del bucket
            buckets.release()

    def save(self, save: Callable[[MegatronPolicy], object]) -> object:
        with self._phase("save"):
            files = save(self.policy)
        gc.collect()
        return files

    def sample(self) -> None:
        """Colocated sampling: weight hand-over, policy offload and reload. Otherwise does nothing."""
        engine, offload = self._config.rollout.engine_config, self._config.parallel.offload
        if not engine.colocated:
            return
        if TRANSPORTS[engine.sync].reads_trainer_memory:
            self._hand_over_weights(int(engine.bucket_mb * 2**20), offload)
        if offload:
            with self._phase("offload"):
                self.policy.offload()
        with self._phase(SAMPLE):
            pass
        if offload:
            with self._phase("reload"):
                self.policy.reload()

    def _hand_over_weights(self, bucket: int, offload: bool) -> None:
        """Hand over weights by IPC, in buckets that colocated engines read; ``offload``: all other state."""
        if offload:
            with self._phase("set aside"):
                self.policy.offload(keep_weights=True)
        device = self.policy.device
        with self._phase(HAND_OVER):
            buckets = Buckets(bucket, device, partial(shareable, device=device))
            before = None
            for current in buckets.cut(self.policy.hf_weights()):
                before = current  # a server may still read it while the next bucket is filled
            del before, current
            buckets.release()

    def load(self, load: Callable[[MegatronPolicy], None]) -> None:
        with self._phase("load"):
            load(self.policy)


def message_shape(config: RunConfig, tokens: int, hidden: int) -> tuple[int, int, int]:
    """Shape [tokens / CP / SP, 1, hidden] of a pipeline message for a pack of ``tokens``."""
    p = config.parallel
    return (tokens // p.context // (p.tensor if p.sequence else 1), 1, hidden)


def full_packs(config: RunConfig, layout: PackLayout, shape: ModelShape, packs: int) -> list[MicroBatch]:
    """``packs`` full packs of this rank: sequences of the longest length, and one that fills the rest.

    All replicas have equal packs. Half of the advantages are negative. Routes are even. Raises ValueError if
    packing yields another number of packs.
    """
    lengths = sequence_lengths(config, layout.document_multiple)
    rng = np.random.default_rng(0)
    samples = [
        _sample(rng, length, config, shape, sign=1.0 if number % 2 else -1.0)
        for number in range(packs * layout.data_size)
        for length in lengths
    ]
    made = pack_samples(
        samples,
        config.batch.pack_tokens,
        config.algorithm.loss_mean,
        layout,
        config.rollout.max_response_tokens,
    )
    if len(made) != packs:
        raise ValueError(f"{packs} packs of {lengths} tokens became {len(made)}")
    return made


def sequence_lengths(config: RunConfig, multiple: int) -> list[int]:
    """Positions of each sequence in a full pack of ``batch.pack_tokens``."""
    tokens = config.batch.pack_tokens
    longest = min(config.longest_sequence, tokens) // multiple * multiple
    number, rest = divmod(tokens, longest)
    return [longest] * number + ([rest] if rest >= max(_SHORTEST, multiple) else [])


def even_routes(shape: ModelShape, tokens: int) -> np.ndarray | None:
    """Routes [tokens, layers, experts per token] with equal load on all experts; None without experts."""
    if shape.experts is None:
        return None
    stored = RouteShape(shape.layers, shape.experts.per_token, shape.experts.count)
    place = np.arange(tokens * stored.per_token).reshape(tokens, 1, stored.per_token)
    routes = np.broadcast_to(place % stored.experts, (tokens, stored.layers, stored.per_token))
    return np.ascontiguousarray(routes, dtype=stored.dtype)


def _sample(
    rng: np.random.Generator, length: int, config: RunConfig, shape: ModelShape, sign: float
) -> Sample:
    prompt = max(1, min(config.data.max_prompt_tokens // 8, length // 2))
    replay, taught = config.rollout.route_replay, config.algorithm.distillation.enabled
    response = length + 1 - prompt
    return Sample(
        token_ids=rng.integers(0, shape.vocab, length + 1).astype(np.int32),
        log_probs_R=np.full(response, -0.5, dtype=np.float32),
        versions_R=np.zeros(response, dtype=np.int32),
        advantage=sign,
        teacher_log_probs_R=np.full(response, -0.6, dtype=np.float32) if taught else None,
        routes_R=None if replay == "off" else even_routes(shape, length),
        replays_routes=replay == "replay",
    )
