"""Routes in the answers of SGLang 0.5.23: ``meta_info.routed_experts``, base64 of int32 [tokens, layers, K].

A request asks with ``return_routed_experts`` from the position that predicts its first token on
(``routed_experts_start_len``), so the rows are those of the answer's tokens. They are all but a hundredth of
an answer: 2,048 characters a token of Qwen3-30B-A3B. So they are cut out before JSON is parsed, and packed at
once; ``pybase64`` decodes them in a fiftieth of the standard library's time. Used by ``engine.py``
and ``wire.py``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pybase64

from bapo_megatron.data.routes import route_problem, unknown_expert
from bapo_megatron.types import GenerateRequest, Generation, RouteShape

_FIELD = re.compile(rb'"routed_experts"\s*:\s*"')


def asked_fields(request: GenerateRequest) -> dict[str, Any]:
    """The fields of a request's body that ask for routes; none if it asks for none."""
    if request.routes is None:
        return {}
    return {"return_routed_experts": True, "routed_experts_start_len": len(request.input_ids) - 1}


def without_routes(body: bytes) -> tuple[bytes, memoryview | None]:
    """An answer's JSON with an empty string for its routes, and their text; None if it has none."""
    found = _FIELD.search(body)
    if found is None:
        return body, None
    end = body.index(b'"', found.end())
    return body[: found.end()] + body[end:], memoryview(body)[found.end() : end]


def decoded_routes(text: memoryview, tokens: int, shape: RouteShape) -> np.ndarray:
    """The routes of an answer of so many ``tokens``, packed. ValueError if they are none of this model."""
    wide = np.frombuffer(pybase64.b64decode(text, validate=True), np.int32)
    size = tokens * shape.layers * shape.per_token
    if wide.size != size:
        raise ValueError(
            f"{wide.size} experts are no routes of {tokens} tokens through {shape.layers} layers with "
            f"{shape.per_token} experts each, which are {size}"
        )
    routes = _packed(wide, shape).reshape(tokens, shape.layers, shape.per_token)
    if problem := route_problem(routes, shape):
        raise ValueError(problem)
    return routes


def unknown_routes(tokens: int, shape: RouteShape) -> np.ndarray:
    """Unknown routes of so many ``tokens``, packed."""
    return np.full(
        (tokens, shape.layers, shape.per_token), unknown_expert(shape.dtype), np.dtype(shape.dtype)
    )


def without_old_routes(found: Generation) -> Generation:
    """The generation without the routes of older weights' tokens: a retraction has replaced them.

    The server has computed the prefix again, under the newest weights.
    """
    if found.routes_R is None or (found.versions_R == found.versions_R[-1:]).all():
        return found
    routes_R = found.routes_R.copy()
    routes_R[found.versions_R != found.versions_R[-1]] = unknown_expert(routes_R.dtype)
    return replace(found, routes_R=routes_R)


def _packed(wide: np.ndarray, shape: RouteShape) -> np.ndarray:
    """The int32 numbers in the type in which routes are stored. ValueError if one does not fit in it."""
    numbers = wide.view(np.uint32)
    if numbers.size and numbers.max() > np.iinfo(shape.dtype).max:
        place = int(numbers.argmax())
        token, layer = divmod(place // shape.per_token, shape.layers)
        raise ValueError(
            f"token {token} went to expert {wide[place]} of layer {layer}; there are 0 to {shape.experts - 1}"
        )
    return wide.astype(shape.dtype)
