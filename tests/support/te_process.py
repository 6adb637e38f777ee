"""A process that has imported Transformer Engine on the stand-in for its kernels, and runs layouts for tests.
Or apex as played in ``played_apex``, where ``APEX`` is asked for in place of a version.

The import is global, takes nine seconds of a core and must come before megatron's, so a test process cannot
make it. ``TransformerEngineProcess`` starts one for a version; ranks are forked from it. ``Choices`` says
what the policy of a rank takes from Transformer Engine. Functions and arguments go to it by pickle.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bapo_megatron.config import ParallelConfig
from bapo_rehearsal.te_sources import find_sources, te_version
from tests.support.other_megatron import other_folder

ROOT = Path(__file__).parents[2]
APEX = "apex"
_kept: list[Callable[[], None]] = []
"""In the process with Transformer Engine: what lets megatron take torch's optimizer."""


@dataclass(frozen=True)
class Choices:
    """What the policy takes from Transformer Engine, and what it sees of the machine."""

    layers: bool = True
    fused_adam: bool = True
    gpu_settings: bool = False
    """Whether megatron's configuration is that of a GPU."""
    architecture: tuple[int, int] = (9, 0)
    change: Callable[[], None] | None = None
    """Called first in every rank, for example to plant a mistake."""


class TransformerEngineProcess:
    """The process of one version, with the megatron-core that it is tested with; ``close`` ends it."""

    def __init__(self, version: str) -> None:
        self._connection, theirs = Pipe()
        descriptor = theirs.fileno()
        self.version = version
        if version != APEX:
            find_sources(version)  # its error says more than an end of the process
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.te_process", version, str(descriptor)]
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        if version not in (APEX, te_version()):
            path = f"{other_folder()}:{path}"
        environment = {**os.environ, "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}  # compiling takes longer
        self._process = subprocess.Popen(command, pass_fds=[descriptor], cwd=ROOT, env=environment)
        theirs.close()
        self.calls: Counter[str] = Counter()
        """The calls of kernels on all ranks of the last layout."""

    def run(
        self,
        function: Callable[..., Any],
        parallel: ParallelConfig,
        *arguments: Any,
        choices: Choices = Choices(),
    ) -> list[Any]:
        """``function(*arguments)`` on every rank of ``parallel``, as ``workers.run_layout`` does.

        RuntimeError with the traceback if a rank raises.
        """
        self._connection.send_bytes(pickle.dumps((function, parallel, arguments, choices)))
        problem, results = pickle.loads(self._connection.recv_bytes())
        if problem:
            raise RuntimeError(problem)
        self.calls = sum((calls for _, calls in results), Counter())
        return [result for result, _ in results]

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


def main() -> None:
    """Serve requests until the other end closes."""
    from bapo_megatron.runtime.garbage import collect_rarely, keep_imports
    from bapo_megatron.runtime.processes import die_with_parent

    die_with_parent()
    collect_rarely()
    import torch

    load_from_bytes = torch.storage._load_from_bytes
    from bapo_rehearsal.transformer_engine.installation import install

    if sys.argv[1] == APEX:
        sys.path.insert(0, str(Path(__file__).parent / "played_apex"))
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # the compiled one has precedence
    else:
        install(find_sources(sys.argv[1]))
        take_float32()
    from bapo_megatron.policy import device
    from tests.support.workers import run_layout

    keep_imports()
    _kept.append(device.use_torch_optimizer)
    device.use_torch_optimizer = lambda: None  # FusedAdam, on a CPU
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[2]))
    while True:
        try:
            function, parallel, arguments, choices = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("", run_layout(_with_choices, parallel, choices, function, *arguments))
        except BaseException:
            answer = (traceback.format_exc(), [])
        # megatron-core 0.19 puts one of its own here, which the tests' process, on 0.16, does not have.
        torch.storage._load_from_bytes = load_from_bytes
        connection.send_bytes(pickle.dumps(answer))


def _with_choices(
    choices: Choices, function: Callable[..., Any], *arguments: Any
) -> tuple[Any, Counter[str]]:
    """On a rank: what the function returns, and the calls of kernels that it made."""
    from bapo_megatron.policy import device
    from bapo_rehearsal.transformer_engine import extension
    from bapo_rehearsal.transformer_engine.installation import answer_architecture

    if choices.change is not None:
        choices.change()
    device.uses_transformer_engine = lambda _dtype: choices.layers
    answer_architecture(choices.architecture)
    if not choices.fused_adam:
        device.use_torch_optimizer = _kept[0]
        device.cpu_mode()
    if choices.gpu_settings:
        from bapo_megatron.policy import model

        model.has_cuda = lambda: True
    extension.calls.clear()
    result = function(*arguments)
    return result, Counter(extension.calls)


def take_float32() -> None:
    """Let attention take float32, so that answers compare to 1e-5: its modules hear that it is float16."""
    import torch
    from transformer_engine.pytorch.attention.dot_product_attention import backends, utils

    class Float32Too:
        float16 = torch.float32

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    backends.torch = utils.torch = Float32Too()


if __name__ == "__main__":
    main()
