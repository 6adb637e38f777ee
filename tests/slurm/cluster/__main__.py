"""``python -m tests.slurm.cluster start|stop|fail NODE|restore NODE``: the tests' cluster."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.slurm.cluster.cluster import Cluster, reason_not_to_run

FOLDER = Path(os.environ.get("SLURM_LOCAL", Path(tempfile.gettempdir()) / "slurm-local"))


def main(arguments: list[str]) -> None:
    if reason := reason_not_to_run():
        sys.exit(reason)
    cluster = Cluster(FOLDER)
    match arguments:
        case ["start"]:
            cluster.start()
            print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}")
        case ["stop"]:
            cluster.stop()
        case ["fail", node]:
            cluster.fail(node)
        case ["restore", node]:
            cluster.restore(node)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
