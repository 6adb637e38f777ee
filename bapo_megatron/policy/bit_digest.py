"""Layout-independent digest of weights and optimizer state, to verify that a load restored every bit.

    digest = sum over elements of  bits(element) * row_factor * column_factor   modulo 2^64

``state_digest`` returns it on every rank, as hex text; it is collective and gathers only each rank's sums
over its own shards. ``bits`` is the element's bit pattern as an integer; the factors are odd numbers derived
from the parameter's name and the element's row and column in the *global* parameter, whichever rank holds it.
Integers modulo 2^64 add exactly in any order, so neither NCCL's rings nor the layout change the sum. An odd
factor is invertible: a change of one element always changes the digest; a change of several, such as a
permutation, goes undetected with probability about 2^-32 at most.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.layers import Mapping
from bapo_megatron.policy.optimizer_state import STATES, placements
from bapo_megatron.policy.weight_map import Key, WeightMap, cut_group, shard

WEIGHTS, STEP = "weights", "step"
_INTEGERS = {2: torch.int16, 4: torch.int32}
_BLOCK = 2**22
"""Block size in elements: 64 MB on the device."""
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Increment and multipliers of splitmix64, as signed integers (Steele, Lea and Flood 2014, "Fast Splittable
Pseudorandom Number Generators")."""

_CUT, _WHOLE, _EXPERT = range(3)


@dataclass(frozen=True)
class RankSums:
    """One rank's digest sums by parameter kind and name, its TP and replica ranks, and its optimizer step
    counts; ``merged`` combines those of all ranks."""

    tensor: int
    """TP rank."""
    replica: int
    """DP x CP rank: identifies the copy of the non-expert parameters."""
    expert_replica: int
    """Expert-DP rank: identifies the copy of the expert parameters."""
    sums: dict[str, tuple[int, ...]]
    """Sums over TP-sharded, TP-replicated and expert parameters, by name."""
    steps: list[int]
    """The optimizer's step counts."""


def state_digest(weights: WeightMap, optimizer: Any) -> dict[str, list[str]]:
    """Digests of the weights and each optimizer state, and the step count, on every rank. Collective.

    DP x CP ranks hold copies of the weights, TP ranks of some parameters, expert-DP ranks of the experts. A
    name has one digest if all copies agree; otherwise the digest of the checkpoint's copy comes first.
    """
    own = RankSums(
        int(parallel_state.get_tensor_model_parallel_rank()),
        int(parallel_state.get_data_parallel_rank(with_context_parallel=True)),
        int(parallel_state.get_expert_data_parallel_rank()),
        _sums(weights, optimizer),
        _steps(optimizer),
    )
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return merged(ranks)


def merged(ranks: Sequence[RankSums]) -> dict[str, list[str]]:
    """Merge the sums of all ranks, in any order, into the digests of the whole state."""
    ranks = sorted(ranks, key=lambda rank: (rank.replica, rank.tensor, rank.expert_replica))
    sums = {WEIGHTS: _of_weights(ranks), **{name: _of_state(name, ranks) for name in STATES}}
    digests = {name: [f"{value % 2**64:016x}" for value in values] for name, values in sums.items()}
    steps = sorted({step for rank in ranks for step in rank.steps})
    return {
        **{name: list(dict.fromkeys(values)) for name, values in digests.items()},
        STEP: [*map(str, steps)],
    }


def _of_weights(ranks: Sequence[RankSums]) -> list[int]:
    """The sum of the checkpoint's copy, then one sum per other copy, which replaces its counterpart. A
    replica has a copy of the TP-sharded parameters, each of its TP ranks one of the replicated parameters, an
    expert replica one of the experts."""
    cut, whole, experts = Counter[int](), Counter[tuple[int, int]](), Counter[int]()
    for rank in ranks:
        own = rank.sums[WEIGHTS]
        cut[rank.replica] += own[_CUT]
        whole[rank.replica, rank.tensor] += own[_WHOLE]
        experts[rank.expert_replica] += own[_EXPERT]
    dense = [cut[replica] + value for (replica, _), value in whole.items()]
    first, *others = (value for _, value in sorted(experts.items()))
    return [*(value + first for value in dense), *(dense[0] + value for value in others)]


