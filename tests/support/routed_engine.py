"""A scripted engine that returns routes, and the routes that it returns: a function of the token's place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bapo_megatron.data.routes import unknown_expert
from bapo_megatron.types import GenerateRequest, Generation
from tests.support.sampling import ScriptedEngine

LAYERS, PER_TOKEN, EXPERTS = 4, 2, 8
"""Those of ``tests.support.models`` with experts."""


def routes_of(prompt: int, sample: int, places: range | np.ndarray) -> np.ndarray:
    """The routes of a response's tokens at ``places``: different at each place, layer and response."""
    place = np.asarray(places)[:, None]
    first = (place + 3 * np.arange(LAYERS) + 5 * sample + prompt) % EXPERTS
    return np.stack([first, (first + 1 + place % 7) % EXPERTS], -1).astype(np.uint8)


def known_rows(routes_R: np.ndarray) -> np.ndarray:
    """Whether each token's route is known, bool [R]: in all layers or in none."""
    first = routes_R[:, 0]
    known_R: np.ndarray = (first != unknown_expert(first.dtype)).any(-1)
    return known_R


class RoutedEngine(ScriptedEngine):
    """Returns ``routes_of`` where a request asks for routes."""

    def _answer(self, request: GenerateRequest, aborted: bool) -> Generation:
        found = super()._answer(request, aborted)
        if request.routes is None:
            return found
        start, sample = request.prefix_tokens, int(request.request_id.split("-")[1])
        places = range(start, start + len(found.token_ids_R))
        return replace(found, routes_R=routes_of(int(request.input_ids[0]), sample, places))
