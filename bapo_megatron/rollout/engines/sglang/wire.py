"""Wire format of SGLang 0.5.23's ``POST /generate``: request encoder and validating answer decoder.

``generate_payload(request, rid)`` returns the body, and ``generation_of(request, body)`` the ``Generation``
in an answer; it raises BadReply. Log-probs are those of softmax(logits / temperature). Top-p and top-k are
always off, because SGLang's log-probs ignore the truncation.

Routes (each token's experts) are ``meta_info.routed_experts``, base64 of int32 [tokens, layers, experts per
token], starting at the position that predicts the first answer token (``routed_experts_start_len``): one row
per answer token. They fill 99 % of an answer, 2,048 characters per token of Qwen3-30B-A3B, so they are cut
out before JSON parsing and packed; ``pybase64`` decodes them 50 times faster than the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import orjson
import pybase64

from bapo_megatron.data.routes import route_problem, unknown_expert
from bapo_megatron.rollout.engines.sglang.requirements import RESERVED_TOKENS
from bapo_megatron.types import FinishReason, GenerateRequest, Generation, RouteShape

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_ROUTES = re.compile(rb'"routed_experts"\s*:\s*"')

_NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""SGLang's defaults, sent because a server's ``--preferred-sampling-params`` replace omitted fields and would
change the distribution without a trace in the log-probs."""


class BadReply(Exception):
    """An answer is not a valid generation, so it must not be trained on; the message says why."""


def generate_payload(request: GenerateRequest, rid: str) -> bytes:
    """Return the body of ``POST /generate``; ``rid`` must be new to the server."""
    params = request.params
    about = {
        "rid": rid,
        "return_logprob": True,
        "sampling_params": {
            "temperature": params.temperature,
            "max_new_tokens": params.max_new_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": not params.stop_token_ids,  # True would also ignore stop_token_ids
            "skip_special_tokens": False,
            **_NEUTRAL,
        },
    }
    if request.routes is not None:
        about |= {"return_routed_experts": True, "routed_experts_start_len": len(request.input_ids) - 1}
    body = {**about, "input_ids": np.ascontiguousarray(request.input_ids)}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def generation_of(request: GenerateRequest, body: bytes) -> Generation:
    """Decode the answer to ``request``. Raises BadReply if it is invalid and must not be trained on."""
    routes = None
    try:
        if request.routes is not None:
            body, routes = _without_routes(body)
        reply = orjson.loads(body)
        about = reply["meta_info"]
        rows = about.get("output_token_logprobs") or []  # [[log_prob, id, text], ...]
        generation = Generation(
            request_id=request.request_id,
            token_ids_R=np.fromiter(map(itemgetter(1), rows), np.int32, len(rows)),
            log_probs_R=np.fromiter(map(itemgetter(0), rows), np.float32, len(rows)),
            versions_R=_versions(about, len(rows)),
            finish_reason=(reason := _FINISH[about["finish_reason"]["type"]]),
            routes_R=_routes(request, routes, len(rows), reason),
        )
        if about.get("num_retractions"):
            generation = without_old_routes(generation)
        listed = reply.get("output_ids")
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadReply(f"no generation: {error!r} in {body[:300]!r}") from error
    for problem in _problems(request, generation, listed):
        raise BadReply(f"request {request.request_id!r}: {problem}")
    return generation


def _routes(
    request: GenerateRequest, text: memoryview | None, tokens: int, reason: FinishReason
) -> np.ndarray | None:
    """Return an answer's routes; None if it has none, for which the caller ends the run. Raises BadReply if
    they do not fit the model. Invalid all-zero routes count as none: the server's kernel chooses experts
    itself (``ROUTED_KERNEL`` in requirements.py). An aborted answer with tokens but no routes, from a request
    that waited for free cache (``_handle_abort_req`` in tokenizer_manager.py), gets unknown routes."""
    if request.routes is None:
        return None
    if text is None:
        size = (tokens, request.routes.layers, request.routes.per_token)
        unknown = unknown_expert(request.routes.dtype)
        return np.full(size, unknown, request.routes.dtype) if tokens and reason == "abort" else None
    try:
        return decoded_routes(text, tokens, request.routes)
    except ValueError as error:
        if text and reason != "abort" and not bytes(text).strip(b"A="):  # zeros alone, in base64
            return None
        raise BadReply(f"request {request.request_id!r}: its routes are wrong: {error}") from error


def _versions(about: Mapping[str, Any], tokens: int) -> np.ndarray:
    """Return each token's weight version, from spans ``{version, start, end}`` or one version for all."""
    versions_R = np.full(tokens, int(about["weight_version"]), np.int32)
    for span in about.get("weight_versions") or []:
        versions_R[int(span["start"]) : int(span["end"])] = int(span["version"])
    return versions_R


def _problems(request: GenerateRequest, generation: Generation, listed: Any) -> list[str]:
    problems = []
    tokens, limit = generation.token_ids_R, request.params.max_new_tokens
    if listed is not None and listed != tokens.tolist():
        problems.append(f"its {len(tokens)} log-probs belong to other tokens than those it lists")
    if len(tokens) > limit:
        problems.append(f"{len(tokens)} tokens where {limit} were asked for")
    if not np.isfinite(generation.log_probs_R).all() or (generation.log_probs_R > 1e-4).any():
        problems.append("a log-prob that is above 0 or not finite")
    if generation.finish_reason == "length" and len(tokens) != limit:
        problems.append(
            f"finished by length after {len(tokens)} of {limit} tokens: its --context-length and KV cache "
            f"must have room for {RESERVED_TOKENS} more than the sequence's {len(request.input_ids) + limit}"
        )
    if generation.finish_reason == "stop" and (
        not len(tokens) or tokens[-1] not in request.params.stop_token_ids
    ):
        problems.append("finished by a stop token that was not asked for")
    return problems


def _without_routes(body: bytes) -> tuple[bytes, memoryview | None]:
    """Cut the routes out of an answer; returns the remaining JSON and their base64 text or None."""
    match = _ROUTES.search(body)
    if match is None:
        return body, None
    end = body.index(b'"', match.end())
    return body[: match.end()] + body[end:], memoryview(body)[match.end() : end]


def decoded_routes(text: memoryview, tokens: int, shape: RouteShape) -> np.ndarray:
    """Decode and pack the routes of ``tokens`` tokens. Raises ValueError if they do not fit ``shape``."""
    wide = np.frombuffer(pybase64.b64decode(text, validate=True), np.int32)
    size = tokens * shape.layers * shape.per_token
    if wide.size != size:
        raise ValueError(
            f"{wide.size} experts are not routes of {tokens} tokens through {shape.layers} layers with "
            f"{shape.per_token} experts each, which are {size}"
        )
    if size and wide.view(np.uint32).max() > np.iinfo(shape.dtype).max:
        raise ValueError(f"expert {wide[wide.view(np.uint32).argmax()]}; there are 0 to {shape.experts - 1}")
    routes = wide.astype(shape.dtype).reshape(tokens, shape.layers, shape.per_token)
    if problem := route_problem(routes, shape):
        raise ValueError(problem)
    return routes


def without_old_routes(generation: Generation) -> Generation:
    """Return the generation with unknown routes for tokens of older weights: a retraction recomputed them."""
    if generation.routes_R is None or (generation.versions_R == generation.versions_R[-1:]).all():
        return generation
    routes_R = generation.routes_R.copy()
    routes_R[generation.versions_R != generation.versions_R[-1]] = unknown_expert(routes_R.dtype)
    return replace(generation, routes_R=routes_R)
