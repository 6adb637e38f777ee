"""Mixture-of-experts layers: replay of the engine's routes, and expert load counts.

``layers.ExpertsBuilder`` puts both into a layer's spec. A *route* is the experts that the inference
engine chose for a token in each layer.

**Replay**: a token goes to the experts of its route. Routes travel in the pack (``DocumentPack.routes``), so
pipeline schedules, recomputation and passes without gradients need no switch: a layer hands its router the
pack's routes before each run, recomputed or not. Megatron's own replay, a process-wide switch, would have to
flip between the forward and backward step of each micro-batch; only its hook in the router is used. The
weights of a route's experts come from the router's own logits, differentiable as usual. Without replay
(``PackRoutes.replays`` False) the layers choose their own experts and the routes are only compared.

**Load**: an update's tokens per expert, and the router entropy, in ``RouterCounters``.

    load_le = number of tokens t that layer l sends to expert e
    entropy_l = sum_t H(p_lt),   H(p) = -sum_e p_e ln p_e (nats),   p_lt = softmax of the router's logits

All document positions count once, prompts included; padding and dummy packs do not. With replay the load is
that of the replayed routes; the entropy is always of the trainer's router, over all its experts. Each rank
adds its own layers' counts for its own tokens, without a host wait. Pipeline stages have different layers,
CP, SP and DP ranks different tokens, and routers run before EP and ETP dispatch, so the sums over all ranks
are the model's. They share the loss's all-reduce.

Shapes: ``_T`` tokens of this rank, ``_K`` experts of a token, ``_E`` experts, ``_L`` layers of the model,
``_C`` = E + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from bapo_megatron.data.packing import UNKNOWN_BYTE
from bapo_megatron.tensor_types import MicroBatch

_TOTALS, _COUNTS = 3, 4
"""Lengths of ``RouterCounters.totals`` and ``counts``."""


@dataclass(frozen=True)
class PackLoad:
    """Counter of one pack's tokens per expert and router entropies on this rank: adds to the update's
    ``load_LC``. Routers call ``add`` in passes with gradients."""

    real_T: Tensor
    """float64: 1 for a document's token, 0 for padding."""
    sums_LC: Tensor
    """``load_LC`` of the update's ``RouterCounters``."""

    def add(self, layer: int, probability_TE: Tensor, expert_TK: Tensor) -> None:
        """Add the tokens that ``layer`` sends to ``expert_TK``; ``probability_TE`` covers all experts."""
        sums_C = self.sums_LC[layer - 1]
        experts, real_TK = probability_TE.shape[1], self.real_T[:, None].expand(expert_TK.shape)
        # No bincount: the host would wait for its length.
        sums_C[:experts].index_add_(0, expert_TK.flatten(), real_TK.flatten())
        entropy_T = torch.special.entr(probability_TE).sum(1, dtype=torch.float64)
        sums_C[experts:].add_(torch.stack([self.real_T.sum(), (entropy_T * self.real_T).sum()]))


@dataclass(frozen=True)
class RouterCounters:
    """An update's router counters on this rank: one float64 device vector with views for route totals, route
    differences (``counts``) and expert load (``load_LC``). ``passes.py`` sums it over all ranks."""

    version: int
    """The policy's weight version before the update."""
    has_routes: bool
    """Whether the packs have routes; if not, ``totals`` and ``counts`` stay zero."""
    layers: int
    sums: Tensor
    keeps_keys: bool = False
    """Whether engines keep keys and values of older weights (``on_update=in_place``)."""

    @classmethod
    def of(
        cls,
        batches: Sequence[MicroBatch],
        version: int,
        config: TransformerConfig,
        device: torch.device,
        keeps_keys: bool = False,
    ) -> RouterCounters | None:
        """Return zeroed counters; None for a model without experts."""
        if not config.num_moe_experts:
            return None
        length = _TOTALS + _COUNTS + config.num_layers * (config.num_moe_experts + 2)
        sums = torch.zeros(length, dtype=torch.float64, device=device)
        return cls(version, batches[0].route_TLK is not None, config.num_layers, sums, keeps_keys)

    def same_weights(self, part: MicroBatch) -> Tensor:
        """bool [T]: trained tokens sampled by an engine with the current weights, as for the engine gap."""
        version_T = part.oldest_version_T if self.keeps_keys else part.version_T
        return (part.mask_T > 0) & (version_T == self.version)

    @property
    def totals(self) -> Tensor:
        """[3]: ``pack_totals`` of the packs."""
        return self.sums[:_TOTALS]

    @property
    def counts(self) -> Tensor:
        """[4]: ``PackRoutes.counts``."""
        return self.sums[_TOTALS : _TOTALS + _COUNTS]

    @property
    def load_LC(self) -> Tensor:
        """By layer: tokens of each expert, number of tokens, sum of their router entropies."""
        return self.sums[_TOTALS + _COUNTS :].view(self.layers, -1)

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Split a vector of sums into the loss's sums, route counts (None without routes) and load."""
        loss, routes, load = vector.tensor_split(
            (len(vector) - len(self.sums), len(vector) - len(self.sums) + _TOTALS + _COUNTS)
        )
        return loss, routes if self.has_routes else None, load.view(self.layers, -1)


