"""Reward penalties: for a response of the wrong format, and for an overlong one (DAPO, Eq. 13).

Pure functions: a worker process applies the first, the pool the second. Used by ``pool.py`` and
``worker.py``.
"""

from __future__ import annotations

import re


def format_penalty(response: str, pattern: re.Pattern[str] | None, penalty: float) -> float:
    """``penalty`` if the whole response does not match the pattern, else 0. May take for ever: see config."""
    return 0.0 if pattern is None or pattern.fullmatch(response) else penalty


def overlong_penalty(
    response_tokens: int, max_response_tokens: int, zone_tokens: int, penalty: float
) -> float:
    """DAPO's soft over-long punishment (arXiv 2503.14476, Eq. 13) as a positive number to subtract.

    0 up to max - zone tokens; then penalty * (tokens - (max - zone)) / zone; ``penalty`` from max on. In the
    paper's symbols L_max is ``max_response_tokens``, L_cache is ``zone_tokens``, and the penalty is 1.
    """
    over = response_tokens - (max_response_tokens - zone_tokens)
    if zone_tokens == 0 or over <= 0:
        return 0.0
    return penalty * min(1.0, over / zone_tokens)