def _of_state(name: str, ranks: Sequence[RankSums]) -> list[int]:
    """Sums over all replicas (optimizer shards exist once), one per TP rank's replicated parameters."""
    total = sum(rank.sums[name][_CUT] + rank.sums[name][_EXPERT] for rank in ranks)
    whole = Counter[int]()
    for rank in ranks:
        whole[rank.tensor] += rank.sums[name][_WHOLE]
    return [total + value for value in whole.values()]


def _sums(weights: WeightMap, optimizer: Any) -> dict[str, tuple[int, ...]]:
    """This rank's sums by name, as in ``RankSums``."""
    device = next(iter(weights.local.values())).device
    names = (WEIGHTS, *STATES)
    sums = torch.zeros(len(names), 3, dtype=torch.int64, device=device)
    kept = dict(_kept_states(optimizer))
    for key, parameter in weights.local.items():
        mapping = weights.table[key[0]]
        rows, columns = factors(key, mapping, device)
        kind = _EXPERT if mapping.expert is not None else _WHOLE if mapping.tp_dim is None else _CUT
        sums[0, kind] += bit_sum(parameter.detach().flatten(), 0, rows, columns)
        first, states = kept.get(parameter, (0, {}))
        for number, name in enumerate(STATES, 1):
            if name in states:
                sums[number, kind] += bit_sum(states[name].detach(), first, rows, columns)
    return {name: tuple(row) for name, row in zip(names, sums.tolist(), strict=True)}


def _kept_states(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, tuple[int, dict[str, Tensor]]]]:
    """Yield each parameter with optimizer state here, its piece's first element, and its state tensors."""
    for part in optimizer.chained_optimizers:
        rank = part.data_parallel_group.rank()
        for placement in placements(part):
            if piece := placement.of(rank):
                states = part._get_main_param_and_optimizer_states(placement.parameter)
                yield placement.parameter, (piece.first, states)


def _steps(optimizer: Any) -> list[int]:
    """The distinct step counts on this rank: AdamW has one per parameter, FusedAdam one per group."""
    steps = set()
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state.get(parameter, {})
                steps.add(int(state.get("step", group.get("step") or 0)))
    return sorted(steps)


def factors(key: Key, mapping: Mapping, device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd int64 factors of the rows and columns of this rank's shard of a parameter."""
    name, layer = key
    seed = hashlib.sha256(f"{name} {layer}".encode()).digest()
    shape = (mapping.shape[0], prod(mapping.shape[1:]))  # a vector is a matrix of one column
    group = cut_group(mapping)
    pair = []
    for dim, length in enumerate(shape):
        index = torch.arange(length, device=device)
        if mapping.tp_dim == dim:
            index = shard(mapping, index.unsqueeze(1 - dim), group.rank(), group.size()).flatten()
        start = int.from_bytes(seed[8 * dim : 8 * dim + 8], "little", signed=True)
        pair.append(_mix(index * _GOLDEN + start) | 1)
    return pair[0], pair[1]


def _mix(value: Tensor) -> Tensor:
    """The splitmix64 finalizer on int64; the masks undo the sign extension of the shifts."""
    value = (value ^ ((value >> 30) & (2**34 - 1))) * _MIX_1
    value = (value ^ ((value >> 27) & (2**37 - 1))) * _MIX_2
    return value ^ ((value >> 31) & (2**33 - 1))


def bit_sum(values: Tensor, first: int, rows: Tensor, columns: Tensor) -> Tensor:
    """sum bits * row_factor * column_factor, int64, of a flat piece of a shard from element ``first`` on.
    ``values`` may be on another device than the factors; the sum is on the factors' device."""
    bits = values.view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    done = 0
    for row, column, count, width in _rectangles(first, values.numel(), columns.numel()):
        block = bits[done : done + count * width].to(rows.device).view(count, width).long()
        total += ((block * columns[column : column + width]).sum(1) * rows[row : row + count]).sum()
        done += count * width
    return total


def _rectangles(first: int, length: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield rectangles (row, column, rows, columns) that tile a run of elements of a matrix of this width."""
    end = first + length
    while first < end:
        row, column = divmod(first, width)
        if column or end - first < width:
            count, wide = 1, min(width - column, end - first)
        else:
            count, wide = min((end - first) // width, max(1, _BLOCK // width)), width
        yield row, column, count, wide
        first += count * wide
