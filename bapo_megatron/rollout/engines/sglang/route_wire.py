"""Routes in the answers of SGLang 0.5.23: ``meta_info.routed_experts``, base64 of int32 [tokens, layers, K].

A request asks with ``return_routed_experts`` from the position that predicts its first token on
(``routed_experts_start_len``), so the rows are those of the answer's tokens. They are all but a hundredth of
an answer: 2,048 characters a token of Qwen3-30B-A3B. So they are cut out before JSON is parsed, and packed at
once. Used by ``server_process.py`` and ``wire.py``.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np

from bapo_megatron.data.routes import route_problem
from bapo_megatron.types import GenerateRequest, RouteShape

FLAG = "--enable-return-routed-experts"
"""The flag of a server that returns routes."""

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
    size = tokens * shape.layers * shape.per_token
    found = _bytes_of(text) if shape.dtype == np.uint8 else None
    if found is None:  # the plain way: for more experts, and to say what is wrong
        found = _numbers_of(text, tokens, shape)
    if found.size != size:
        raise ValueError(
            f"{found.size} experts are no routes of {tokens} tokens through {shape.layers} layers with "
            f"{shape.per_token} experts each, which are {size}"
        )
    routes = found.reshape(tokens, shape.layers, shape.per_token)
    if problem := route_problem(routes, shape):
        raise ValueError(problem)
    return routes


def _numbers_of(text: memoryview, tokens: int, shape: RouteShape) -> np.ndarray:
    """The int32 numbers in base64, packed. ValueError if one is no expert."""
    wide = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
    if wide.size and wide.view(np.uint32).max() >= shape.experts:
        place = int(wide.view(np.uint32).argmax())
        token, layer = divmod(place // shape.per_token, shape.layers)
        raise ValueError(
            f"token {token} went to expert {wide[place]} of layer {layer}; there are 0 to {shape.experts - 1}"
        )
    return wide.astype(shape.dtype)


def _bytes_of(text: memoryview) -> np.ndarray | None:
    """The numbers in base64 of int32, where all are below 256, as bytes; None where that does not hold.

    Three numbers are 16 characters, of which 9 are the zeros of the upper bytes, and 6 have the rest:

        AB AA | A BC A | AA BC | AAAA        number 0 from the first two, 1 from 5 and 6, 2 from 10 and 11

    So a sixth of the work of a decoder is left, and numpy does it for a block at a time: a third of the time
    of ``base64.b64decode``.
    """
    groups, rest = divmod(len(text), _GROUP)
    if rest:  # padding at the end: seldom
        return None
    words = np.frombuffer(text, np.uint64)
    chars_GC = np.frombuffer(text, np.uint8).reshape(groups, _GROUP)
    found_G3 = np.empty((groups, 3), np.uint8)
    used = np.empty((len(_USED), min(groups, _BLOCK)), np.uint8)
    for start in range(0, groups, _BLOCK):
        block = slice(start, start + _BLOCK)
        upper = words[2 * start : 2 * (start + _BLOCK)]
        if ((upper & _UPPER[: len(upper)]) != _ZEROS[: len(upper)]).any():
            return None
        chars = used[:, : min(groups - start, _BLOCK)]
        for row, place in enumerate(_USED):
            chars[row] = chars_GC[block, place]
        six = _values(chars)
        if ((six[3] & 15) | (six[4] >> 4) | (six[1] & 3) | (six[5] >> 2)).any():
            return None
        found_G3[block, 0] = (six[0] << 2) | (six[3] >> 4)
        found_G3[block, 1] = (six[4] << 4) | (six[1] >> 2)
        found_G3[block, 2] = (six[5] << 6) | six[2]
    return found_G3.reshape(-1)


def _values(chars: np.ndarray) -> np.ndarray:
    """The six bits of each base64 character, uint8: A to Z, a to z, 0 to 9, + and /.

    The second half of the rows has letters alone, where the numbers are below 256; others give what no byte
    does. A character that base64 has not gives a wrong expert, if it comes here.
    """
    value = chars - np.uint8(65)
    value -= (chars > 96).view(np.uint8) * np.uint8(6)
    any_C, any_value = chars[: len(chars) // 2], value[: len(chars) // 2]
    any_value += (any_C < 58).view(np.uint8) * np.uint8(69)
    any_value += (any_C == 43).view(np.uint8) * np.uint8(15)
    any_value += (any_C == 47).view(np.uint8) * np.uint8(12)
    return value


_GROUP = 16
"""Characters of three numbers."""

_BLOCK = 1 << 15
"""Groups that are decoded at a time: what fits a processor's cache."""

_USED = (0, 6, 11, 1, 5, 10)
"""The places of the characters of a group that are not always ``A``, zero: first those that may be any."""

_UPPER = np.frombuffer(bytes(0 if n in _USED else 255 for n in range(_GROUP)) * _BLOCK, np.uint64)
_ZEROS = np.frombuffer(bytes(0 if n in _USED else 65 for n in range(_GROUP)) * _BLOCK, np.uint64)
"""The other characters of a block of groups, and what they are."""
