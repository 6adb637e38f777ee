"""Synthetic packs of a rehearsed update: the recipe's longest sequences, and one that fills the rest.

Random token ids, equal at each call. ValueError if the packing gives another number of packs. Used by
``program.py``.
"""

from __future__ import annotations

import numpy as np

from bapo_megatron.config import RunConfig
from bapo_megatron.data.packing import Sample, pack_samples
from bapo_megatron.tensor_types import MicroBatch
from bapo_megatron.types import PackLayout

_SHORTEST = 256
"""Tokens below which the rest of a pack gets no sequence of its own."""


def full_packs(config: RunConfig, layout: PackLayout, vocabulary: int, packs: int) -> list[MicroBatch]:
    """``packs`` full packs of this rank: sequences of the longest length, and one that fills the rest.

    All replicas have equal packs. Half of the advantages are negative.
    """
    lengths = sequence_lengths(config, layout.document_multiple)
    rng = np.random.default_rng(0)
    samples = [
        _sample(rng, length, config.data.max_prompt_tokens, vocabulary, sign=1.0 if number % 2 else -1.0)
        for number in range(packs * layout.data_size)
        for length in lengths
    ]
    found = pack_samples(samples, config.batch.pack_tokens, config.algorithm.loss_mean, layout)
    if len(found) != packs:
        raise ValueError(f"{packs} packs of {lengths} tokens became {len(found)}")
    return found


def sequence_lengths(config: RunConfig, multiple: int) -> list[int]:
    """Positions of each sequence of a full pack of ``batch.pack_tokens``."""
    tokens = config.batch.pack_tokens
    longest = min(config.longest_sequence, tokens) // multiple * multiple
    number, rest = divmod(tokens, longest)
    return [longest] * number + ([rest] if rest >= max(_SHORTEST, multiple) else [])


def _sample(rng: np.random.Generator, length: int, most: int, vocabulary: int, sign: float) -> Sample:
    prompt = max(1, min(most // 8, length // 2))
    response = length + 1 - prompt
    return Sample(
        token_ids=rng.integers(0, vocabulary, length + 1).astype(np.int32),
        log_probs_R=np.full(response, -0.5, dtype=np.float32),
        versions_R=np.zeros(response, dtype=np.int32),
        advantage=sign,
    )
