"""Replay of routes (mixture of experts): a token goes to the experts that the engine sent it to.

Routes ride in the pack (``DocumentPack.routes``), so no order of a pipeline schedule, no recomputation and no
pass without gradients needs a switch: a layer hands its router the pack's routes before it runs, and again
when it is recomputed. Megatron's own replay is not used but for its place in the router: it is one switch for
the process, which must turn between the forward and the backward step of each micro-batch.

The weights of the given experts are the router's own, from its logits, differentiable as ever. Without replay
(``PackRoutes.replays`` False) the layers choose by themselves, and the routes are only compared.

Shapes: ``_T`` tokens of this rank, ``_K`` experts of a token, ``_E`` experts. Used in ``policy/attention/``
and this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from bapo_megatron.data.packing import UNKNOWN_BYTE
from bapo_megatron.policy.expert_load import LayerLoad, PackLoad
from bapo_megatron.tensor_types import MicroBatch


@dataclass(frozen=True)
class LayerRoutes:
    """The routes of one layer in one pack, as plain data on the device.

    Made by ``PackRoutes.of_layer``, read by ``RouterChoice``.
    """

    expert_TK: Tensor
    known_T: Tensor
    """Whether a token's route is known; the router chooses for the others."""
    same_weights_T: Tensor
    """Whether the policy's present weights sampled the token that it predicts."""
    replays: bool
    counts: Tensor | None


@dataclass(frozen=True)
class PackRoutes:
    """The routes of a pack for the layers of one model chunk, on the device, for the tokens of this rank.

    Made by ``PolicyModel.document_pack`` for each pass over a pack; part of its ``DocumentPack``.
    """

    expert_TLK: Tensor
    """As the engine stored them, of the chunk's layers."""
    known_T: Tensor
    same_weights_T: Tensor
    first_layer: int
    """Number of the chunk's first layer in the model, from 1 on."""
    replays: bool
    """Whether the layers take these experts; else they choose by themselves, and the routes are compared."""
    counts: Tensor | None
    """float64 [4], to which each layer of a pass with gradients adds: tokens with a known route, those
    among them for which its router chooses another set of experts, and both of the tokens that the present
    weights sampled. None in other passes."""

    def of_layer(self, number: int) -> LayerRoutes:
        """The routes of the layer with this ``number`` in the model, from 1 on."""
        expert_TK = self.expert_TLK[:, number - self.first_layer]
        return LayerRoutes(expert_TK, self.known_T, self.same_weights_T, self.replays, self.counts)


Choose = Callable[..., tuple[Tensor, Tensor]]


