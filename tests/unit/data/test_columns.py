"""The table of per-token columns: its architecture, loss masks, sums over sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.data.packing import pack_samples, trained_columns
from bapo_megatron.data.samples import Sample
from bapo_megatron.planning.memory import PACK_COLUMNS
from bapo_megatron.policy.positions import slice_batch
from bapo_megatron.tensor_types import COLUMNS, MicroBatch, TokenStats
from bapo_megatron.trainer.sft import next_token_loss
from bapo_megatron.types import PackLayout
from tests.support.models import random_samples

WRITTEN_FOR_ALL_TOKENS = {"token_T", "label_T", "position_T"}


def sample(mask: list[bool] | None, count: int = 4) -> Sample:
    """A prompt [5, 6] and a response [10, 11, ...] with log-probs -1, -2, ... and versions 3, 4, ..."""
    return Sample(
        np.array([5, 6, *range(10, 10 + count)], np.int32),
        -np.arange(1, count + 1, dtype=np.float32),
        np.arange(3, 3 + count, dtype=np.int32),
        advantage=2.0,
        old_log_probs_R=-np.arange(1, count + 1, dtype=np.float32) / 4,
        importance_R=np.arange(1, count + 1, dtype=np.float32),
        loss_mask_R=None if mask is None else np.array(mask),
    )


def test_every_tensor_of_a_micro_batch_is_a_column() -> None:
    """It has a producer, and the plan counts its bytes."""
    [pack] = pack_samples([sample(None)], 16)
    tensors = {name: value.dtype for name, value in vars(pack).items() if isinstance(value, torch.Tensor)}
    assert tensors == {name: column.dtype for name, column in COLUMNS.items()}
    assert trained_columns(sample(None), 0, 1.0).keys() | WRITTEN_FOR_ALL_TOKENS == COLUMNS.keys()
    assert sum(column.dtype.itemsize for column in COLUMNS.values()) == PACK_COLUMNS


def test_tokens_that_are_masked_are_like_a_prompt() -> None:
    """Of the response [10, 11, 12, 13] a tool wrote 11 and 12; the position before each predicts it."""
    [pack] = pack_samples([sample([True, False, False, True])], 16)
    assert pack.token_T.tolist() == [5, 6, 10, 11, 12]
    assert pack.label_T.tolist() == [6, 10, 11, 12, 13]
    assert pack.position_T.tolist() == [0, 1, 2, 3, 4]
    assert pack.mask_T.tolist() == [0, 1, 0, 0, 1]
    assert pack.weight_T.tolist() == [0, 1, 0, 0, 4]
    assert pack.advantage_T.tolist() == [0, 2, 0, 0, 2]
    assert pack.rollout_log_prob_T.tolist() == [0, -1, 0, 0, -4]
    assert pack.old_log_prob_T.tolist() == [0, -0.25, 0, 0, -1]
    assert pack.version_T.tolist() == [0, 3, 0, 0, 6]
    assert pack.oldest_version_T.tolist() == [0, 3, 0, 0, 3]
    assert pack.sequence_T.tolist() == [-1, 0, -1, -1, 0]
    [dummy] = pack_samples([sample(None)], 8, layout=PackLayout(1, 2, length_multiple=4))
    assert (dummy.sequence_T.tolist(), dummy.mask_T.sum(), dummy.sequences) == ([-1] * 4, 0, 1)
    # What no engine sampled may have no log-prob.
    tool = dataclasses.replace(
        sample([True, False], 2), log_probs_R=np.array([-1, np.nan], np.float32), old_log_probs_R=None
    )
    [pack] = pack_samples([tool], 16)
    assert pack.rollout_log_prob_T.tolist() == pack.old_log_prob_T.tolist() == [0, -1, 0]
    with pytest.raises(ValueError, match="loss_mask_R has 3 values for a response of 4 tokens"):
        sample([True, False, True])


def test_means_count_the_trained_tokens_alone() -> None:
    """Responses of 2 (of 4) and 1 tokens, mean 1.5: weights 0.75 and 1.5. Cross entropy of log-probs -1."""
    samples = [sample([False, True, True, False]), sample(None, 1)]
    samples = [dataclasses.replace(one, importance_R=None) for one in samples]
    for mean, weights, loss in (("token", [1, 1, 1], 3.0), ("sequence", [0.75, 0.75, 1.5], 3.0)):
        [pack] = pack_samples(samples, 16, mean)
        assert pack.weight_T[pack.mask_T != 0].tolist() == weights
        stats = TokenStats(-torch.ones(len(pack.mask_T)), torch.zeros(len(pack.mask_T)))
        assert next_token_loss(stats, pack).tolist() == [loss, 3]


def per_sequence(values_T: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """The idiom of ``MicroBatch.sequence_T``."""
    return values_T.new_zeros(batch.sequences + 1).index_add_(0, batch.sequence_T + 1, values_T)[1:]


def parts(packs: list[MicroBatch], context: int, chunk: int) -> Iterator[MicroBatch]:
    """What losses see: chunks of the parts of packs that the ranks of context parallelism hold."""
    for pack in packs:
        for rank in range(context):
            held = slice_batch(pack, context, rank)
            for start in range(0, held.token_T.numel(), chunk):
                yield held.take(slice(start, start + chunk))


@given(
    st.integers(1, 12),
    st.integers(64, 200),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 70),
    st.integers(0, 9),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_sums_over_sequences_hang_on_no_layout(
    count: int, pack_tokens: int, replicas: int, context: int, chunk: int, seed: int
) -> None:
    """Whole numbers, so that sums are exact: rollout log-probs -1, -2, ... of the tokens not masked."""
    generator = np.random.default_rng(seed)
    samples = [
        dataclasses.replace(
            one,
            log_probs_R=-np.arange(1, one.response_tokens + 1, dtype=np.float32),
            loss_mask_R=generator.random(one.response_tokens) < 0.6,
        )
        for one in random_samples(count, seed)
    ]
    multiple = 1 if context == 1 else 2 * context
    layouts = [PackLayout(rank, replicas, multiple, 1, multiple) for rank in range(replicas)]
    packs = [pack for one in layouts for pack in pack_samples(samples, pack_tokens, "token", one)]
    pieces = list(parts(packs, context, chunk))
    log_probs = sum(per_sequence(piece.rollout_log_prob_T, piece) for piece in pieces)
    tokens = sum(per_sequence(piece.mask_T, piece) for piece in pieces)
    assert log_probs.tolist() == [float(one.log_probs_R[one.loss_mask_R].sum()) for one in samples]
    assert tokens.tolist() == [one.trained_tokens for one in samples]
