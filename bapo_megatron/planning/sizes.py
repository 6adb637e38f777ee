"""Sizes derived from model shape and layout: parameters, expert load, bytes of a run directory.

``stage_parameters`` returns the parameters of one GPU, ``total_parameters`` the model's,
``measured_imbalance`` the expert load, ``run_folder_bytes`` and ``rollout_bytes`` the disk space of a run. A
router sends K copies of a token, one to each of its experts, over EP to the experts' ranks, so that the
number of copies differs between ranks. All estimates and rehearsals cover the busiest rank, whose multiple of
the mean is assumed (``--expert-imbalance``) or measured (``--expert-routes``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np

from bapo_megatron.config import ParallelConfig, RunConfig
from bapo_megatron.config.transports import TRANSPORTS
from bapo_megatron.data.prepare.options import SUITES
from bapo_megatron.data.problem_sets import suite_path
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import mapping_table
from bapo_megatron.layers import Kind, Mapping
from bapo_megatron.policy.layout import stage_kinds
from bapo_megatron.step_header import RouteShape

_TOKEN_BYTES = 12
"""Bytes per token in a step's file: token id, log-prob and version."""
_TEXT_BYTES = 5
"""Bytes per token of text in an evaluation's file: about four characters, some escaped."""
TEACHER_BYTES = 4
"""Bytes of a teacher's log-prob, in a step's file and in a pack."""
_BAND = 1 << 16
"""Tokens of a routes file in memory at a time."""


@dataclass(frozen=True)
class StageParameters:
    """Parameters on one GPU of a pipeline stage after TP, EP, ETP: layers, experts, vocabulary."""

    layers: int
    body: int
    """Parameters of the stage's layers without experts, plus the final norm on the last stage."""
    experts: int
    """Parameters of the stage's experts on this rank of EP and ETP."""
    vocabulary: int
    """Parameters of the embedding on the first stage, and of the output layer on the last: with tied
    embeddings a copy, none if the stage has the embedding itself."""

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def dense(self) -> int:
        """Parameters without experts, which are sharded differently."""
        return self.body + self.vocabulary


