"""The seams of a run: what may be replaced, and what a replacement must do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from bapo_megatron.types import (
    GenerateRequest,
    Generation,
    MicroBatch,
    PackLayout,
    Prompt,
    SearchedLoss,
    StepBatch,
    TokenFn,
    TokenStats,
    UpdateResult,
)

NamedTensors = Iterator[tuple[str, Tensor]]
"""Weights under their Hugging Face names."""


class Policy(Protocol):
    """The trained model. Parallelism is its secret: callers see packs, sums and updates."""

    version: int
    """Optimizer steps made since the run began."""

    @property
    def data_rank(self) -> int:
        """Which replica of the model this process belongs to."""

    @property
    def pack_layout(self) -> PackLayout:
        """What packs this rank takes."""

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """Forward only: ``fn`` summed over the packs of all ranks, float64, equal on every rank."""

    def rollout_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """``token_sums`` as if the rollouts' log-probs were the policy's, without any pass of the model."""

    def log_probs(self, batches: Sequence[MicroBatch]) -> list[TokenStats]:
        """Log-probs and entropies of this rank's packs, at the rollout temperature."""

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn | SearchedLoss) -> UpdateResult:
        """One optimizer step on element 0 of ``loss``, divided by the update's count of unmasked tokens."""

    def hf_weights(self) -> NamedTensors:
        """All weights, tensor by tensor. Every rank of a replica must run the iterator to its end."""

    def save(self, path: Path) -> None:
        """Write model, optimizer and schedule. Collective."""

    def load(self, path: Path, version: int) -> None:
        """Read what ``save`` wrote at ``version``, at any layout. Collective."""


class Engine(Protocol):
    """Samples from a copy of the policy. The contract is SGLang's; tests/contract holds it."""

    @property
    def weight_version(self) -> int:
        """The version given with the last weights that were taken over."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Answer every request, in order. Blocks; other threads may abort, pause or update meanwhile."""

    def abort(self) -> None:
        """End the requests in flight: they return what they have, with finish reason ``abort``."""

    def pause(self) -> None:
        """Stop sampling after the token in hand; requests in flight wait."""

    def resume(self) -> None:
        """Go on after ``pause``."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over new weights. Requests in flight go on under them; later tokens carry ``version``."""

    def close(self) -> None:
        """Release what the engine holds."""


class Sampler(Protocol):
    """Turns prompts into finished, rewarded groups. Lives on rank 0."""

    def next_batch(self, step: int) -> StepBatch:
        """The groups that ``step`` trains on."""

    def state(self) -> dict[str, Any]:
        """What a continuation needs; plain JSON."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""


class WeightSync(Protocol):
    """Brings the policy's weights to the engines."""

    def push(self, policy: Policy) -> None:
        """After it returns every engine samples from ``policy.version``. Collective."""


class Reward(Protocol):
    """Judges a response."""

    def __call__(self, prompt: Prompt, response: str) -> float:
        """The reward of ``response``, a finite number."""
