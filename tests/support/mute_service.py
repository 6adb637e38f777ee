"""Stands in for the sampler's process, and does what a question is named for here.

"next_batch": works long and gives signs of life; "checkpointed": stops, as by SIGSTOP, the first time (a file
tells); "state": tells its process id; others are answered at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    stopped_before: Path = pipe.recv()
    while (question := pipe.recv()) is not None:
        method, _ = question
        if method == "next_batch":
            for _ in range(70):
                time.sleep(0.1)
                pipe.send(("alive",))
            pipe.send(("ok", None, []))
        elif method == "checkpointed" and not stopped_before.exists():
            stopped_before.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        elif method == "state":
            pipe.send(("ok", {"pid": os.getpid()}, []))
        else:
            pipe.send(("ok", None, []))
    os.kill(os.getpid(), signal.SIGSTOP)  # the end that it is asked for does not come


if __name__ == "__main__":
    main()
