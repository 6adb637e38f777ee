"""Process pool of a rehearsal: one process for each rank, because a rehearsal patches torch for good.

One host process imports everything once, and forks a process for each rank. The caller's process stays
unpatched. A rank that fails or is killed is a result with an error. Used by ``job.py``.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bapo_megatron.planning.records import RankRequest, RankResult
from bapo_megatron.planning.rehearsal.layers import Layers, prepare_layers
from bapo_megatron.runtime.processes import die_with_parent


def rehearse(
    requests: Sequence[RankRequest],
    layers: Layers = "torch",
    workers: int | None = None,
    on_result: Callable[[RankResult], None] = lambda _: None,
) -> list[RankResult]:
    """Rehearse all requests; the results in their order. ``on_result`` is called as each one is done.

    ``workers`` ranks at a time, None: one for each core. RuntimeError if the host process dies.
    """
    # A fork shares what is imported; Transformer Engine must be installed before megatron is imported.
    other = layers == "te" or find_spec("transformer_engine") is not None
    start = "spawn" if other and "megatron" in sys.modules else "fork"
    context: Any = multiprocessing.get_context(start)
    workers = workers or len(os.sched_getaffinity(0))
    results: dict[int, RankResult] = {}
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        receiver, sender = context.Pipe(duplex=False)
        host = context.Process(target=_host, args=(requests, layers, workers, Path(folder), sender))
        host.start()
        sender.close()  # so that recv() fails when the host dies
        while len(results) < len(requests):
            try:
                index = receiver.recv()
            except EOFError:
                raise RuntimeError("the rehearsal's process has died; its messages are above") from None
            results[index] = pickle.loads((Path(folder) / str(index)).read_bytes())
            on_result(results[index])
        host.join()
    return [results[index] for index in range(len(requests))]


def _host(
    requests: Sequence[RankRequest], layers: Layers, workers: int, folder: Path, sender: Connection
) -> None:
    """Host process: import everything, then fork a process for each request, ``workers`` at a time."""
    die_with_parent()
    gc.freeze()  # finalizers of the caller's garbage may wait for threads that this process does not have
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from bapo_megatron.runtime.device import silence_libraries

    silence_libraries()
    prepare_layers(layers)
    gc.freeze()  # before the forks: a rank collects garbage in every phase, and need not scan the imports
    running: dict[int, int] = {}
    waiting = list(range(len(requests)))
    while waiting or running:
        while waiting and len(running) < workers:
            index = waiting.pop(0)
            running[_fork(requests[index], layers, folder / str(index))] = index
        pid, status = os.waitpid(-1, 0)
        index = running.pop(pid)
        if status:
            _write(_dead(requests[index], layers, status), folder / str(index))
        sender.send(index)


def _fork(request: RankRequest, layers: Layers, path: Path) -> int:
    """Rehearse one rank in a child, which writes its result to ``path``. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        from bapo_megatron.planning.rehearsal.rank import rehearse_rank

        die_with_parent()
        _write(rehearse_rank(request, layers), path)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # a fork must not run its parent's exit handlers


def _write(result: RankResult, path: Path) -> None:
    path.write_bytes(pickle.dumps(result))


def _dead(request: RankRequest, layers: Layers, status: int) -> RankResult:
    code = os.waitstatus_to_exitcode(status)
    why = f"its process was killed by signal {-code}" if code < 0 else "its process failed; see above"
    return RankResult(request.rank, request.place, layers, request.packs, error=why)
