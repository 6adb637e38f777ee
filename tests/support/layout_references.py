"""A certificate made by hand: two samples, of three and of four tokens, and a search over two times two."""

from __future__ import annotations

import numpy as np

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.commands.layout_reference import LayoutReference, TokenOutputs, Totals
from bapo_megatron.data.samples import Sample

BOUNDS = BoundsConfig(
    low_start=0.8, low_end=0.9, low_step=0.1, high_start=1.2, high_end=1.4, high_step=0.2, target=0.5
)


def handmade(positive: float = 2.0) -> LayoutReference:
    """``positive`` is P(c_high=1.2); P(1.4) = 4 and N = 3, 2. The target is met where P >= N."""
    sample = Sample(np.array([5, 6, 7], np.int32), np.array([-1.5], np.float32), np.zeros(1, np.int32), 0.25)
    longer = Sample(
        np.array([8, 9, 10, 11], np.int32), np.array([-1, -2], np.float32), np.array([0, 3], np.int32), -1.0
    )
    return LayoutReference(
        identity={"model.weights_sha256": "ab", "canary.seed": 0, "algorithm.bounds.dual_clip": None},
        made={"parallel.tensor": 1},
        samples=[sample, longer],
        tokens=TokenOutputs(
            [np.array([-2, -4], np.float32), np.array([-3, -5, -7], np.float32)],
            [np.array([1, 2], np.float32), np.array([3, 2, 1], np.float32)],
        ),
        totals=Totals(np.array([positive, 4.0, 3.0, 2.0]), 0.8, 1.4, -0.5, 12.0),
    )
