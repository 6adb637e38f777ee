"""Listening address of a node's rollout servers: ``python node_address.py NODE`` prints it, on that node.

task.sh runs it unless BAPO_SERVER_HOST is set. The address is that of the node's name, so servers listen on
one interface only. On many clusters a node's own name resolves to 127.0.1.1 on the node itself; then it is
the source address of the route to MASTER_ADDR, the job's first node, or, on that node, to SLURM_SUBMIT_HOST.
Only the standard library, since nodes run it before anything else.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress


def node_address(name: str, others: Sequence[str]) -> str:
    """The IPv4 address of this node, whose name is ``name``, for connections from the machines ``others``.

    The loopback address only if none of them is another machine, e.g. if one simulates all nodes. Raises
    OSError if the name does not resolve.
    """
    own = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    if not str(own).startswith("127."):
        return str(own)
    for other in filter(None, others):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # of UDP: it sends nothing
            towards = str(probe.getsockname()[0])
            if not towards.startswith("127.") and towards != probe.getpeername()[0]:  # not this machine
                return towards
    return str(own)


def main() -> None:
    """Print the address, with a warning if only this machine can reach it; exit if there is none."""
    name = sys.argv[1]
    try:
        others = [os.environ.get(other, "") for other in ("MASTER_ADDR", "SLURM_SUBMIT_HOST")]
        found = node_address(name, others)
    except OSError as error:
        sys.exit(f"error: {name} stands for no address ({error}); set BAPO_SERVER_HOST")
    if found.startswith("127."):
        print(f"{name} is {found} here: only this machine reaches its servers", file=sys.stderr)
    print(found)


if __name__ == "__main__":
    main()
