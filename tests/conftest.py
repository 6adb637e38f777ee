"""How `--dist loadscope` shares tests out to processes, as in `make test`; no time limits of hypothesis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("suite", deadline=None)  # machines are as slow as they are
settings.load_profile("suite")

# A fork of a process that has threads of OpenMP waits for ever when it wants its own; tests fork ranks.
torch.set_num_threads(1)

WITH_SERVERS = ("tests/contract/", "tests/e2e/")


class Sharing(LoadScopeScheduling):
    """Tests that start servers and whole runs go to one process; of the others a file's stay together."""

    def _split_scope(self, nodeid: str) -> str:
        return "servers" if nodeid.startswith(WITH_SERVERS) else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Under ``--dist loadscope``."""
    return Sharing(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest group comes first."""
    items.sort(key=lambda item: not item.nodeid.startswith(WITH_SERVERS))
