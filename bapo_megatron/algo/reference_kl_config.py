"""Settings of the KL terms: to a frozen reference policy, and to a frozen teacher (distillation).

``algorithm.reference_kl`` and ``algorithm.distillation`` of a recipe. ``reference_kl.py`` has the formulas,
``trainer/reference.py`` the reference, ``rollout/sampler/teacher.py`` the teacher. Imports no torch.
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
    """Coefficient beta of the penalty; 0: none, and no reference is loaded. GRPO's paper has 0.04, verl
    0.001. Above 0 the reference takes one forward pass a step, and a copy of its weights in host memory."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimator of KL(pi || pi_ref) at a sampled token, with q = pi_ref / pi. `k1`: -log q. `k2`:
    (log q)^2 / 2. `k3`: q - 1 - log q. In the loss k3 is GRPO's, k2 has the gradient of KL, and k1 none that
    depends on the reference; in the reward k1 is PPO's."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: beta times the estimate is added to each token's loss, with the token's weight. `reward`: beta
    times the sum of the estimates over a response is subtracted from its reward before the advantages."""
    unbiased: bool = field(default=False, kw_only=True)
    """Multiply each estimate in the loss by pi / pi_old, gradient included. In every update, stale or not,
    its gradient is then that of the estimate's mean over tokens of the policy, with k1 and k3 that of KL(pi
    || pi_ref) (DeepSeek-V3.2, arXiv 2512.02556). slime: `use_unbiased_kl`, TRL: `use_bias_correction_kl`."""
    model: Path | None = None
    """Hugging Face folder of the reference: same shape and vocabulary as the policy. None: `model.hf_path`,
    the model that the run starts from."""

    @property
    def enabled(self) -> bool:
        """Whether there is a penalty, and so a reference."""
        return self.coefficient > 0

    @property
    def in_loss(self) -> bool:
        """Whether the penalty is a term of the loss."""
        return self.enabled and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether the penalty is a part of the reward."""
        return self.enabled and self.place == "reward"


@dataclass(frozen=True)
class DistillationConfig:
    """On-policy distillation from a frozen teacher on SGLang servers, with any loss; off at coefficient 0."""

    coefficient: Annotated[float, Ge(0)] = 0.0
    """Coefficient of the term KL(pi || pi_teacher) in the loss, at each token that the policy sampled; 0:
    none, and no teacher is asked."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of KL(pi || pi_teacher), as of `algorithm.reference_kl.estimator`. k2 has the gradient of the
    KL in each state: that of a policy gradient with log(pi_teacher / pi) as each token's advantage."""
    urls: tuple[str, ...] = ()
    """Addresses of the SGLang servers with the teacher, `http://HOST:PORT`, started by the user. Its
    vocabulary must be the policy's: the servers must tokenize the dataset's prompts as the policy does."""
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
