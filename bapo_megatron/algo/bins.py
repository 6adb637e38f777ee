"""Names and edges of the bins of token metrics: BUCKETS by staleness in updates, RATIO_BINS by ratio.

Separate from the measurements (``diagnostics.py``), so that the report can use the names without torch.
"""

from __future__ import annotations

from itertools import pairwise

BUCKETS = ("0", "1", "2-3", "4-7", "8-15", "16+")
"""Buckets of total staleness, in updates. Widths double: one more update matters less to an old token."""

RATIO_EDGES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.98, 1.02, 1.1, 1.2, 1.5, 2.0, 3.0)
"""Edges of the ratio bins (Figs. 5 and 10), lower edge inclusive. None at 1, where rounding would decide."""

RATIO_BINS = (
    f"below_{RATIO_EDGES[0]}",
    *(f"{low}-{high}" for low, high in pairwise(RATIO_EDGES)),
    f"from_{RATIO_EDGES[-1]}",
)
