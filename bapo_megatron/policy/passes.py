"""Forward and backward passes over micro-batches on megatron-core's pipeline schedules.

``Passes.forward`` and ``backward`` take packs (concatenated sequences) and a ``TokenFn``, and return its
additive float64 vector summed over the packs of all ranks; ``backward`` also accumulates the gradients of
element 0. ``stats`` returns per-token log-probs and entropies. ``MegatronPolicy`` passes whole packs; each
rank slices its context-parallel part.

The layers see all tokens of a part, the output layer only the trained ones (in ``stats`` all by default). The
host selects them from the pack's mask, without a device synchronization.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from bapo_megatron.policy.experts import RouterCounters, pack_totals
from bapo_megatron.policy.model import PolicyModel
from bapo_megatron.policy.output_head import OutputHead
from bapo_megatron.policy.positions import positions, slice_batch
from bapo_megatron.tensor_types import MicroBatch, SearchedLoss, TokenFn, TokenStats


@dataclass(frozen=True)
class _Part:
    """This context-parallel rank's share of a pack, on its device."""

    tokens: MicroBatch
    """All tokens, for the layers."""
    trained: MicroBatch
    """The trained tokens, for the output layer; without any, the first token, masked."""
    rows_N: Tensor | None
    """Rows of the trained tokens among all tokens; None if all are trained."""
    real_T: Tensor | None = None
    """float64: 1 for a document's token, 0 for padding; None in passes without counters."""


Evaluate = Callable[[Tensor, _Part], Tensor]
"""Maps a part's hidden states [tokens, hidden] to its vector; element 0 is differentiated."""


