"""AdamW on megatron's distributed optimizer: construction, clipped step, learning-rate schedule.

Functions for ``MegatronPolicy``; the state is in megatron's objects. Used by ``megatron.py`` and
``benchmarks/gpu/small_policy.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from bapo_megatron.config import OptimizerConfig
from bapo_megatron.policy.host_optimizer import HostAdamW, move_to_host

_OWNERS = {"transformer_engine": "Transformer Engine's", "apex": "apex's", "torch": "torch's"}


def build_optimizer(config: OptimizerConfig, model: Sequence[Any], dtype: torch.dtype) -> Any:
    """Megatron's distributed optimizer over the DDP-wrapped chunks; no weight decay for biases and norms.

    ``optimizer.device=cpu``: state and steps are on the host (``host_optimizer.py``).
    """
    settings = megatron_optimizer.OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    build = megatron_optimizer.get_megatron_optimizer
    optimizer = build(settings, list(model), use_gloo_process_groups=False)
    if config.device == "cpu":
        move_to_host(optimizer, config)
    return optimizer


def implementation(optimizer: Any) -> str:
    """The name of the AdamW in use: Transformer Engine's, else apex's, else torch's; or the host's."""
    kinds = {type(part.optimizer) for part in optimizer.chained_optimizers if not part.is_stub_optimizer}
    names = [
        "torch's AdamW on the host"
        if kind is HostAdamW
        else f"{_OWNERS.get(kind.__module__.split('.')[0], kind.__module__)} {kind.__name__}"
        for kind in kinds
    ]
    return " and ".join(sorted(names)) or "none on this rank"


def clipped_step(optimizer: Any, clip_grad: float) -> float:
    """One optimizer step with gradient clipping; returns the gradient norm before it. Collective.

    FloatingPointError, on every rank and without a step, if the norm is not finite. (Megatron's own gradient
    check raises only on the rank with the nan, and the others would wait for it.)
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient norm is {norm}")
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm


def build_schedule(config: OptimizerConfig, optimizer: Any, planned_updates: int) -> OptimizerParamScheduler:
    """The learning-rate schedule over updates: warmup, then decay to ``min_lr``."""
    warmup = config.warmup_updates
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(planned_updates, warmup + 1),
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