class RouterChoice:
    """A router's choice of experts, in the place of megatron's ``RouterReplay``: the given ones, or its own.

    Made by ``ReplayRouter``; the layer sets ``routes`` and ``load`` before each call.
    ``scores_are_probabilities``: whether the scores are; else they are the router's logits.
    """

    def __init__(self, scores_are_probabilities: bool) -> None:
        self._scores_are_probabilities = scores_are_probabilities
        self.routes: LayerRoutes | None = None
        self.load: LayerLoad | None = None

    def get_replay_topk(
        self, score_TE: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Choose
    ) -> tuple[Tensor, Tensor]:
        """The scores and numbers of each token's experts, [T, K]; ``choose`` is the router's own top k."""
        score_TK, own_TK = choose(score_TE, topk, num_groups, group_topk)
        score_TK, expert_TK = self._replayed(score_TE, score_TK, own_TK)
        load, self.load = self.load, None
        # Once an update: a recomputed layer runs without gradients first.
        if load is not None and torch.is_grad_enabled():
            score_TE = score_TE.detach()
            load.add(score_TE if self._scores_are_probabilities else score_TE.softmax(1), expert_TK)
        return score_TK, expert_TK

    def _replayed(self, score_TE: Tensor, score_TK: Tensor, own_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the given experts, or of the router's own; how they differ is counted."""
        given, self.routes = self.routes, None
        if given is None:
            return score_TK, own_TK
        expert_TK = torch.where(given.known_T[:, None], given.expert_TK.to(own_TK.dtype), own_TK)
        if given.counts is not None and torch.is_grad_enabled():
            differs_T = (expert_TK.sort(1).values != own_TK.sort(1).values).any(1)
            same_T = given.known_T & given.same_weights_T
            pairs = (given.known_T, differs_T, same_T, differs_T & same_T)
            given.counts.add_(torch.stack([pair_T.sum(dtype=torch.float64) for pair_T in pairs]))
        if not given.replays:
            return score_TK, own_TK
        return score_TE.gather(1, expert_TK), expert_TK


class ReplayRouter(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, which takes the experts that its layer hands it, or compares them with its own.

    megatron-core makes one for each layer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = RouterChoice(self.config.moe_router_pre_softmax)


class ReplayExperts(MoELayer):  # type: ignore[misc]
    """megatron-core's layer of experts, whose own recomputation hands the router its pack's routes again.

    Made of megatron-core's by ``ReplayLayer``.
    """

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> Any:
        """The experts' output, as megatron-core's."""
        # Megatron's would call the router in the backward pass, when it has the routes of another pack.
        choice, forward = self.router.router_replay, super().forward
        routes, load = choice.routes, choice.load

        def run(hidden: Tensor) -> Any:
            choice.routes, choice.load = routes, load
            output = forward(hidden, intermediate_tensors, padding_mask)
            forget_tokens(self)
            return output

        return tensor_parallel.checkpoint(run, False, hidden_states)


class ReplayLayer(TransformerLayer):  # type: ignore[misc]
    """megatron-core's layer, which hands its router the pack's routes, and where to count its tokens.

    megatron-core makes one for each layer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mlp.moe_layer_recompute:
            self.mlp.moe_layer_recompute = False
            self.mlp.__class__ = ReplayExperts  # megatron-core warns of a spec with a class of one's own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, as megatron-core's."""
        routes: PackRoutes | None = kwargs["packed_seq_params"].routes
        load: PackLoad | None = kwargs["packed_seq_params"].load
        choice, number = self.mlp.router.router_replay, self.layer_number
        choice.routes = None if routes is None else routes.of_layer(number)
        choice.load = None if load is None else load.of_layer(number)
        output = super().forward(*args, **kwargs)
        forget_tokens(self.mlp)
        return output


def forget_tokens(layer: MoELayer) -> None:
    """Release what the dispatcher of ``layer`` keeps of its last tokens: 13 bytes for each and each expert.

    megatron-core reads it no more once the layer's output is there, and keeps it until the next pack.
    """
    dispatcher = layer.token_dispatcher
    dispatcher.probs = dispatcher.routing_map = dispatcher.reversed_local_input_permutation_mapping = None


def replaying(spec: ModuleSpec) -> ModuleSpec:
    """The spec of a layer with experts, changed so that it replays routes."""
    spec.module = ReplayLayer
    spec.submodules.mlp.submodules.router = ReplayRouter
    return spec


def unknown_T(route_TLK: Tensor) -> Tensor:
    """Whether each token's route is unknown: its row is the mark of ``RouteShape`` throughout."""
    mark = UNKNOWN_BYTE if route_TLK.dtype == torch.uint8 else -1
    found: Tensor = (route_TLK[:, 0] == mark).all(1)
    return found


def pack_totals(batches: Sequence[MicroBatch]) -> Tensor:
    """Of whole packs, float64 [3]: trained tokens, those of known routes, positions of unknown ones.

    Padding counts nowhere.
    """
    total = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        assert batch.route_TLK is not None
        known, trained = ~unknown_T(batch.route_TLK), batch.mask_T > 0
        positions = sum(count for _, _, count in batch.rows)
        total += torch.tensor([trained.sum(), (trained & known).sum(), positions - known.sum()])
    return total
