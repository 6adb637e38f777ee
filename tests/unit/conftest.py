"""What tests of several files begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from bapo_megatron.runtime.distributed import free_port


@pytest.fixture(scope="module")
def one_process_group() -> Iterator[None]:
    """A rank alone: collectives work, and do nothing."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
