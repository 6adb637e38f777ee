"""Prints the address on which a node's rollout servers listen: ``python node_address.py NODE``, on that node.

It is the address that the node's name stands for, and not every interface. On many a cluster a node's own
name leads to 127.0.1.1 on the node itself; then it is the node's address on the way to MASTER_ADDR, the first
node of the job. The standard library alone, since nodes run it before anything else.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress


def node_address(name: str, other: str) -> str:
    """The IPv4 address of this node, whose name is ``name``; ``other`` is the name of another node, if any.

    The loopback address only where nothing else is found: one machine that plays all nodes, say. OSError if
    the name stands for nothing.
    """
    own = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    if not str(own).startswith("127."):
        return str(own)
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # of UDP: it sends nothing
        towards = str(probe.getsockname()[0])
        if not towards.startswith("127."):
            return towards
    return str(own)


def main() -> None:
    """Print it; say so if only this machine can reach it."""
    name = sys.argv[1]
    try:
        found = node_address(name, os.environ.get("MASTER_ADDR", ""))
    except OSError as error:
        sys.exit(f"error: {name} stands for no address ({error}); set BAPO_SERVER_HOST")
    if found.startswith("127."):
        print(f"{name} is {found} here: only this machine reaches its servers", file=sys.stderr)
    print(found)


if __name__ == "__main__":
    main()
