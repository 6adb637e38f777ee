"""Sharded optimizer state in checkpoints: each DP x CP rank writes and reads its share of whole parameters.

``shard_over_ranks`` patches a ``DistributedOptimizer`` to do so; ``checkpoint.py`` calls it.

Megatron's distributed optimizer flattens all parameters into buckets and cuts each bucket into equal ranges,
one per DP x CP rank (expert-DP rank for experts). A checkpoint (``fully_reshardable``) holds whole
parameters: megatron gathers all state in every rank's host memory (12 bytes a parameter, plus copies), and
one rank writes it. Here each parameter has an owner, the rank whose range holds its middle. An all-to-all
sends the owner the pieces from other ranges (a range cuts at most two parameters), and the owner writes the
parameter. Keys, shapes and dtypes in the files are megatron's: each reader can read the other's files.

With D ranks in DP x CP a rank holds, writes and reads about 12 P / D bytes for P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

STATES = ("param", "exp_avg", "exp_avg_sq")
"""Master weight, first moment, second moment: float32, by megatron's names."""


@dataclass(frozen=True)
class Piece:
    """Part of a flattened parameter in one rank's range: DP x CP rank, first element, end element."""

    rank: int
    first: int
    end: int


@dataclass(frozen=True)
class Placement:
    """Distribution of one parameter's optimizer state: its pieces on DP x CP ranks, and the owner rank, which
    writes the whole state."""

    number: int
    """Index among megatron's parameters: the key of its state in a state dict."""
    parameter: torch.nn.Parameter
    pieces: tuple[Piece, ...]
    """The pieces in order, without gaps."""
    owner: int

    def of(self, rank: int) -> Piece | None:
        """The piece on ``rank``, or None."""
        return next((piece for piece in self.pieces if piece.rank == rank), None)


def placements(optimizer: Any) -> Iterator[Placement]:
    """Yield a ``DistributedOptimizer``'s placements, in state-dict order, equal on every rank."""
    number = 0
    for buffer in optimizer.buffers:
        for parameter, (start, end, bucket_number) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_number]
            size = bucket.grad_data.numel() // buffer.data_parallel_group.size()
            pieces = cut(start - bucket.offset, end - bucket.offset, size)
            owner = ((start + end) // 2 - bucket.offset) // size
            yield Placement(number, parameter, pieces, owner)
            number += 1


def cut(start: int, end: int, size: int) -> tuple[Piece, ...]:
    """The pieces of a bucket's elements ``start`` to ``end``; ``size``: elements of the bucket per rank."""
    return tuple(
        Piece(rank, max(start, rank * size) - start, min(end, (rank + 1) * size) - start)
        for rank in range(start // size, (end - 1) // size + 1)
    )


def shard_over_ranks(optimizer: Any) -> None:
    """Patch a ``DistributedOptimizer`` to shard its state over the ranks instead of megatron's gather."""
    optimizer.sharded_param_state_fully_reshardable = partial(_sharded_state, optimizer)


def _sharded_state(
    optimizer: Any, model_state: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> Any:
    """This rank's sharded state: its own parameters (save), or those with a piece here (load). Collective."""
    del metadata
    shards = shards_of_parameters(model_state)
    tensors = _load_buffers(optimizer) if is_loading else _owned_states(optimizer)
    rank = optimizer.data_parallel_group.rank()
    by_number: dict[int, dict[str, Any]] = {}
    for placement, name, tensor in tensors:
        copy = 0 if placement.owner == rank else 1 + rank
        shard = shard_of_state(shards[placement.parameter], name, tensor, copy)
        by_number.setdefault(placement.number, {})[name] = shard
    return by_number or LocalNonpersistentObject(None)


def shard_of_state(parameter: Any, name: str, tensor: Tensor, copy: int) -> Any:
    """The ``ShardedTensor`` of one of the ``STATES``, like its parameter's. Only ``copy`` 0 is written."""
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{name}.{parameter.key}",
        "data": tensor.view(parameter.data.shape),
        "replica_id": (*parameter.replica_id[:2], copy),
    }
    if not isinstance(parameter, ShardedTensorFactory):
        changes["dtype"] = tensor.dtype
    return replace(parameter, **changes)


def shards_of_parameters(model_state: dict[str, Any]) -> dict[torch.nn.Parameter, Any]:
    """The ``ShardedTensor`` of each parameter, from the model's sharded state dict."""
    shards, _ = extract_sharded_tensors_and_factories(model_state)
    return {shard.data: shard for shard in nested_values(shards)}


def _load_buffers(optimizer: Any) -> Iterator[tuple[Placement, str, Tensor]]:
    rank = optimizer.data_parallel_group.rank()
    for placement in placements(optimizer):
        if placement.of(rank):
            for name in STATES:
                buffer = torch.empty(placement.parameter.numel(), dtype=torch.float32, device="cpu")
                yield placement, name, buffer


def _owned_states(optimizer: Any) -> Iterator[tuple[Placement, str, Tensor]]:
    """Yield the whole, flat states of each parameter owned by this rank. Collective. They are the optimizer's
    own tensors, not copies, if this rank holds the whole parameter."""
    placed = list(placements(optimizer))
    rank = optimizer.data_parallel_group.rank()
    for name in STATES:
        kept = {
            p.number: optimizer._get_main_param_and_optimizer_states(p.parameter)[name].detach()
            for p in placed
            if p.of(rank)
        }
        received = _exchange(optimizer, placed, kept)
        for placement in placed:
            if placement.owner != rank:
                continue
            if len(placement.pieces) == 1:
                yield placement, name, kept[placement.number]
            else:
                yield placement, name, _joined(placement, rank, kept[placement.number], received)


def _exchange(optimizer: Any, placed: list[Placement], kept: dict[int, Tensor]) -> list[Tensor]:
    """Send pieces to their parameters' owners (all-to-all); return received data by sender. Collective."""
    group, device = optimizer.data_parallel_group, optimizer.buffers[0].grad_data.device
    rank, size = group.rank(), group.size()
    outgoing: list[list[Tensor]] = [[] for _ in range(size)]
    incoming = [0] * size
    for placement in placed:
        for piece in placement.pieces:
            if piece.rank == rank != placement.owner:
                outgoing[placement.owner].append(kept[placement.number])
            elif placement.owner == rank != piece.rank:
                incoming[piece.rank] += piece.end - piece.first
    lengths = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    sent = torch.empty(sum(lengths), dtype=torch.float32, device=device)
    received = torch.empty(sum(incoming), dtype=torch.float32, device=device)
    tensors = [tensor for tensors in outgoing for tensor in tensors]
    for place, tensor in zip(sent.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        place.copy_(tensor)  # a copy, because the state may be on the host
    if size > 1:
        dist.all_to_all_single(received, sent, incoming, lengths, group=group)
    return list(received.split(incoming))


def _joined(placement: Placement, rank: int, own: Tensor, received: list[Tensor]) -> Tensor:
    """Join a parameter's whole state from its pieces, on the CPU. Consumes the front of ``received``."""
    whole = torch.empty(placement.parameter.numel(), dtype=torch.float32, device="cpu")
    for piece in placement.pieces:
        part = own
        if piece.rank != rank:
            length = piece.end - piece.first
            part, received[piece.rank] = received[piece.rank].tensor_split([length])
        whole[piece.first : piece.end].copy_(part)
    return whole
