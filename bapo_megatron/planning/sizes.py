"""Sizes that follow from shape and layout: parameters of each stage, load of its experts, disk of a run.

A token's router makes K copies of it, one for each of its experts, which EP sends to the experts' ranks. How
many copies a rank gets depends on the routers. The flag ``--expert-imbalance`` says how many the busiest rank
gets, as a multiple of the mean, or ``--expert-routes`` measures it; all estimates and rehearsals are of that
rank. Used in ``planning/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np

from bapo_megatron.config import ParallelConfig, RunConfig
from bapo_megatron.config.transports import TRANSPORTS
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import mapping_table
from bapo_megatron.layers import Mapping
from bapo_megatron.policy.layout import stage_layers
from bapo_megatron.step_header import RouteShape

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_TOKEN_BYTES = 12
"""Bytes of a token in a step's file: its number, log-prob and version."""
TEACHER_BYTES = 4
"""Bytes of a teacher's log-prob, in a step's file and in a pack."""
_BAND = 1 << 16
"""Tokens of a file of routes that are in memory at a time."""


@dataclass(frozen=True)
class StageParameters:
    """Number of parameters on one GPU of a pipeline stage, after the cuts by TP, EP and ETP."""

    layers: int
    body: int
    """Parameters of the stage's layers without their experts, and of the final norm on the last stage."""
    experts: int
    """Parameters of the stage's experts that this rank of EP and ETP has."""
    embedding: int
    output: int
    """Parameters of the output layer on the last stage: with tied embeddings a copy, or 0 if the stage has
    the embedding itself."""

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def dense(self) -> int:
        """Parameters but for those of experts, which are sharded otherwise."""
        return self.body + self.embedding + self.output


def stage_parameters(shape: ModelShape, parallel: ParallelConfig, stage: int) -> StageParameters:
    """Parameters on one GPU of pipeline stage ``stage``: TP splits matrices, PP layers, EP x ETP experts."""
    per_layer, experts, embedding, norm = _pieces(shape, parallel.tensor)
    experts //= parallel.expert * parallel.expert_tensor
    layers = stage_layers(parallel, shape.layers)[stage]
    last = stage == parallel.pipeline - 1
    output = embedding if last and not (shape.tied and stage == 0) else 0
    body = layers * per_layer + norm * last
    return StageParameters(layers, body, layers * experts, embedding * (stage == 0), output)


def total_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model, tied embeddings counted once."""
    return stage_parameters(shape, ParallelConfig(), 0).total


def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token passes: of each layer's experts only its own."""
    total = total_parameters(shape)
    if shape.experts is None:
        return total
    experts = stage_parameters(shape, ParallelConfig(), 0).experts
    return total - experts // shape.experts.count * (shape.experts.count - shape.experts.per_token)


@lru_cache(maxsize=64)
def largest_parameter(shape: ModelShape) -> int:
    """Number of entries of the largest parameter, unsharded: a weight sync gathers one at a time."""
    return max(_entries(mapping) for mapping in mapping_table(shape).values())


def read_parameters(shape: ModelShape, tokens: float) -> float:
    """Parameters that a forward pass of ``tokens`` tokens reads: of E experts those that any of them takes.

    With K experts a token, all equally likely: E (1 - (1 - K / E)^tokens): for one token K.
    """
    total = total_parameters(shape)
    if shape.experts is None:
        return total
    experts = stage_parameters(shape, ParallelConfig(), 0).experts
    missed: float = (1 - shape.experts.per_token / shape.experts.count) ** tokens
    return total - experts * missed


@dataclass(frozen=True)
class ExpertLoad:
    """Load of one layer's experts, for each token of a pack on a CP rank."""

    routed: float
    """Tokens that a rank routes: 1 / TP, since sequence parallelism splits them."""
    copies: float
    """Copies of those: experts of a token x ``routed``."""
    rows: float
    """Copies that the busiest rank's experts process: x ETP, whose ranks have parts of the same experts, and
    x the imbalance."""
    local: int
    """Experts of a layer on one rank."""
    width: float
    """MLP width of an expert on a rank of ETP."""


def expert_load(shape: ModelShape, parallel: ParallelConfig, imbalance: float) -> ExpertLoad | None:
    """The load of a layer's experts; None for a model without experts."""
    if shape.experts is None:
        return None
    routed = 1 / (parallel.tensor if parallel.sequence else 1)
    copies = shape.experts.per_token * routed
    rows = copies * parallel.expert_tensor * rank_imbalance(parallel, imbalance)
    local, width = shape.experts.count // parallel.expert, shape.experts.ffn / parallel.expert_tensor
    return ExpertLoad(routed, copies, rows, local, width)


def rank_imbalance(parallel: ParallelConfig, imbalance: float) -> float:
    """Copies of the busiest rank of EP over the mean: 1 for EP 1, at most EP, which is all of them."""
    return min(imbalance, parallel.expert)


