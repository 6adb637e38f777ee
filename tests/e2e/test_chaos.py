"""A few harms of tests/support/chaos.py; more by ``python -m tests.support.chaos --minutes 60``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang.server_process import sglang_python
from tests.support.chaos import harm_and_check

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("sync", ["disk", "broadcast"])
def test_a_harmed_run_loses_nothing(tmp_path: Path, sync: str) -> None:
    """The sampler first: it is there again in seconds, and a server is not."""
    try:
        sglang_python()
    except ConfigError as error:
        pytest.skip(str(error))
    harms = ("kill the sampler", "kill a server")
    found = harm_and_check(tmp_path, harms, random.Random(3), sync)
    assert all(found[kind] == 1 for kind in harms), found
    assert found["trained"] > 0
