"""Distributed checkpoints (torch_dist): save and load model and optimizer, at any parallel layout.

``save`` begins an asynchronous write and returns its ``BackgroundSave``; ``load`` fills a built model and
optimizer in place, executing no pickle from the files. Both are collective. The optimizer format is
``fully_reshardable``, which any layout can load. With torch's AdamW (no Transformer Engine, no apex)
megatron's loading fails in three ways, repaired here by patches of the optimizer instance: it expects
moments, which torch creates only at the first step; it asks each parameter's state for a ``step``, which
checkpoints lack; and it shares one ``step`` tensor among all parameters.

Checkpoints of Transformer Engine's and torch's layers differ only in ``_extra_state`` (fp8 scales, empty for
these models), so each implementation loads the other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from bapo_megatron.errors import CheckpointError
from bapo_megatron.policy.background_save import BackgroundSave, replace_results_queue
from bapo_megatron.policy.megatron_versions import save_arguments
from bapo_megatron.policy.optimizer_state import shard_over_ranks
from bapo_megatron.policy.stored_checkpoint import StoredCheckpoint, open_stored, read_by
from bapo_megatron.runtime.distributed import all_gather

_CONTENT = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
}


def save(path: Path, model: Sequence[Any], optimizer: Any) -> BackgroundSave:
    """Begin an asynchronous write of the checkpoint into ``path``. Collective. Returns once GPU tensors are
    copied to the host and the writer is forked: training may continue."""
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()  # every rank writes into the folder
    for wrapper in optimizer.chained_optimizers:
        _create_state(wrapper)
    replace_results_queue()
    request = dist_checkpointing.save(
        {**_state(model, optimizer, loading=False), "written_at": _layout(model)},
        str(path),
        FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), _replicas()),
        async_sharded_save=True,
        content_metadata=_CONTENT,
        **save_arguments(),
    )
    return BackgroundSave(request)


def load(path: Path, model: Sequence[Any], optimizer: Any) -> None:
    """Load the checkpoint in ``path`` into model and optimizer, which keeps this run's settings. Collective.

    Raises CheckpointError, on every rank, if it is damaged or would run code (``stored_checkpoint.py``), and
    RuntimeError if it belongs to another model or cannot be read.
    """
    adams = []
    for wrapper in optimizer.chained_optimizers:
        _keep_moments_on_load(wrapper.optimizer)
        if isinstance(wrapper.optimizer, torch.optim.AdamW):
            # First: megatron loads into existing moments.
            _create_adam_state(wrapper.optimizer)
            _add_step_on_load(wrapper, wrapper.optimizer)
            adams.append(wrapper.optimizer)
    stored = _opened(path)
    state = _read(_state(model, optimizer, loading=True), stored)
    for name, chunk in _named_chunks(model):
        chunk.load_state_dict(state[name], strict=True)
    # The load would restore the settings of the recipe that wrote the checkpoint.
    loaded = ("params", "step")
    settings = [
        {name: value for name, value in group.items() if name not in loaded}
        for group in optimizer.param_groups
    ]
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for adam in adams:
        _separate_step_tensors(adam)


def _opened(path: Path) -> StoredCheckpoint:
    """Open the checkpoint in ``path``. Collective: raises CheckpointError on every rank if any rank fails."""
    try:
        stored, problem = open_stored(path), None
    except (CheckpointError, OSError) as error:
        stored, problem = None, str(error)
    if damage := next(filter(None, all_gather(problem)), None):
        raise CheckpointError(damage)
    assert stored is not None
    return stored


def _read(asked: dict[str, Any], stored: StoredCheckpoint) -> dict[str, Any]:
    """Return the state ``asked`` for, read from ``stored``, as ``dist_checkpointing.load`` would, but without
    its readers of pickles. An ``_extra_state`` is not read: it is None. Raises RuntimeError if anything is
    missing or unreadable: torch's own error is not an Exception. Collective."""
    keys = {name: list(part) for name, part in asked.items() if name.startswith("model")}
    asked, state, factories = load_preprocess(asked)
    tensors, _ = extract_matching_values(asked, lambda value: isinstance(value, ShardedTensor))
    lost = sorted({part.key for part in nested_values(tensors)} - stored.metadata.tensors.keys())
    if lost := sorted(set(chain(*all_gather(lost)))):  # a stage may have all of its own
        raise RuntimeError(
            f"the checkpoint in {stored.folder} lacks {len(lost)} parts that this model has, the first "
            f"{lost[0]}: it is of another model"
        )
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), _replicas())
    try:
        with read_by(stored):
            loaded = strategy.load(tensors, stored.folder)
    except CheckpointException as error:
        for failure in error.failures.values():
            if isinstance(failure[0], CheckpointError):
                raise failure[0] from None
        raise RuntimeError(f"the checkpoint in {stored.folder} cannot be read: {error}") from error
    state = merge(merge(stored.common, state), loaded)
    apply_factory_merges(state, factories)
    for name, part in keys.items():
        for key in part:
            state[name].setdefault(key, None)
    return dict(state)


