"""A fake of the sampler's process: each call has a behaviour of its own.

"next_batch": takes long and sends heartbeats; "checkpointed": stops, as by SIGSTOP, the first time (a file
remembers it); "state": returns the process id; others are answered at once.
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
    while (call := pipe.recv()) is not None:
        method, _ = call
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
