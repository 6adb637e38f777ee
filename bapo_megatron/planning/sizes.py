"""Parameter counts of each pipeline stage, and disk size of a run, from the table of HF parameter names.

Used in this folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from bapo_megatron.config import ParallelConfig, RunConfig
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import Mapping, mapping_table
from bapo_megatron.policy.layout import stage_layers
from bapo_megatron.step_header import RouteShape

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_TOKEN_BYTES = 12
"""Bytes of a token in a step's file: its number, log-prob and version."""


@dataclass(frozen=True)
class StageParameters:
    """Number of parameters on one GPU of a pipeline stage, after the cuts by TP, EP and ETP.

    Made by ``stage_parameters``; the base of estimates of memory and traffic.
    """

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
        """Parameters of the GPU."""
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
    copies = exports + sglang * {"disk": 2, "ipc": 1}.get(run.rollout.engine_config.sync, 0)
    weight = 4 if run.model.dtype == "float32" else 2
    state = 12 if run.model.dtype == "float32" else 14
    return float(total_parameters(shape) * (state * (checkpoints + 1) + weight * copies))


def rollout_bytes(run: RunConfig, shape: ModelShape, mean_response: float) -> float:
    """Disk size of the rollouts that a run keeps: 12 bytes for each token of a response, and with
    ``rollout.route_replay`` its routes, one or two bytes for each expert of each layer. A replay keeps none.

    Left out: segments of the responses that are not complete.
    """
    rollout = run.rollout
    if rollout.replay is not None:
        return 0.0
    steps = run.steps if rollout.keep_steps is None else min(run.steps, rollout.keep_steps)
    token = _TOKEN_BYTES
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
