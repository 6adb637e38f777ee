"""Settings of the KL terms: ``ReferenceKlConfig`` to a frozen reference, ``DistillationConfig`` to a teacher.

Recipe sections ``algorithm.reference_kl`` and ``algorithm.distillation``; ``reference_kl.py`` has their
formulas. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt


@dataclass(frozen=True)
class ReferenceKlConfig:
    """KL penalty to a frozen reference policy (RLHF, GRPO), with any loss; off at coefficient 0."""

    coefficient: Annotated[float, Ge(0)] = 0.0
    """Coefficient beta of the penalty; 0: none. GRPO's paper has 0.04, verl 0.001. Above 0: one forward pass
    a step, and a copy of the reference in host memory."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimator of KL(pi || pi_ref) at a sampled token, with q = pi_ref / pi. `k1`: -log q. `k2`:
    (log q)^2 / 2. `k3`: q - 1 - log q. Their gradients: docs/losses.md#kl-to-a-reference-policy."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: beta times the estimate is added to each token's loss. `reward`: beta times its sum over a
    response is subtracted from the reward."""
    unbiased: bool = field(default=False, kw_only=True)
    """Multiply each estimate in the loss by pi / pi_old, gradient included (DeepSeek-V3.2, arXiv 2512.02556).
    slime: `use_unbiased_kl`, TRL: `use_bias_correction_kl`."""
    model: Path | None = None
    """Hugging Face folder of the reference: shape and vocabulary of the policy. None: `model.hf_path`."""

    @property
    def enabled(self) -> bool:
        """Whether there is a penalty, and therefore a reference."""
        return self.coefficient > 0

    @property
    def in_loss(self) -> bool:
        """Whether the penalty is a loss term."""
        return self.enabled and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether the penalty is part of the reward."""
        return self.enabled and self.place == "reward"


@dataclass(frozen=True)
class DistillationConfig:
    """On-policy distillation from a frozen teacher on SGLang servers, with any loss; off at coefficient 0."""

    coefficient: Annotated[float, Ge(0)] = 0.0
    """Coefficient of the term KL(pi || pi_teacher) in the loss; 0: none."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of KL(pi || pi_teacher), as of `algorithm.reference_kl.estimator`."""
    urls: tuple[str, ...] = ()
    """Addresses of the teacher's SGLang servers, `http://HOST:PORT`, which must tokenize the dataset's
    prompts as the policy does."""
    api_key_env: str = ""
    """Name of the environment variable with the servers' key. Empty: no key."""
    concurrency: Annotated[int, Ge(1)] = 32
    """Most responses that a server scores at a time."""
    timeout_s: Annotated[float, Gt(0)] = 600.0
    """Time limit of one answer."""
    give_up_s: Annotated[float, Gt(0)] = 1800.0
    """The run stops, after a checkpoint, once no server has answered for so long."""

    @property
    def enabled(self) -> bool:
        """Whether there is a teacher."""
        return self.coefficient > 0

    @property
    def in_loss(self) -> bool:
        """Whether the term is part of the loss: always, with a teacher."""
        return self.enabled
