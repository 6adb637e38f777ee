"""Checkpoint save and load of a rehearsal: the save up to the fork of its writer, the load without files.

They patch the policy's and megatron's checkpoint modules for the whole process. Used by ``rank.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint.default_planner as planner
from megatron.core.dist_checkpointing import validation
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)

from bapo_megatron.policy import checkpoint
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.policy.state.stored_checkpoint import StoredCheckpoint
from bapo_megatron.rehearsal.replicas import peer_shard_lists
from checkpoints_tools.formats.distcp import Metadata


class _StagedSave:
    """Stand-in for ``BackgroundSave``: the copies to the host that precede the fork, and no fork."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.staged = request.preload_fn() if request.preload_fn is not None else None


def rehearse_save(policy: MegatronPolicy) -> Any:
    """Save of a rehearsed rank: ``staged_save`` on fake process groups, where no peers check or share the
    work."""
    # Rank 0 checks the plans of all ranks against each other; its peers' are copies of its own here.
    for check in ("_validate_sharding_for_key", "_validate_objects_for_key"):
        setattr(validation, check, lambda *_args, **_kwargs: None)
    planner._validate_global_plan = lambda *_args, **_kwargs: []
    with peer_shard_lists():
        return staged_save(policy)


def staged_save(policy: MegatronPolicy) -> Any:
    """``policy.save`` up to the fork of its writer. Returns the host copies that the writer would hold."""
    module: Any = checkpoint
    module.BackgroundSave = _StagedSave
    with tempfile.TemporaryDirectory() as folder:
        return policy.save(Path(folder))


def rehearse_load(policy: MegatronPolicy) -> None:
    """``policy.load`` from an imaginary checkpoint that has every requested tensor."""
    module: Any = checkpoint
    module.dist_checkpointing.load = _return_placeholders
    module._opened = lambda path: StoredCheckpoint(path, Metadata({}, {}), {})
    policy.load(Path("/nowhere"), version=2)


def _return_placeholders(state: Any, *_: Any, strict: Any = None, **__: Any) -> Any:
    """Stand-in for ``dist_checkpointing.load``: the state dict with each placeholder replaced by its target.

    With ``strict`` also the missing and the unexpected keys: none.
    """
    factories, _rest = extract_matching_values(
        state, lambda one: isinstance(one, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(state)
    dict_list_map_inplace(_target_tensor, state)
    found = apply_factory_merges(state, factories)
    return found if strict is None else (found, set(), set())


def _target_tensor(value: Any) -> Any:
    if isinstance(value, LocalNonpersistentObject):
        return value.unwrap()
    return value.data if isinstance(value, ShardedTensor | ShardedObject) else value
