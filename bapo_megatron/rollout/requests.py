"""What a request must be. Checked before sampling, because a bad id can take an engine down."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from bapo_megatron.types import GenerateRequest


def check_requests(requests: Sequence[GenerateRequest], vocabulary: int, context: int) -> None:
    """Raise ValueError that names the first malformed request and its mistake.

    ``vocabulary``: token ids are below it. ``context``: most tokens of prompt and response together.
    """
    for request in requests:
        for problem in _problems(request, vocabulary, context):
            raise ValueError(f"request {request.request_id!r}: {problem}")


def _problems(request: GenerateRequest, vocabulary: int, context: int) -> Iterator[str]:
    ids, params = np.asarray(request.input_ids), request.params
    if ids.ndim != 1 or len(ids) == 0:
        yield f"input_ids has shape {ids.shape}; it must be a list of at least one token"
    elif not np.issubdtype(ids.dtype, np.integer):
        yield f"input_ids are {ids.dtype}, not integers"
    elif ids.min() < 0 or ids.max() >= vocabulary:
        yield f"input_ids span {ids.min()} to {ids.max()}; the vocabulary is 0 to {vocabulary - 1}"
    if params.max_new_tokens < 1:
        yield f"max_new_tokens={params.max_new_tokens} must be at least 1"
    if len(ids) + params.max_new_tokens > context:
        yield (
            f"{len(ids)} input tokens and max_new_tokens={params.max_new_tokens} are more than the "
            f"model's context (max_position_embeddings={context})"
        )
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        yield f"temperature={params.temperature} must be 0 (greedy) or a positive number"
    if params.seed is not None and params.seed < 0:
        yield f"seed={params.seed} must not be negative"
    if not 0 <= request.prefix_tokens <= len(ids):
        yield f"prefix_tokens={request.prefix_tokens} must be between 0 and the {len(ids)} input tokens"
