"""Dynamic sampling filter (DAPO): uniform groups, whose rewards are all equal, have no policy gradient.

With ``rollout.drop_uniform_groups`` the sampler drops such groups of responses and samples others. A pure
function of a group's rewards. ``rollout/sampler/loop.py`` asks it once a group is scored; ``advantages.py``
gives such groups zeros. Used by ``advantages.py``, ``rollout/sampler/loop.py`` and
``trainer/records/rollouts.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def is_uniform(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether all rewards of a group are equal: every advantage is then zero."""
    return len(rewards) == 0 or bool(np.all(np.asarray(rewards) == rewards[0]))
