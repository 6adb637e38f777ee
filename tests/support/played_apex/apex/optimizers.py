"""FusedAdam as apex has it: ``step`` in the groups as a plain number, two float32 moments in the state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import amp_C
import torch

from apex.multi_tensor_apply import multi_tensor_applier


class FusedAdam(torch.optim.Optimizer):
    """AdamW (``adam_w_mode``) over lists of tensors."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        assert not capturable
        assert not master_weights
        defaults = {"bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **defaults})
        self._mode = 1 if adam_w_mode else 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of the parameters that have a gradient; groups without parameters count none."""
        del closure
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            lists: list[list[torch.Tensor]] = [[], [], [], []]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter).float()
                found = (parameter.grad, parameter, state["exp_avg"], state["exp_avg_sq"])
                for tensors, tensor in zip(lists, found, strict=True):
                    tensors.append(tensor)
            multi_tensor_applier(
                amp_C.multi_tensor_adam,
                torch.zeros(1, dtype=torch.int32),
                lists,
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"],
                self._mode,
                group["bias_correction"],
                group["weight_decay"],
            )


class FusedSGD(torch.optim.SGD):
    """A name that megatron imports."""