def stage_parameters(shape: ModelShape, parallel: ParallelConfig, stage: int) -> StageParameters:
    """Return the parameters on one GPU of ``stage``: TP splits matrices, PP layers, EP x ETP experts."""
    kinds = stage_kinds(parallel, shape)[stage]
    own = [(count, *_of_kind(kind, shape.hidden, parallel.tensor)) for kind, count in kinds.items()]
    last = stage == parallel.pipeline - 1
    matrices = (stage == 0) + (last and not (shape.tied and stage == 0))
    return StageParameters(
        layers=kinds.total() // 2,
        body=sum(count * body for count, body, _ in own) + shape.hidden * last,
        experts=sum(count * experts for count, _, experts in own)
        // (parallel.expert * parallel.expert_tensor),
        vocabulary=matrices * (shape.vocab * shape.hidden // parallel.tensor),
    )


def total_parameters(shape: ModelShape) -> int:
    """Return the whole model's parameters, tied embeddings counted once."""
    return stage_parameters(shape, ParallelConfig(), 0).total


def active_parameters(shape: ModelShape) -> int:
    """Return the parameters that one token uses: in each layer only its own experts."""
    return round(read_parameters(shape, 1))


@lru_cache(maxsize=64)
def largest_parameter(shape: ModelShape) -> int:
    """Return the entries of the largest parameter, unsharded; a weight sync gathers one at a time."""
    return max(_entries(mapping) for mapping in mapping_table(shape).values())


def read_parameters(shape: ModelShape, tokens: float) -> float:
    """Return the parameters read in a forward pass of ``tokens`` tokens: only experts that some token uses.
    With K of E experts per token, all equally likely: E (1 - (1 - K / E)^tokens); for one token K."""
    total = total_parameters(shape)
    if shape.experts is None:
        return total
    experts = stage_parameters(shape, ParallelConfig(), 0).experts
    missed: float = (1 - shape.experts.per_token / shape.experts.count) ** tokens
    return total - experts * missed


@lru_cache(maxsize=64)
def measured_imbalance(file: Path, shape: ModelShape, ranks: int) -> float:
    """Return the copies of the busiest of ``ranks`` EP ranks over the mean, averaged over layers. ``file``: a
    step's routes, [tokens, layers, experts of a token] (``data/routes.py``). Raises ConfigError if they are
    of another model."""
    assert shape.experts is not None
    experts = shape.experts
    routes_TLK = np.load(file, mmap_mode="r", allow_pickle=False)
    if routes_TLK.shape[1:] != (shape.layers, experts.per_token):
        raise ConfigError(
            f"--expert-routes {file}: an array {list(routes_TLK.shape)} of routes, but the model has "
            f"{shape.layers} layers and {experts.per_token} of {experts.count} experts of a token; name the "
            "routes of a run of this model"
        )
    by_rank = _copies_by_expert(routes_TLK, experts.count).reshape(shape.layers, ranks, -1).sum(-1)
    return float(np.mean(by_rank.max(1) / by_rank.mean(1)))


def _copies_by_expert(routes_TLK: np.ndarray, experts: int) -> np.ndarray:
    """Token copies by layer and expert [layers, experts], read in bands, of tokens with a route."""
    counts = np.zeros((routes_TLK.shape[1], experts), np.int64)
    for begin in range(0, len(routes_TLK), _BAND):
        part = np.asarray(routes_TLK[begin : begin + _BAND])
        known = part[(part[:, 0] < experts).any(-1)]
        for layer in range(len(counts)):
            counts[layer] += np.bincount(known[:, layer].ravel(), minlength=experts)
    return counts


def run_folder_bytes(run: RunConfig, shape: ModelShape) -> float:
    """Return an upper bound of a run directory's bytes, without rollouts and logs.

    A checkpoint has 12 bytes per parameter (master weight and two moments), in bfloat16 2 more. Counts the
    kept checkpoints, one more during a save, the exports (one at the end), and SGLang's weights: two versions
    with ``sync=disk``, one with ``sync=ipc``, for a server's start.
    """
    kept, sglang = run.checkpoint, run.rollout.engine == "sglang"
    checkpoints = kept.keep_last or -(-run.steps // kept.every)
    checkpoints += kept.keep_best + (run.steps // kept.keep_every if kept.keep_every else 0)
    exports = 1 + (run.steps // kept.export_every if kept.export_every else 0)
    copies = exports + sglang * TRANSPORTS[run.rollout.engine_config.sync].folders
    weight, state = (4, 12) if run.model.dtype == "float32" else (2, 14)
    return float(total_parameters(shape) * (state * (checkpoints + 1) + weight * copies))


def steps_of_rollouts(run: RunConfig) -> int:
    """Return the maximum number of steps with rollouts on disk: ``rollout.keep_steps``, and all since the
    oldest checkpoint, which ``keep_every`` or ``keep_best`` may keep from the start."""
    kept, steps = run.checkpoint, run.rollout.keep_steps
    if steps is None or kept.keep_every or kept.keep_best or not kept.keep_last:
        return run.steps
    return min(run.steps, max(steps, kept.keep_last * kept.every))


def rollout_bytes(run: RunConfig, shape: ModelShape, mean_response: float) -> float:
    """Return bytes of the rollouts that a run keeps: 12 per response token, 4 more with a teacher, and with
    ``rollout.route_replay`` one or two per expert and layer. A replay keeps none.

    Not counted: segments of incomplete responses.
    """
    rollout, steps = run.rollout, steps_of_rollouts(run)
    if rollout.replay is not None:
        return 0.0
    token = _TOKEN_BYTES + TEACHER_BYTES * run.algorithm.distillation.enabled
    if shape.experts is not None and rollout.route_replay != "off":
        routes = RouteShape(shape.layers, shape.experts.per_token, shape.experts.count)
        token += routes.layers * routes.per_token * routes.dtype.itemsize
    return steps * rollout.prompts_per_step * rollout.group_size * mean_response * token


def evaluation_bytes(run: RunConfig, mean_response: float) -> float:
    """Return bytes of the held-out responses that a run keeps: of the steps whose rollouts it keeps.
    Unreadable suites count as none: the run's own check reports them."""
    asked = run.evaluation
    if not asked.every or run.rollout.replay is not None:
        return 0.0
    kept = 1 + steps_of_rollouts(run) // asked.every
    tokens = min(mean_response, run.evaluation_sampling[1])
    return kept * sum(map(_problems, asked.suites)) * asked.samples * tokens * _TEXT_BYTES


def _problems(suite: str) -> int:
    try:
        with suite_path(suite, SUITES).open("rb") as file:
            return sum(not line.isspace() for line in file)
    except (ConfigError, OSError):
        return 0


@lru_cache(maxsize=256)
def _of_kind(kind: Kind, hidden: int, tensor: int) -> tuple[int, int]:
    """Return a layer kind's parameters on one TP rank without experts, and of all experts, unsplit."""
    own = experts = 0
    for mapping in kind.parameters(hidden).values():
        if mapping.expert is not None:
            experts += _entries(mapping)
        else:
            own += _entries(mapping) // (1 if mapping.tp_dim is None else tensor)
    return own, experts


def _entries(mapping: Mapping) -> int:
    return sum(prod(shape) for shape in mapping.hf_shapes)
