"""Routes of a rehearsal: how many copies of tokens a rank's experts get, which only real routers would say.

The rehearsed rank is the busiest of its EP group: each peer sends it ``imbalance`` times the mean, spread
evenly over its experts, and it spreads what is left over its peers. All sizes of messages and of the experts'
inputs follow from these numbers, so no router is asked. Packs carry routes that are even, as an engine would
return them, where the recipe asks for routes. Used by ``program.py`` and ``rank.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from bapo_megatron.hf.config import ModelShape
from bapo_megatron.planning.rehearsal.fake.values import ShapesFromValues, know
from bapo_megatron.step_header import RouteShape


def even_routes(shape: ModelShape, tokens: int) -> np.ndarray | None:
    """Routes [tokens, layers, experts of a token] in which all experts come as often; None without."""
    if shape.experts is None:
        return None
    stored = RouteShape(shape.layers, shape.experts.per_token, shape.experts.count)
    place = np.arange(tokens * stored.per_token).reshape(tokens, 1, stored.per_token)
    routes = np.broadcast_to(place % stored.experts, (tokens, stored.layers, stored.per_token))
    return np.ascontiguousarray(routes, dtype=stored.dtype)


def parts(whole: int, count: int) -> list[int]:
    """``whole`` in ``count`` nearly equal parts, larger ones first."""
    return [whole // count + (number < whole % count) for number in range(count)]


def spread_copies(imbalance: float, shapes: ShapesFromValues) -> None:
    """Patch megatron-core's dispatcher: the sizes of its messages are those of the busiest rank.

    ``shapes``: answers for masks of unknown values, which torch's permutation selects by.
    """
    dispatcher: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    plain_preprocess, plain_permute = dispatcher.preprocess, token_dispatcher.permute

    def preprocess(self: Any, routing_map: Tensor) -> Tensor:
        of_experts: Tensor = plain_preprocess(self, routing_map)
        _tell_sizes(self, of_experts, len(routing_map) * self.config.moe_router_topk, imbalance)
        return of_experts

    def permute(*args: Any, **kwargs: Any) -> Any:
        with shapes.selecting(kwargs["num_out_tokens"]):
            return plain_permute(*args, **kwargs)

    dispatcher.preprocess = preprocess
    token_dispatcher.permute = permute  # type: ignore[attr-defined]


def _tell_sizes(dispatcher: Any, of_experts: Tensor, copies: int, imbalance: float) -> None:
    """Attach values to what the dispatcher has counted. ``copies``: of the tokens that a rank routes."""
    size, gathered, local = dispatcher.ep_size, dispatcher.tp_size, dispatcher.num_local_experts
    here = round(copies * min(imbalance, size) / size)  # that each rank sends to this one
    own = dispatcher.ep_group.rank() if size > 1 else 0
    sent = parts(copies - here, size - 1) if size > 1 else []
    sent.insert(own, here)
    by_expert = parts(here, local)
    _tell(dispatcher.input_splits, sent)
    _tell(dispatcher.output_splits, [here] * size)
    _tell(dispatcher.output_splits_tp, [here * size] * gathered)
    _tell(of_experts, [count * size * gathered for count in by_expert])
    if local > 1:
        _tell(dispatcher.num_global_tokens_per_local_expert, [by_expert] * (size * gathered))


def _tell(tensor: Tensor | None, values: list[Any]) -> None:
    if tensor is not None:
        with unset_fake_temporarily():
            know(tensor, torch.tensor(values, dtype=tensor.dtype).reshape(tensor.shape))
