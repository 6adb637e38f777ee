"""torch's TCPStore listens on the address that it is told, and not on every interface."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bapo_megatron.rollout.weight_sync.broadcast import SendingGroup
from bapo_megatron.runtime.distributed import bound_store, free_port

SOON = timedelta(seconds=60)


def listens_on(port: int) -> set[str]:
    """The addresses on which this process listens at a port."""
    return {
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }


def test_the_store_of_a_broadcast_listens_on_its_address() -> None:
    store = bound_store("127.0.0.1", 0, None, SOON)
    assert listens_on(store.port) == {"127.0.0.1"}
    client = TCPStore("127.0.0.1", store.port, None, False, SOON)
    client.set("name", "value")
    assert store.get("name") == b"value"
    group = SendingGroup("127.0.0.1", "weights", 1, torch.device("cpu"), 60.0)
    assert listens_on(group.place.port) == {"127.0.0.1"}


def test_a_name_that_leads_to_loopback_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machines reach this one by another address than it does itself."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_more: found)
    store = bound_store(socket.gethostname(), 0, None, SOON)
    assert listens_on(store.port) <= {"::", "0.0.0.0"}
    assert listens_on(store.port)


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"cannot listen at 127.0.0.1:{port}"):
            bound_store("127.0.0.1", port, None, SOON)


CHILD = """
import os, sys
from bapo_megatron.runtime.distributed import process_group
import torch, torch.distributed as dist, psutil
with process_group("gloo", 1.0):
    value = torch.ones(1)
    dist.all_reduce(value)
    port = int(os.environ["MASTER_PORT"])
    ips = {one.laddr.ip for one in psutil.Process().net_connections("tcp")
           if one.status == "LISTEN" and one.laddr.port == port}
    print(int(value), *sorted(ips), flush=True)
"""


@pytest.mark.integration
def test_ranks_of_one_machine_meet_on_loopback() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    root = Path(__file__).parents[3]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=root,
            env={**os.environ, **place, "RANK": str(rank), "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert said == [["2"], ["2", "127.0.0.1"]]
