"""Load of the experts (mixture of experts): the tokens of an update by expert, and the routers' entropy.

    load_le = number of tokens t that layer l sends to expert e
    entropy_l = sum_t H(p_lt),   H(p) = -sum_e p_e ln p_e (nats),   p_lt = softmax of the router's logits

Tokens are all positions of documents, prompts included, once each: no padding, no dummy pack. Where routes
are replayed the load is theirs; the entropy is always of the trainer's router, over all its experts. Each
rank adds what its own layers do with its own tokens, without a wait on the host, so the sums over all ranks
are those of the model: pipeline stages have other layers, ranks of CP, SP and DP other tokens, and routers
run before EP and ETP send tokens away. The sums ride on the loss's all-reduce.

Shapes: ``_T`` tokens of this rank, ``_K`` experts of a token, ``_E`` experts, ``_L`` layers of the model,
``_C`` = E + 2. Used in ``policy/attention/`` and this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from bapo_megatron.tensor_types import MicroBatch

_TOTALS, _COUNTS = 3, 4
"""Lengths of ``UpdateTally.totals`` and ``counts``."""


@dataclass(frozen=True)
class LayerLoad:
    """Where the router of one layer counts the tokens of a pack. Made by ``PackLoad.of_layer``."""

    real_T: Tensor
    sums_C: Tensor

    def add(self, probability_TE: Tensor, expert_TK: Tensor) -> None:
        """Add the tokens, sent to ``expert_TK``; ``probability_TE`` is the router's, over all experts."""
        experts, real_TK = probability_TE.shape[1], self.real_T[:, None].expand(expert_TK.shape)
        # No bincount, whose length the host would wait for.
        self.sums_C[:experts].index_add_(0, expert_TK.flatten(), real_TK.flatten())
        entropy_T = torch.special.entr(probability_TE).sum(1, dtype=torch.float64)
        self.sums_C[experts:].add_(torch.stack([self.real_T.sum(), (entropy_T * self.real_T).sum()]))


@dataclass(frozen=True)
class PackLoad:
    """Where the layers count the tokens of a pack that this rank routes.

    Made by ``PolicyModel.document_pack`` for passes with gradients; part of its ``DocumentPack``.
    """

    real_T: Tensor
    """float64: 1 for a document's token, 0 for padding."""
    sums_LC: Tensor
    """Those of the update's ``UpdateTally``."""

    def of_layer(self, number: int) -> LayerLoad:
        """That of the layer with this ``number`` in the model, from 1 on."""
        return LayerLoad(self.real_T, self.sums_LC[number - 1])


@dataclass(frozen=True)
class UpdateTally:
    """What an update of a mixture of experts counts at its routers, on this rank, float64 on the device.

    Made by ``MegatronPolicy.update``. Its parts are views of one vector, which is summed over all ranks.
    """

    version: int
    """The version of the policy's weights before the update."""
    has_routes: bool
    """Whether the packs have routes; else ``totals`` and ``counts`` stay zero."""
    layers: int
    sums: Tensor

    @classmethod
    def of(
        cls, batches: Sequence[MicroBatch], version: int, config: TransformerConfig, device: torch.device
    ) -> UpdateTally | None:
        """A tally of nothing yet; None for a model without experts."""
        if not config.num_moe_experts:
            return None
        length = _TOTALS + _COUNTS + config.num_layers * (config.num_moe_experts + 2)
        sums = torch.zeros(length, dtype=torch.float64, device=device)
        return cls(version, batches[0].route_TLK is not None, config.num_layers, sums)

    @property
    def totals(self) -> Tensor:
        """[3]: ``pack_totals`` of the packs."""
        return self.sums[:_TOTALS]

    @property
    def counts(self) -> Tensor:
        """[4]: those of ``PackRoutes``."""
        return self.sums[_TOTALS : _TOTALS + _COUNTS]

    @property
    def load_LC(self) -> Tensor:
        """By layer: tokens of each expert, tokens, sum of their router entropies."""
        return self.sums[_TOTALS + _COUNTS :].view(self.layers, -1)

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """The parts of a loss's sums with a tally's behind them: the loss's, and two of ``UpdateResult``."""
        loss, routes, load = vector.tensor_split(
            (len(vector) - len(self.sums), len(vector) - len(self.sums) + _TOTALS + _COUNTS)
        )
        return loss, routes if self.has_routes else None, load.view(self.layers, -1)