def _replicas() -> Any:
    """The DP x CP group: its ranks hold the same weights, and each writes and reads a share."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _state(model: Sequence[Any], optimizer: Any, loading: bool) -> dict[str, Any]:
    for wrapper in optimizer.chained_optimizers:
        shard_over_ranks(wrapper)
    metadata = {**_CONTENT, "dp_cp_group": _replicas()}
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(model)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return state


def _layout(model: Sequence[Any]) -> dict[str, int | list[int]]:
    """The writing layout, for information only: any layout can load the checkpoint. Collective."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    own = [len(chunk.decoder.layers) for _, chunk in _named_chunks(model)]
    layers = dict(all_gather((stage, own)))
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual": len(model),
        # In model order: the first chunk of every stage, then the second of every stage.
        "pipeline_layers": [layers[stage][chunk] for chunk in range(len(model)) for stage in sorted(layers)],
        "context": parallel_state.get_context_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _named_chunks(model: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for number, chunk in enumerate(model):
        while hasattr(chunk, "module"):
            chunk = chunk.module
        yield ("model" if len(model) == 1 else f"model{number}"), chunk


def _create_state(wrapper: Any) -> None:
    """Initialize moments and step count, so that a checkpoint before the first step is complete."""
    if isinstance(wrapper.optimizer, torch.optim.AdamW):
        _create_adam_state(wrapper.optimizer)
        _note_step(wrapper.optimizer)
    elif wrapper.init_state_fn is not None:
        wrapper.init_state_fn(wrapper.optimizer, wrapper.config)
        for group in wrapper.optimizer.param_groups:
            group.setdefault("step", 0)  # torch's AdamW, which may resume the run, needs it


def _create_adam_state(adam: torch.optim.Optimizer) -> None:
    """Repair 1: initialize the moments before megatron needs them; torch would do so at the first step."""
    for parameter in (p for group in adam.param_groups for p in group["params"]):
        state = adam.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter.data)
            state["exp_avg_sq"] = torch.zeros_like(parameter.data)


def _keep_moments_on_load(adam: torch.optim.Optimizer) -> None:
    """Patch FusedAdam to load its float32 moments without a second copy. Transformer Engine's own loader
    creates new tensors, for moments of other types, while the old ones exist."""
    adam.load_state_dict = partial(torch.optim.Optimizer.load_state_dict, adam)  # type: ignore[method-assign]


def _add_step_on_load(wrapper: Any, adam: torch.optim.Optimizer) -> None:
    """Repair 2: add ``step`` to each loaded state. Megatron copies all keys; checkpoints lack this one."""
    original = type(wrapper)._set_main_param_and_optimizer_states

    def with_step(model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = wrapper.model_param_group_index_map[model_param]
        state = adam.state[adam.param_groups[group]["params"][order]]
        return original(wrapper, model_param, {"step": state["step"], **tensors})

    wrapper._set_main_param_and_optimizer_states = with_step


def _note_step(adam: torch.optim.Optimizer) -> None:
    """Copy the step count into the groups, where megatron reads it if Transformer Engine is installed."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            group["step"] = int(adam.state[parameter]["step"])


def _separate_step_tensors(adam: torch.optim.Optimizer) -> None:
    """Repair 3: give each parameter its own ``step`` tensor, from the group's loaded count.

    Megatron shares one tensor among all parameters, so torch would advance it once per parameter; with
    Transformer Engine installed it sets none.
    """
    for group in adam.param_groups:
        for parameter in group["params"]:
            if group.get("step") is None:
                raise RuntimeError("the checkpoint has no step count of its optimizer")
            adam.state[parameter]["step"] = torch.tensor(float(group["step"]))