@lru_cache(maxsize=64)
def measured_imbalance(file: Path, shape: ModelShape, ranks: int) -> float:
    """Copies of the busiest of ``ranks`` ranks of EP over the mean, in the mean over the layers.

    ``file``: the routes of a step, [tokens, layers, experts of a token] (``data/routes.py``). ConfigError if
    it cannot be read, or is of another model.
    """
    assert shape.experts is not None
    experts = shape.experts
    try:
        routes_TLK = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--expert-routes {file}: it cannot be read: {error}; name the .routes.npy of a step, which lies "
            "in a run's folder of the journal"
        ) from None
    copies_LE = _copies_by_expert(routes_TLK, experts.count)
    if routes_TLK.shape[1:] != (shape.layers, experts.per_token) or copies_LE is None:
        raise ConfigError(
            f"--expert-routes {file}: an array {list(routes_TLK.shape)} of routes, but the model has "
            f"{shape.layers} layers and {experts.per_token} of {experts.count} experts of a token; name the "
            "routes of a run of this model"
        )
    by_rank = copies_LE.reshape(shape.layers, ranks, -1).sum(-1)
    return float(np.mean(by_rank.max(1) / by_rank.mean(1)))


def _copies_by_expert(routes_TLK: np.ndarray, experts: int) -> np.ndarray | None:
    """Copies of tokens of each layer's experts [layers, experts], read in bands; None if there are none, or
    some name an expert that does not exist. Tokens without a route do not count."""
    if routes_TLK.ndim != 3:
        return None
    counts = np.zeros((routes_TLK.shape[1], experts), np.int64)
    for begin in range(0, len(routes_TLK), _BAND):
        part = np.asarray(routes_TLK[begin : begin + _BAND])
        known = part[(part[:, 0] < experts).any(-1)]
        if known.size and known.max() >= experts:
            return None
        for layer in range(len(counts)):
            counts[layer] += np.bincount(known[:, layer].ravel(), minlength=experts)
    return counts if counts.any() else None


def run_folder_bytes(run: RunConfig, shape: ModelShape) -> float:
    """Disk size of a run directory at most, without rollouts and logs.

    A checkpoint has 12 bytes a parameter (master weight and two moments) and, in bfloat16, 2 more. There are
    the kept ones, and one more during a save. In addition the exports (one at the run's end), and the weights
    for SGLang: two versions with ``sync=disk``, one with ``sync=ipc``, which is read at a server's start.
    """
    kept, sglang = run.checkpoint, run.rollout.engine == "sglang"
    checkpoints = kept.keep_last or -(-run.steps // kept.every)
    checkpoints += kept.keep_best + (run.steps // kept.keep_every if kept.keep_every else 0)
    exports = 1 + (run.steps // kept.export_every if kept.export_every else 0)
    copies = exports + sglang * TRANSPORTS[run.rollout.engine_config.sync].folders
    weight = 4 if run.model.dtype == "float32" else 2
    state = 12 if run.model.dtype == "float32" else 14
    return float(total_parameters(shape) * (state * (checkpoints + 1) + weight * copies))


def steps_of_rollouts(run: RunConfig) -> int:
    """Steps whose rollouts are on disk at most: ``rollout.keep_steps``, and all since the oldest checkpoint.

    That may be of the run's beginning where ``keep_every`` or ``keep_best`` keeps one.
    """
    kept, steps = run.checkpoint, run.rollout.keep_steps
    if steps is None or kept.keep_every or kept.keep_best or not kept.keep_last:
        return run.steps
    return min(run.steps, max(steps, kept.keep_last * kept.every))


def rollout_bytes(run: RunConfig, shape: ModelShape, mean_response: float) -> float:
    """Disk size of the rollouts that a run keeps: 12 bytes for each token of a response, 4 more
    with a teacher, and with ``rollout.route_replay`` its routes, one or two bytes for each expert of each
    layer. A replay keeps none.

    Left out: segments of the responses that are not complete.
    """
    rollout, steps = run.rollout, steps_of_rollouts(run)
    if rollout.replay is not None:
        return 0.0
    token = _TOKEN_BYTES + TEACHER_BYTES * run.algorithm.distillation.enabled
    if shape.experts is not None and rollout.route_replay != "off":
        routes = RouteShape(shape.layers, shape.experts.per_token, shape.experts.count)
        token += routes.layers * routes.per_token * routes.dtype.itemsize
    return steps * rollout.prompts_per_step * rollout.group_size * mean_response * token


@lru_cache(maxsize=64)
def _pieces(shape: ModelShape, tensor: int) -> tuple[int, int, int, int]:
    """Parameters on one TP rank: of a layer without its experts, of the embedding, and of the final norm; in
    second place those of all experts of a layer, uncut."""
    layer = experts = embedding = norm = 0
    for name, mapping in mapping_table(shape).items():
        entries = _entries(mapping) // (1 if mapping.tp_dim is None or mapping.expert is not None else tensor)
        if mapping.expert is not None:
            experts += entries
        elif "{layer}" in name:
            layer += entries
        elif name == _EMBEDDING:
            embedding = entries
        elif name != _OUTPUT:
            norm += entries
    return layer, experts, embedding, norm


def _entries(mapping: Mapping) -> int:
    return sum(prod(shape) for shape in mapping.hf_shapes)