class Passes:
    """Forward and backward passes of one model, its DDP-wrapped chunks and the output layer, over packs.
    ``forward`` and ``old_sums`` return a ``TokenFn``'s vector summed over the packs of all ranks;
    ``backward`` the loss's, and accumulates gradients; ``stats`` returns per-token log-probs and entropies.
    All calls block and are collective over all ranks, ``stats`` only within a replica, unless experts are
    sharded over replicas: then all ranks need equally many packs."""

    def __init__(self, wrapped: list[Any], last: PolicyModel, head: OutputHead, device: torch.device) -> None:
        self._model, self._last, self._head, self._device = wrapped, last, head, device
        self._config = last.config

    def forward(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """Run a forward pass without gradients; return ``fn`` summed over the packs of all ranks."""
        with torch.no_grad():
            outputs = self._schedule(batches, self._measured(fn), forward_only=True)
            return self._sum_over_ranks(outputs, self._width(outputs, batches, fn))

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> Tensor:
        """``fn`` at pi_old's stored log-probs, summed over the packs of all ranks; entropies are zero."""
        parts = [self._part(batch).trained for batch in batches]
        outputs = [fn(TokenStats(p.old_log_prob_T, torch.zeros_like(p.mask_T)), p) for p in parts]
        return self._sum_over_ranks(outputs, outputs[0].numel())

    def stats(self, batches: Sequence[MicroBatch], trained_only: bool = False) -> list[TokenStats]:
        """Log-probs and entropies of whole packs, prompts too, on the CPU of every rank of the replica.
        ``trained_only``: zeros for all other tokens, whose logits are not computed."""
        size, rank = _context()
        results = [torch.zeros(2, batch.token_T.numel(), device=self._device) for batch in batches]
        here = iter(zip(results, batches, strict=True))

        def keep(hidden_TH: Tensor, part: _Part) -> Tensor:
            values, batch = next(here)
            own = positions(batch.cu_seqlens, size, rank).to(values.device, non_blocking=True)
            tokens, rows_N = (part.trained, part.rows_N) if trained_only else (part.tokens, None)
            stats = torch.stack(self._head.stats(hidden_TH, self._last.output_weight, tokens.label_T, rows_N))
            if trained_only:  # a part without trained tokens has one masked row
                stats = torch.where(tokens.mask_T > 0, stats, 0.0)
            values[:, own if rows_N is None else own[rows_N]] = stats
            return torch.zeros(1, device=self._device)

        with torch.no_grad():
            self._schedule(batches, keep, forward_only=True)
        for values in results:
            _complete_stats(values)
        return [TokenStats(*values.cpu()) for values in results]

    def backward(
        self,
        batches: Sequence[MicroBatch],
        loss: TokenFn | SearchedLoss,
        counters: RouterCounters | None = None,
    ) -> Tensor:
        """Accumulate the gradient of the loss (element 0, per token); return its sums over all ranks.
        ``counters``: filled by the routers; their sums over all ranks follow the loss's."""
        # Other ranks of the replica have the same packs.
        counts = self._counts_tokens and not parallel_state.get_context_parallel_rank()
        if counters is not None and counters.has_routes and counts:
            counters.totals.add_(pack_totals(batches).to(self._device, non_blocking=True))
        if isinstance(loss, SearchedLoss):
            if loss.over == "update":
                return self._searched_update(batches, loss, counters)
            evaluate = self._searched(loss)
        else:
            evaluate = self._differentiated(loss)
        outputs = self._schedule(batches, evaluate, False, counters)
        return self._sum_over_ranks(outputs, self._width(outputs, batches, loss), counters)

    def _measured(self, fn: TokenFn) -> Evaluate:
        def evaluate(hidden_TH: Tensor, part: _Part) -> Tensor:
            trained, weight_VH = part.trained, self._last.output_weight
            return fn(self._head.stats(hidden_TH, weight_VH, trained.label_T, part.rows_N), trained)

        return evaluate

    def _differentiated(self, loss: TokenFn) -> Evaluate:
        def evaluate(hidden_TH: Tensor, part: _Part) -> Tensor:
            return self._head.sums(hidden_TH, self._last.output_weight, part.trained, loss, part.rows_N)

        return evaluate

    def _searched(self, loss: SearchedLoss) -> Evaluate:
        """Searched loss per micro-batch: all-reduce the sums over replicas, search, then compute the loss."""
        measure = self._measured(loss.measure)

        def evaluate(hidden_TH: Tensor, part: _Part) -> Tensor:
            sums = measure(hidden_TH, part).double()
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            return self._differentiated(loss.loss_of(sums.cpu()))(hidden_TH, part)

        return evaluate

    def _searched_update(
        self, batches: Sequence[MicroBatch], loss: SearchedLoss, counters: RouterCounters | None
    ) -> Tensor:
        """Searched loss per update: all forward passes, the search, then all backward passes. Requires a
        one-stage pipeline. Holds all packs' activations, with full recomputation the layer inputs."""
        parts = [self._part(batch, counters is not None) for batch in batches]
        pending = deque((self._hidden(part, self._model[0], counters)[:, 0], part) for part in parts)
        measure = self._measured(loss.measure)
        measured = [measure(hidden_TH, part) for hidden_TH, part in pending]
        sums = self._sum_over_ranks(measured, measured[0].numel())
        evaluate = self._differentiated(loss.loss_of(sums))
        outputs = []
        while pending:
            # Popped, so that a pack's activations are freed after its backward pass.
            vector = evaluate(*pending.popleft())
            outputs.append(vector.detach())
            self._config.grad_scale_func(vector[0]).backward()
        tokens = sum(
            (part.tokens.mask_T.sum().int() for part in parts), start=torch.zeros((), dtype=torch.int)
        )
        self._config.finalize_model_grads_func(self._model, tokens.to(self._device))
        return self._sum_over_ranks(outputs, outputs[0].numel(), counters)

    def _schedule(
        self,
        batches: Sequence[MicroBatch],
        evaluate: Evaluate,
        forward_only: bool,
        counters: RouterCounters | None = None,
    ) -> list[Tensor]:
        """Run megatron's schedule; return ``evaluate``'s vector per pack, none before the last stage."""
        parts = [self._part(batch, counters is not None) for batch in batches]
        iterators = [iter(parts) for _ in self._model]
        outputs: list[Tensor] = get_forward_backward_func()(
            forward_step_func=self._forward_step(evaluate, counters),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._model if len(self._model) > 1 else self._model[0],
            num_microbatches=len(parts),
            seq_length=batches[0].token_T.numel(),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return outputs

    def _forward_step(self, evaluate: Evaluate, counters: RouterCounters | None) -> Callable[..., Any]:
        def step(iterator: Iterator[_Part], model: Any) -> Any:
            part = next(iterator)

            def loss(hidden_T1H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                sums = evaluate(hidden_T1H[:, 0], part)
                return sums[0], part.tokens.mask_T.sum().to(torch.int), sums.detach().double()

            return self._hidden(part, model, counters), loss

        return step

    def _hidden(self, part: _Part, model: Any, counters: RouterCounters | None) -> Tensor:
        is_half = isinstance(model.module, Float16Module)
        extra = {"fp32_output": False} if is_half else {}
        chunk: PolicyModel = model.module.module if is_half else model.module
        hidden: Tensor = model(
            input_ids=part.tokens.token_T[None],
            position_ids=part.tokens.position_T[None],
            attention_mask=None,
            packed_seq_params=chunk.document_pack(part.tokens, self._device, counters, part.real_T),
            **extra,
        )
        return hidden

    def _part(self, batch: MicroBatch, counted: bool = False) -> _Part:
        """This rank's part of a pack, with ``real_T`` if ``counted``."""
        real_T = _real_T(batch).to(self._device, non_blocking=True) if counted else None
        tokens = slice_batch(batch, *_context())
        rows_N = tokens.mask_T.nonzero()[:, 0]
        if rows_N.numel() == tokens.mask_T.numel():
            here = tokens.to(self._device)
            return _Part(here, here, None, real_T)
        if rows_N.numel() == 0:  # a dummy pack: collectives and vector length need one token
            rows_N = rows_N.new_zeros(1)
        trained = replace(tokens, route_TLK=None).take(rows_N).to(self._device)
        rows_N = rows_N.to(self._device, non_blocking=True)
        return _Part(tokens.to(self._device), trained, rows_N, real_T)

    def _width(self, outputs: list[Tensor], batches: Sequence[MicroBatch], fn: TokenFn | SearchedLoss) -> int:
        """Length of ``fn``'s vectors. Earlier stages have none: they evaluate ``fn`` on a dummy token, a
        searched loss on zero sums."""
        if outputs:
            return outputs[0].numel()
        if isinstance(fn, SearchedLoss):
            fn = fn.loss_of(torch.zeros(self._width(outputs, batches, fn.measure), dtype=torch.float64))
        token = batches[0].take(slice(0, 1)).to(self._device)
        token = replace(token, mask_T=torch.zeros_like(token.mask_T))
        with torch.no_grad():
            return fn(TokenStats(token.old_log_prob_T, torch.zeros_like(token.mask_T)), token).numel()

    @property
    def _counts_tokens(self) -> bool:
        """Whether this rank counts its tokens, as one of several ranks with the same tokens."""
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        return bool(last) and parallel_state.get_tensor_model_parallel_rank() == 0

    def _sum_over_ranks(
        self, outputs: list[Tensor], width: int, counters: RouterCounters | None = None
    ) -> Tensor:
        """Sum the packs' vectors of length ``width``, from the last stage and TP rank 0, over all ranks. The
        sums of ``counters``, from every rank, follow in the same vector."""
        total = torch.zeros(width, dtype=torch.float64, device=self._device)
        if self._counts_tokens:
            total += torch.stack([output.double() for output in outputs]).sum(0)
        if counters is not None:
            total = torch.cat([total, counters.sums])
        dist.all_reduce(total)
        return total.cpu()


def _context() -> tuple[int, int]:
    return (
        int(parallel_state.get_context_parallel_world_size()),
        int(parallel_state.get_context_parallel_rank()),
    )


def _real_T(batch: MicroBatch) -> Tensor:
    """float64: 1 for each token of a document on this context-parallel rank, 0 for padding."""
    real_T = torch.zeros(batch.token_T.numel(), dtype=torch.float64)
    for _, start, count in batch.rows:
        real_T[start : start + count] = 1.0
    size, rank = _context()
    return real_T if size == 1 else real_T[positions(batch.cu_seqlens, size, rank)]


def _complete_stats(values: Tensor) -> None:
    """Complete ``values`` in place: all-reduce over the CP ranks, then broadcast from the last stage."""
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        dist.broadcast(values, parallel_state.get_pipeline_model_parallel_last_rank(), pipeline)
