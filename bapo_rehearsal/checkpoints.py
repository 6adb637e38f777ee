"""Checkpoint save and load of a rehearsal: the save up to the fork of its writer, the load without files.

``rehearse_save`` and ``rehearse_load`` patch the policy's and megatron's checkpoint modules permanently.

The shards that this rank writes depend on its DP x CP peers. These have the same weights, and each has the
optimizer state of the parameters that it owns. Megatron gathers the shard lists of all ranks and assigns each
shard to one of the ranks that have it. The lists follow from the parameter placement, which every rank knows.
Peers at other EP and ETP coordinates have experts of the same sizes as this rank's, under other names.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.default_planner as planner
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import validation
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.strategies import fully_parallel

from bapo_megatron.policy import checkpoint, optimizer_state
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.policy.optimizer_state import (
    STATES,
    placements,
    shard_of_state,
    shards_of_parameters,
)


class _StagedSave:
    """Stand-in for ``BackgroundSave``: the host copies that precede the fork, without the fork."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.staged = request.preload_fn() if request.preload_fn is not None else None


def rehearse_save(policy: MegatronPolicy) -> Any:
    """Run ``staged_save`` on fake process groups, which have no peers to validate plans or share the work."""
    # Rank 0 validates the plans of all ranks against each other; here its peers' are copies of its own.
    for check in ("_validate_sharding_for_key", "_validate_objects_for_key"):
        setattr(validation, check, lambda *_args, **_kwargs: [])  # since 0.17 a list of errors
    planner._validate_global_plan = lambda *_args, **_kwargs: []
    with peer_shard_lists():
        return staged_save(policy)


def staged_save(policy: MegatronPolicy) -> Any:
    """Run ``policy.save`` up to the fork of its writer. Returns an object that keeps the host copies."""
    module: Any = checkpoint
    module.BackgroundSave = _StagedSave
    with tempfile.TemporaryDirectory() as folder:
        return policy.save(Path(folder))


def rehearse_load(policy: MegatronPolicy) -> None:
    """Run ``policy.load`` on an imaginary checkpoint that has every requested tensor."""
    module: Any = checkpoint
    module._opened = lambda path: None
    module._read = lambda asked, _stored: _return_placeholders(asked)
    policy.load(Path("/nowhere"), version=2)


def _return_placeholders(state: Any) -> Any:
    """Stand-in for the read: returns the state dict, its placeholders replaced by their tensors."""
    factories, _rest = extract_matching_values(
        state, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(state)
    dict_list_map_inplace(_target_tensor, state)
    return apply_factory_merges(state, factories)


def _target_tensor(value: Any) -> Any:
    if isinstance(value, LocalNonpersistentObject):
        return value.unwrap()
    return value.data if isinstance(value, ShardedTensor | ShardedObject) else value


@contextmanager
def peer_shard_lists() -> Iterator[None]:
    """Context manager in which a save is distributed over DP x CP as in a run with all ranks."""
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
        for place, rank in enumerate(dist.get_process_group_ranks(group)):
            copy, suffix = _copy_of_experts(rank)
            chosen = [
                replace(item, replica_id=(*item.replica_id[:-1], copy if _is_expert(item) else place))
                for item in weights
            ]
            chosen += [item for item in owned[place] if not _is_expert(item)]
            chosen += [item for item in owned[copy] if _is_expert(item)]
            object_list[place] = [
                replace(item, key=item.key + suffix) if _is_expert(item) else item for item in chosen
            ]
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


def _is_expert(shard: ShardedTensor) -> bool:
    return ".experts." in shard.key


def _copy_of_experts(rank: int) -> tuple[int, str]:
    """Index of ``rank`` among the ranks with the same experts, and the suffix of its experts' keys.

    The suffix is empty for this rank's experts. megatron's rank order within a stage: ETP varies fastest,
    then EP.
    """
    places = parallel_state.get_expert_tensor_and_model_parallel_group().size()
    stages = parallel_state.get_pipeline_model_parallel_group().size()
    copy, place = divmod(rank % (dist.get_world_size() // stages), places)
    return copy, "" if place == dist.get_rank() % places else f" of place {place}"


def _states_by_owner(optimizer: Any, model_state: dict[str, Any]) -> dict[int, list[ShardedTensor]]:
    """Optimizer shards by owner (a DP x CP rank), without values."""
    shards = shards_of_parameters(model_state)
    by_owner: dict[int, dict[str, Any]] = defaultdict(dict)
    for placement in placements(optimizer):
        nothing = torch.empty(()).expand(placement.parameter.shape)
        for name in STATES:
            shard = shard_of_state(shards[placement.parameter], name, nothing, 0)
            by_owner[placement.owner][f"{placement.number} {name}"] = shard
    for state in by_owner.values():
        apply_factories(state)
    return {
        owner: [value.without_data() for value in nested_values(state) if isinstance(value, ShardedTensor)]
        for owner, state in by_owner.items()
    }
