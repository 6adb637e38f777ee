"""Routes in the answers of SGLang 0.5.23: ``meta_info.routed_experts``, base64 of int32 [tokens, layers, K].

A request asks with ``return_routed_experts`` from the position that predicts its first token on
(``routed_experts_start_len``), so the rows are those of the answer's tokens. They are all but a hundredth of
an answer: 2,048 characters a token of Qwen3-30B-A3B. So they are cut out before JSON is parsed, and packed at
once. Used by ``server_process.py`` and ``wire.py``.
"""

from __future__ import annotations

import base64
import re
import string
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
    wide = _int32_of(text)
    if wide.size and wide.view(np.uint32).max() >= shape.experts:
        place = int(wide.view(np.uint32).argmax())
        token, layer = divmod(place // shape.per_token, shape.layers)
        raise ValueError(
            f"token {token} went to expert {wide[place]} of layer {layer}; there are 0 to {shape.experts - 1}"
        )
    return wide.astype(shape.dtype)


def _int32_of(text: memoryview) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), np.int32)


def _bytes_of(text: memoryview) -> np.ndarray | None:
    """The numbers in base64 of int32, where all are below 256, as bytes; None where that does not hold.

    Three numbers are 16 characters, of which 10 are the zeros of the upper bytes:

        AB AA | A BC A | AA BC | AAAA        numbers 0, 1 and 2 from the characters 0-1, 5-6 and 10-11

    So each number is a look-up by two characters, which numpy does for a block at a time: in a seventh of the
    time of ``base64.b64decode``. A pair that is no base64 of a number below 256 is not in its table.
    """
    groups, rest = divmod(len(text), _GROUP)
    found = np.empty(3 * groups, np.uint8)
    for start in range(0, groups, _BLOCK):
        count = min(_BLOCK, groups - start)
        chars = np.frombuffer(text, np.uint8, count * _GROUP, start * _GROUP)
        if not _has_zeros(chars):
            return None
        for number, (table, highest) in enumerate(_TABLES):
            pairs = np.ndarray((count,), "<u2", text, start * _GROUP + 5 * number, (_GROUP,))
            values = np.take(table, pairs)
            is_high = values == _HIGHEST
            if is_high.any() and (pairs[is_high] != highest).any():
                return None
            found[3 * start + number : 3 * (start + count) : 3] = values
    if not rest:
        return found
    last = _int32_of(text[-rest:])
    return np.append(found, last.astype(np.uint8)) if (last.view(np.uint32) < 256).all() else None


def _has_zeros(chars: np.ndarray) -> bool:
    """Whether the upper bytes of all numbers are zeros: the characters at their places are ``A``."""
    whole = len(chars) - len(chars) % _LINE
    lines, rest = chars[:whole].reshape(-1, _LINE), chars[whole:].reshape(-1, _GROUP)
    for combine in (np.bitwise_or, np.bitwise_and):  # equal bytes, and no others, are what both give
        combined = combine.reduce(combine.reduce(lines, 0).reshape(-1, _GROUP), 0)
        if (combine(combined, combine.reduce(rest, 0))[_ZEROS] != ord("A")).any():
            return False
    return True


def _pair_table(left: int, right: int) -> tuple[np.ndarray, int]:
    """The number of each pair of characters, and the pair of 255, which also stands where there is no number.

    The number is six bits of the first character, shifted by ``left``, and those of the second, shifted by
    ``right``; what is shifted out must be zero. The first character is the pair's lower byte.
    """
    letters = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    codes = np.frombuffer(letters.encode(), np.uint8).astype(np.uint16)
    first, second = np.meshgrid(np.arange(64), np.arange(64), indexing="ij")
    values, pairs = (first << left) | (second >> right), codes[first] | codes[second] << 8
    is_number = (values <= _HIGHEST) & (second & ((1 << right) - 1) == 0)
    table = np.full(1 << 16, _HIGHEST, np.uint8)
    table[pairs[is_number]] = values[is_number]
    return table, int(pairs[is_number & (values == _HIGHEST)][0])


_GROUP = 16
"""Characters of three numbers."""

_BLOCK = 1 << 16
"""Groups that are decoded at a time: many, since each of a dozen calls of numpy costs a microsecond."""

_LINE = 256 * _GROUP
"""Characters that are compared with others at a time."""

_ZEROS = np.array([2, 3, 4, 7, 8, 9, 12, 13, 14, 15])
"""Places in a group of the characters that are zero."""

_HIGHEST = 255
_TABLES = (_pair_table(2, 4), _pair_table(4, 2), _pair_table(6, 0))