@dataclass(frozen=True)
class PackRoutes:
    """Routes (the engine's experts) of one pack, for this rank's tokens and one model chunk's layers, on the
    device: expert indices, tokens with known routes, whether layers use or only compare them, and
    counters."""

    expert_TLK: Tensor
    """The experts stored by the engine, for the chunk's layers."""
    known_T: Tensor
    """Whether a token's route is known; the router chooses for other tokens."""
    same_weights_T: Tensor
    """Whether the policy's current weights sampled the token predicted at this position."""
    first_layer: int
    """Number of the chunk's first layer in the model, from 1."""
    replays: bool
    """Whether the layers use these experts; if not, they choose their own and the routes are compared."""
    counts: Tensor | None
    """float64 [4], incremented in passes with gradients (None in others): tokens with a known route, those
    for which the router would choose other experts, and both for tokens sampled by the current weights."""


Choose = Callable[..., tuple[Tensor, Tensor]]


class RouterChoice:
    """A router's choice of experts, replayed or its own; stands in for megatron's ``RouterReplay``.
    ``get_replay_topk`` returns scores and indices of each token's experts; with gradients it also counts
    differences and load. The layer sets ``layer``, ``routes`` and ``load`` before each call.
    ``scores_are_probabilities``: whether the router's scores are probabilities rather than logits."""

    def __init__(self, scores_are_probabilities: bool) -> None:
        self._scores_are_probabilities = scores_are_probabilities
        self.layer = 1
        """Number of the layer in the model, from 1."""
        self.routes: PackRoutes | None = None
        self.load: PackLoad | None = None

    def get_replay_topk(
        self, score_TE: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Choose
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of each token's experts, [T, K]; ``choose`` is the router's own top k."""
        score_TK, own_TK = choose(score_TE, topk, num_groups, group_topk)
        score_TK, expert_TK = self._replayed(score_TE, score_TK, own_TK)
        load, self.load = self.load, None
        # Once per update: a recomputed layer first runs without gradients.
        if load is not None and torch.is_grad_enabled():
            score_TE = score_TE.detach()
            probability_TE = score_TE if self._scores_are_probabilities else score_TE.softmax(1)
            load.add(self.layer, probability_TE, expert_TK)
        return score_TK, expert_TK

    def _replayed(self, score_TE: Tensor, score_TK: Tensor, own_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the given experts, or of the router's own; count the differences."""
        stored, self.routes = self.routes, None
        if stored is None:
            return score_TK, own_TK
        given_TK = stored.expert_TLK[:, self.layer - stored.first_layer].to(own_TK.dtype)
        expert_TK = torch.where(stored.known_T[:, None], given_TK, own_TK)
        if stored.counts is not None and torch.is_grad_enabled():
            differs_T = (expert_TK.sort(1).values != own_TK.sort(1).values).any(1)
            same_T = stored.known_T & stored.same_weights_T
            pairs = (stored.known_T, differs_T, same_T, differs_T & same_T)
            stored.counts.add_(torch.stack([pair_T.sum(dtype=torch.float64) for pair_T in pairs]))
        if not stored.replays:
            return score_TK, own_TK
        return score_TE.gather(1, expert_TK), expert_TK


class ReplayRouter(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, choosing experts by a ``RouterChoice``: from the pack's routes, or its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = RouterChoice(self.config.moe_router_pre_softmax)


class ReplayExperts(MoELayer):  # type: ignore[misc]
    """megatron-core's expert layer under recomputation: its router gets the same routes in both runs."""

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> Any:
        # Megatron's recomputation would call the router in the backward pass, with another pack's routes.
        choice, forward = self.router.router_replay, super().forward
        routes, load = choice.routes, choice.load

        def run(hidden: Tensor) -> Any:
            choice.routes, choice.load = routes, load
            output = forward(hidden, intermediate_tensors, padding_mask)
            forget_tokens(self)
            return output

        return tensor_parallel.checkpoint(run, False, hidden_states)


class ReplayLayer(TransformerLayer):  # type: ignore[misc]
    """megatron-core's transformer layer with experts: gives its router the pack's routes and ``load`` before
    each run, and frees the dispatcher's tensors after it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mlp.moe_layer_recompute:
            self.mlp.moe_layer_recompute = False
            self.mlp.__class__ = ReplayExperts  # megatron-core warns about a custom class in the spec

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        choice, pack = self.mlp.router.router_replay, kwargs["packed_seq_params"]
        choice.layer, choice.routes, choice.load = self.layer_number, pack.routes, pack.load
        output = super().forward(*args, **kwargs)
        forget_tokens(self.mlp)
        return output


def forget_tokens(layer: MoELayer) -> None:
    """Free a dispatcher's routing tensors, which megatron-core would keep: 13 bytes per token and expert."""
    dispatcher = layer.token_dispatcher
    dispatcher.probs = dispatcher.routing_map = dispatcher.reversed_local_input_permutation_mapping = None


def unknown_T(route_TLK: Tensor) -> Tensor:
    """Whether each token's route is unknown: its first layer's row contains only the ``RouteShape`` mark."""
    mark = UNKNOWN_BYTE if route_TLK.dtype == torch.uint8 else -1
    is_unknown_T: Tensor = (route_TLK[:, 0] == mark).all(1)
    return is_unknown_T


def pack_totals(batches: Sequence[MicroBatch]) -> Tensor:
    """float64 [3] over packs: trained tokens, those with known routes, positions with unknown routes."""
    total = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        assert batch.route_TLK is not None
        known, trained = ~unknown_T(batch.route_TLK), batch.mask_T > 0
        positions = sum(count for _, _, count in batch.rows)
        total += torch.tensor([trained.sum(), (trained & known).sum(), positions - known.sum()])
    return total
