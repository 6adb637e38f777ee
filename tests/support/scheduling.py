"""How ``--dist loadscope`` deals tests out to workers, as in ``make test``.

Tests of a file stay together, so that its fixtures are made once. Tests that share SGLang servers go to one
worker; of the files in ``APART`` every test goes where there is room; and tests that mostly wait go to
workers beyond the number of cores.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

WAITING = ("tests/slurm/", "tests/e2e/test_frozen_disk.py", "tests/unit/cluster/test_cluster_pins.py")
"""They wait for other programs most of the time."""

WAITING_WORKERS = 2

MORE_WORKERS = 3
"""Beyond the cores: other tests wait, too, and with two more a fifth of two cores was idle."""

SHARES_SERVERS = (
    *("tests/contract/test_engine_contract.py", "tests/contract/test_engine_updates.py"),
    "tests/contract/test_broadcast.py",
    "tests/contract/test_released_memory.py",
    "tests/contract/test_sent_digests.py",
    "tests/contract/test_server_limits.py::test_the_next_segment_hits_the_prefix_cache",
)
"""The tests of these names that take an SGLang server take the same ones."""

APART = (
    *WAITING,
    *(f"tests/e2e/test_{name}.py" for name in ("runs", "interrupts", "extending")),
    *("tests/distributed/test_rehearsal.py", "tests/distributed/test_other_megatron.py"),
    "tests/unit/environment/test_public_environments.py",
)
"""Each test takes long, and what several share is made once a session (once.py)."""

FIRST = (
    *("tests/slurm/", "tests/distributed/test_other_megatron.py", "tests/distributed/test_hybrid_layouts.py"),
    *(f"tests/e2e/test_{name}.py" for name in ("trackers", "sglang", "chaos", "interrupts")),
    *("tests/te/", "tests/contract/", "tests/distributed/test_rehearsal"),
    *(f"tests/distributed/test_{name}.py" for name in ("layouts", "kinds_of_layers", "host_optimizer")),
    *(f"tests/distributed/test_{name}.py" for name in ("reference", "weight_broadcast", "route_replay")),
    "tests/distributed/test_checkpoints_of_kinds.py",
    *(f"tests/e2e/test_{name}.py" for name in ("real_model", "gpu_study", "gpu_check", "verify")),
    "tests/unit/environment/test_public_environments.py",
    "tests/unit/checkpoints_tools/test_atomic_output.py",
    *("tests/e2e/", "tests/distributed/"),
)
"""The files and folders whose scopes take longest, in the order in which they begin; all others follow.

A file of many layouts is one scope of minutes: where it begins last, the other workers have nothing left.
"""


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def workers(kind: str) -> int:
    """The number of workers of ``-n logical``: one for each core; of ``-n auto`` three more."""
    return cores() + (MORE_WORKERS if kind == "auto" else 0)


def scope_of(nodeid: str) -> str:
    """Tests of one scope run on one worker, in their order."""
    path = nodeid.partition("::")[0]
    if nodeid.startswith(SHARES_SERVERS) and "[local" not in nodeid:
        return "servers"
    if path.startswith("tests/te/"):  # a process for each version, which takes seconds to start
        return "te " + ("2.20.2" if "[2.20.2" in nodeid else "2.11.0")
    return nodeid if path.startswith(APART) else path


def place_of(nodeid: str) -> int:
    """The key that tests are sorted by: what takes longest begins first."""
    return next((place for place, folder in enumerate(FIRST) if nodeid.startswith(folder)), len(FIRST))


class WaitingApart(LoadScopeScheduling):
    """Gives the last workers the tests that wait, and the others the rest, as long as there are both."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        waits = int(node.gateway.id.removeprefix("gw")) % self.numnodes >= self.numnodes - WAITING_WORKERS
        fitting = (scope for scope in self.workqueue if scope.startswith(WAITING) == waits)
        if (scope := next(fitting, None)) is not None:
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


def make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """For ``--dist loadscope`` with workers enough that some may wait."""
    return WaitingApart(config, log) if config.getvalue("dist") == "loadscope" else None
