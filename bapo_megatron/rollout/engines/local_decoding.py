"""Batched autoregressive decoding with a Hugging Face model: requests in, generations with log-probs out.

``LocalModel`` (local_engine.py) calls ``Decoding``, which decodes one batch, one token of every open row per
``step``. Tokens are drawn by inverse CDF, independently of the other rows, or greedily at temperature 0:

    token = min { v : sum_{u <= v} p_u >= draw },  p = softmax(logits / temperature),  draw in (0, 1]

Shapes (suffixes of names): ``_N`` requests, ``_B`` rows still in the batch, ``_U`` distinct prompts, ``_L``
padded prompt, ``_R`` longest response, ``_V`` vocabulary, ``_LK`` layers and experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from bapo_megatron.types import FinishReason, GenerateRequest, Generation


def draws_R(request: GenerateRequest) -> np.ndarray:
    """Return a request's uniform draws in (0, 1], float64, one per token up to ``max_new_tokens``. With a
    seed, a later segment skips its prefix's draws: a response in segments equals one sampled in one piece."""
    params = request.params
    uniform = np.random.default_rng(params.seed).random(request.prefix_tokens + params.max_new_tokens)
    return 1.0 - uniform[request.prefix_tokens :]


def sample(logits_BV: Tensor, temperature_B: Tensor, draw_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's token (int64) and log-prob (float32, nats) under softmax(logits / temperature). The
    CDF is float64. Temperature 0 is greedy, with the log-prob at temperature 1, as in SGLang. Raises
    FloatingPointError if the logits are not finite."""
    greedy_B = temperature_B == 0
    scale_B = torch.where(greedy_B, 1.0, temperature_B)
    log_prob_BV = torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    cumulative_BV = log_prob_BV.double().exp_().cumsum(dim=-1)
    total_B1 = cumulative_BV[:, -1:]
    if not bool(torch.isfinite(total_B1).all()):
        raise FloatingPointError("the logits are not finite: the model's weights have overflowed")
    # Draws are in (0, 1], so the token exists and never has probability 0.
    drawn_B = torch.searchsorted(cumulative_BV, draw_B[:, None] * total_B1)[:, 0]
    token_B = torch.where(greedy_B, log_prob_BV.argmax(dim=-1), drawn_B)
    # On a CPU log_softmax sums sequentially in float32: with 49,152 entries its total is off by 1e-5.
    chosen_B = log_prob_BV.gather(1, token_B[:, None])[:, 0] - total_B1[:, 0].log()
    return token_B, chosen_B.float()


NO_TOKEN = -1
"""Padding of the stop-token lists."""

COMPACT_BELOW = 0.75
"""Largest share of open rows at which finished rows are removed, which copies the KV cache."""

BLOCK = 64
"""KV cache allocation step, in tokens."""


class RouteRecorder:
    """Recorder of a model's expert routes while ``is_on``: a hook on each router keeps the experts chosen in
    a forward pass; ``take`` returns and clears those of each row's last position. Not thread-safe."""

    def __init__(self, model: Any) -> None:
        self.is_on = False
        """Whether to record passes: only while a request asks for routes."""
        self._noted: list[Tensor] = []
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, _router: Any, _input: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self.is_on:
            self._noted.append(output[2])

    def take(self, rows: int) -> Tensor:
        """Return and clear the routes of each row's last position, [rows, layers, per_token]."""
        noted, self._noted = self._noted, []
        return torch.stack([chosen.view(rows, -1, chosen.shape[-1])[:, -1] for chosen in noted], 1)


class Decoding:
    """Decoding of one batch of requests, left-padded so that all prompts end in the same column. Call
    ``step`` until ``done`` (or an abort), then ``results``, which returns the generations. Calls block."""

    def __init__(self, model: Any, requests: Sequence[GenerateRequest], recorder: RouteRecorder) -> None:
        self._model = model
        self._recorder = recorder
        asked = [request.routes for request in requests if request.routes is not None]
        recorder.is_on = bool(asked)
        self._routes = asked[0] if asked else None
        self._requests = requests
        self._device = model.device
        self._cache = block_cache(model.config)
        longest = max(request.params.max_new_tokens for request in requests)
        self._start_output(len(requests), longest)
        self._start_rows(longest)
        self._pad_prompts(longest)

    def _start_output(self, count: int, longest: int) -> None:
        self._made = 0
        self._token_NR = np.zeros((count, longest), np.int32)
        self._log_prob_NR = np.zeros((count, longest), np.float32)
        self._version_R = np.zeros(longest, np.int32)
        self._length_N = np.zeros(count, np.int64)
        self._reason_N: list[FinishReason] = ["abort"] * count
        if self._routes is not None:
            row = (self._routes.layers, self._routes.per_token)
            self._route_NRLK = np.zeros((count, longest, *row), self._routes.dtype)
            self._route_BLK = torch.zeros(0, *row)

    def _start_rows(self, longest: int) -> None:
        params = [request.params for request in self._requests]
        stops = max(len(p.stop_token_ids) for p in params)
        stop_BS = np.full((len(params), stops), NO_TOKEN, np.int64)
        draw_BR = np.ones((len(params), longest))
        for row, request in enumerate(self._requests):
            stop_BS[row, : len(params[row].stop_token_ids)] = params[row].stop_token_ids
            draw_BR[row, : params[row].max_new_tokens] = draws_R(request)
        self._row_B = np.arange(len(params))
        self._open_B = np.ones(len(params), bool)
        self._stop_BS = stop_BS
        self._limit_B = np.array([p.max_new_tokens for p in params])
        self._temperature_B = torch.tensor([p.temperature for p in params], device=self._device)
        self._draw_BR = torch.from_numpy(draw_BR).to(self._device)

    def _pad_prompts(self, longest: int) -> None:
        place: dict[tuple[int, ...], int] = {}  # of each distinct prompt, in order of first rows
        prompts = [tuple(request.input_ids.tolist()) for request in self._requests]
        self._prompt_B = [place.setdefault(prompt, len(place)) for prompt in prompts]
        width = max(len(request.input_ids) for request in self._requests)
        ids_BL = np.zeros((len(self._requests), width), np.int64)
        mask_BT = np.ones((len(self._requests), width + longest), bool)
        for row, request in enumerate(self._requests):
            padding = width - len(request.input_ids)
            ids_BL[row, padding:] = request.input_ids
            mask_BT[row, :padding] = False
        self._mask_BT = torch.from_numpy(mask_BT).to(self._device)
        self._next_ids = torch.from_numpy(ids_BL).to(self._device)
        self._next_positions = (self._mask_BT[:, :width].cumsum(dim=1) - 1).clamp(min=0)
        self._columns = width

    @property
    def done(self) -> bool:
        return not self._open_B.any()

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Sample a token of weight ``version`` for each open request; FloatingPointError as in ``sample``."""
        logits_BV = self._forward()
        token_B, log_prob_B = sample(logits_BV, self._temperature_B, self._draw_BR[:, self._made])
        self._record(token_B.cpu().numpy(), log_prob_B.cpu().numpy(), version)
        self._next_ids = token_B[:, None]
        self._next_positions = self._next_positions[:, -1:] + 1
        self._columns += 1
        if 0 < self._open_B.sum() <= COMPACT_BELOW * len(self._open_B):
            self._drop_finished()

    def _forward(self) -> Tensor:
        mask_BT = self._mask_BT[:, : self._columns]
        if self._made == 0:
            return self._prefill(mask_BT)
        return self._call(self._next_ids, mask_BT, self._next_positions)

    def _prefill(self, mask_BL: Tensor) -> Tensor:
        """Return the logits after the prompts; equal prompts, such as a group's, are prefilled once."""
        first = [self._prompt_B.index(place) for place in range(max(self._prompt_B) + 1)]
        rows = torch.tensor(first, device=self._device)
        logits_UV = self._call(self._next_ids[rows], mask_BL[rows], self._next_positions[rows])
        if len(first) == len(self._prompt_B):
            return logits_UV
        prompt_B = torch.tensor(self._prompt_B, device=self._device)
        self._cache.batch_select_indices(prompt_B)
        if self._routes is not None:
            self._route_BLK = self._route_BLK[prompt_B]
        return logits_UV[prompt_B]

    def _call(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        if self._routes is not None:
            self._route_BLK = self._recorder.take(len(ids))
        return logits[:, -1]

    def _record(self, token_B: np.ndarray, log_prob_B: np.ndarray, version: int) -> None:
        row, at = self._row_B, self._made
        self._token_NR[row, at] = token_B
        self._log_prob_NR[row, at] = log_prob_B
        if self._routes is not None:
            self._route_NRLK[row, at] = self._route_BLK.cpu().numpy()
        self._version_R[at] = version
        self._made += 1
        self._length_N[row[self._open_B]] = self._made
        stopped_B = self._open_B & (self._stop_BS == token_B[:, None]).any(axis=1)
        full_B = self._open_B & ~stopped_B & (self._limit_B <= self._made)
        self._finish(stopped_B, "stop")
        self._finish(full_B, "length")

    def _finish(self, finished_B: np.ndarray, reason: FinishReason) -> None:
        for index in self._row_B[finished_B].tolist():
            self._reason_N[index] = reason
        self._open_B &= ~finished_B

    def _drop_finished(self) -> None:
        keep = np.flatnonzero(self._open_B)
        kept = torch.from_numpy(keep).to(self._device)
        self._cache.batch_select_indices(kept)
        self._row_B, self._open_B = self._row_B[keep], self._open_B[keep]
        self._stop_BS, self._limit_B = self._stop_BS[keep], self._limit_B[keep]
        self._temperature_B, self._draw_BR = self._temperature_B[kept], self._draw_BR[kept]
        self._mask_BT = self._mask_BT[kept]
        self._next_ids, self._next_positions = self._next_ids[kept], self._next_positions[kept]

    def results(self) -> list[Generation]:
        """Return all generations so far; unfinished ones have the finish reason ``abort``."""
        return [self._result(index) for index in range(len(self._requests))]

    def _result(self, index: int) -> Generation:
        length, asked = self._length_N[index], self._requests[index].routes is not None
        return Generation(
            request_id=self._requests[index].request_id,
            token_ids_R=self._token_NR[index, :length].copy(),
            log_probs_R=self._log_prob_NR[index, :length].copy(),
            versions_R=self._version_R[:length].copy(),
            finish_reason=self._reason_N[index],
            routes_R=self._route_NRLK[index, :length].copy() if asked else None,
        )


def block_cache(model_config: Any) -> DynamicCache:
    """Return a model's empty cache, of the layer classes below; other kinds keep transformers' class."""
    cache = DynamicCache(config=model_config)
    own = {DynamicLayer: BlockLayer, LinearAttentionLayer: StateLayer}
    cache.layers = [own.get(type(layer), lambda layer=layer: layer)() for layer in cache.layers]
    return cache


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """transformers' cache of one linear-attention layer, whose rows can be dropped or repeated."""

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)


class BlockLayer(DynamicLayer):  # type: ignore[misc]
    """KV cache of one attention layer for transformers, copied only when a block of ``BLOCK`` tokens is full.
    Its base class copies all keys and values for every token: half the decode time of a small model at batch
    256. ``keys``, ``values`` [batch, kv_heads, tokens, head_dim] are views of larger buffers."""

    keys: Tensor
    values: Tensor
    key_room: Tensor | None = None
    value_room: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        self.key_room, self.keys = _append(self.key_room, self.keys, key_states, start)
        self.value_room, self.values = _append(self.value_room, self.values, value_states, start)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.key_room = self.value_room = None


def _append(room: Tensor | None, past: Tensor, new: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Write ``new`` after the ``start`` tokens of ``past``; returns the buffer and its filled part."""
    end = start + new.shape[-2]
    if room is None or room.shape[-2] < end:
        batch, heads, _, head_dim = new.shape
        room = torch.empty(batch, heads, end + BLOCK, head_dim, dtype=new.dtype, device=new.device)
        if start:
            room[:, :, :start] = past
    room[:, :, start:end] = new
    return room, room[:, :, :end]
