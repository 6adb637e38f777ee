"""Shard lists of the DP x CP peers, for the save of a rehearsal: they decide which shards this rank writes.

Peers hold the same weights, and each the optimizer state of the parameters that it owns. Megatron gathers the
list of each rank's shards and assigns each shard to one of its holders. The lists follow from the placement
of the parameters, which every rank knows. Used by ``checkpoints.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import fully_parallel

from bapo_megatron.policy.state import optimizer_state
from bapo_megatron.policy.state.optimizer_state import (
    STATES,
    placements,
    shard_of_state,
    shards_of_parameters,
)


@contextmanager
def peer_shard_lists() -> Iterator[None]:
    """Context manager under which a save is distributed over DP x CP as in a run with all ranks."""
    owned: dict[int, list[ShardedTensor]] = defaultdict(list)
    own_state, determine, gather = (
        optimizer_state._sharded_state,
        fully_parallel.determine_main_replica_uniform_distribution,
        dist.all_gather_object,
    )

    def sharded_state(optimizer: Any, model_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for owner, shards in _states_by_owner(optimizer, model_state).items():
            owned[owner] += shards
        return own_state(optimizer, model_state, *args, **kwargs)

    def gather_lists(object_list: Any, obj: Any, group: Any = None) -> Any:
        weights = [shard for shard in obj if not shard.key.startswith("optimizer.state.")]
        for rank in range(len(object_list)):
            object_list[rank] = [replace(one, replica_id=(*one.replica_id[:-1], rank)) for one in weights]
            object_list[rank] += owned[rank]
        object_list[group.rank()] = obj

    def with_peers(*args: Any, **kwargs: Any) -> Any:
        dist.all_gather_object = gather_lists
        try:
            return determine(*args, **kwargs)
        finally:
            dist.all_gather_object = gather

    optimizer_state._sharded_state = sharded_state
    fully_parallel.determine_main_replica_uniform_distribution = with_peers
    try:
        yield
    finally:
        optimizer_state._sharded_state = own_state
        fully_parallel.determine_main_replica_uniform_distribution = determine


def _states_by_owner(optimizer: Any, model_state: dict[str, Any]) -> dict[int, list[ShardedTensor]]:
    """Optimizer shards by owner, a rank of DP x CP; without values."""
    shards = shards_of_parameters(model_state)
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for placement in placements(optimizer):
        nothing = torch.empty(()).expand(placement.parameter.shape)
        for name in STATES:
            shard = shard_of_state(shards[placement.parameter], name, nothing, 0)
            found[placement.owner][f"{placement.number} {name}"] = shard
    for state in found.values():
        apply_factories(state)
    return {
        owner: [one.without_data() for one in nested_values(state) if isinstance(one, ShardedTensor)]
        for owner, state in found.items()
    }
