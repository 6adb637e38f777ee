"""The alarm on the gap between engine and trainer (``algo/measurements/engine_gap.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.errors import GapError
from bapo_megatron.runtime.distributed import share
from bapo_megatron.trainer.recorder import Recorder
from bapo_megatron.types import Metrics


def check_gap(
    config: AlgorithmConfig, step: int, updates: Sequence[Metrics], recorder: Recorder | None
) -> None:
    """Warn of a gap above its limits, or stop: GapError on every rank. Call when the step is recorded.

    ``updates`` are the metrics of the step's updates, equal on every rank.
    """
    excess = list(gap_excess(config, updates))
    if not excess:
        return
    message = f"step {step}: engine and trainer differ about the same tokens: {'; '.join(excess)}"
    if recorder:
        recorder.engine_gap(step, message, config.on_gap)
    if config.on_gap == "stop":
        share(None)  # the first process to fail ends the others: rank 0 must have written
        raise GapError(
            f"{message}. Do the engines have the trainer's weights, temperature and precision? "
            f"If the gap is known and harmless, raise the limit or set algorithm.on_gap=warn"
        )


def gap_excess(config: AlgorithmConfig, updates: Sequence[Metrics]) -> Iterator[str]:
    """What is above its limit, if anything, with both numbers."""
    limits = {"mean": config.gap_mean_limit, "max": config.gap_max_limit}
    for name, limit in limits.items():
        for update in updates:
            gap = update[f"rollout/engine_gap_{name}"]
            if limit is not None and gap is not None and not gap <= limit:  # nan is above any limit
                yield (
                    f"rollout/engine_gap_{name} is {gap:.3g} nats, above algorithm.gap_{name}_limit={limit:g}"
                )
