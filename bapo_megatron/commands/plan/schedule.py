"""Megatron's pipeline schedules: how many micro-batches a stage holds at once, and how long it idles.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(arXiv 2104.04473), section 2.2; the warm-up counts are those of megatron-core's ``schedules.py``.
"""

from __future__ import annotations

from bapo_megatron.config import ParallelConfig


def in_flight(parallel: ParallelConfig, stage: int, micro_batches: int) -> int:
    """Forward passes of one model chunk that wait on ``stage`` for their backward pass, at most.

    1F1B: those of the warm-up, PP - stage - 1, and the one that runs. Interleaved: the warm-up has
    2 (PP - stage - 1) + (virtual - 1) PP chunks, each 1 / virtual of the stage's layers.
    """
    behind = parallel.pipeline - stage - 1
    warm_up = behind
    if parallel.virtual > 1:
        warm_up = 2 * behind + (parallel.virtual - 1) * parallel.pipeline
    return min(warm_up + 1, micro_batches * parallel.virtual)


def slots(parallel: ParallelConfig, micro_batches: int) -> float:
    """Length of a pass over all micro-batches, in units of a stage's time for one of them.

    Each of the other stages adds the time of one chunk while the pipeline fills and drains.
    """
    return micro_batches + (parallel.pipeline - 1) / parallel.virtual
