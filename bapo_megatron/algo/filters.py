"""Dynamic sampling filter (DAPO): uniform groups, whose rewards are all equal, have no gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def is_uniform(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether all rewards of a group are equal: every advantage is then zero."""
    return len(rewards) == 0 or bool(np.all(np.asarray(rewards) == rewards[0]))
