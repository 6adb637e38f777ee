"""Configuration of ``bapo verify-parallel``: a recipe's fields and the layout check's. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.config import ParallelConfig, RunConfig
from bapo_megatron.hf.config import read_model_shape

if TYPE_CHECKING:
    from bapo_megatron.data.canary import CanarySpec

_TOKENS = 16384


@dataclass(frozen=True)
class ToleranceConfig:
    """Tolerances of the layout check for tokens, totals and the gradient norm. None: the default of the
    model's dtype. See docs/doctor.md."""

    token_relative: float | None = None
    """Allowed relative difference of each log-prob and entropy."""
    token_absolute: float | None = None
    """Allowed absolute difference of each log-prob and entropy in nats, added to the relative one."""
    token_mean: float | None = None
    """Allowed mean absolute difference over all tokens, in nats."""
    total_relative: float | None = None
    """Allowed relative difference of each contribution sum and the loss."""
    norm_relative: float | None = None
    """Allowed relative difference of the gradient norm."""
    total_absolute: float | None = None
    """Allowed absolute difference of the same totals and the norm, added to the relative one."""


@dataclass(frozen=True)
class VerifyConfig(RunConfig):
    """Configuration of `bapo verify-parallel`: a recipe's fields, the layout or file to compare with, the
    canary batch's size, tolerances."""

    certificate: Path | None = None
    """Compare with the layout reference stored here instead of running it."""
    save: Path | None = None
    """Write the recipe's layout here, as a reference for another."""
    reference: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout of the reference run that this command starts itself."""
    tokens: int | None = None
    """Tokens of the canary batch. None: 16384, or twice its longest sequence where that is more."""
    longest: int | None = None
    """Tokens of the canary batch's longest sequence. None: the run's longest prompt and response."""
    tolerance: ToleranceConfig = field(default_factory=ToleranceConfig)

    @classmethod
    def of(cls, run: RunConfig) -> VerifyConfig:
        """Return the configuration that checks ``run``, with the check's fields at their defaults."""
        return cls(**{item.name: getattr(run, item.name) for item in dataclasses.fields(run)})

    @property
    def canary(self) -> CanarySpec:
        from bapo_megatron.data.canary import CanarySpec

        longest = self.longest or self.longest_sequence
        tokens = self.tokens or max(_TOKENS, 2 * longest)
        return CanarySpec(self.seed, tokens, longest, read_model_shape(self.model.hf_path).vocab)

    @property
    def runs_reference(self) -> bool:
        """Whether this command runs the reference itself."""
        return self.certificate is None and self.save is None
