"""An SGLang server process on this machine: its flags, command, environment, start, readiness and end.

``ServerProcess(command, environment, url, log)`` starts a server with the results of ``server_command`` and
``server_environment``; ``serve`` (`bapo rollout-server`) replaces the calling process with a server. A server
has a private TMPDIR for its ZMQ sockets, which unpickle what they receive: in /tmp all users could list them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from bapo_megatron.config import RunConfig, SglangConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.families import FAMILIES, fields_for_servers
from bapo_megatron.rollout.engines.pool_state import load_seconds
from bapo_megatron.rollout.engines.sglang.authorization import servers_key_file
from bapo_megatron.rollout.engines.sglang.requirements import (
    FP32_HEAD,
    IN_PLACE,
    NO_PREFILL_GRAPH,
    RESERVED_TOKENS,
    ROUTED_KERNEL,
    ROUTES,
    flag,
    install_command,
    library_path,
)
from bapo_megatron.rollout.engines.sglang_launch.api_key import VARIABLE as KEY_FILE_VARIABLE
from bapo_megatron.runtime.child_process import ChildProcess
from bapo_megatron.runtime.device import ALLOCATOR_VARIABLE, environment_variable, should_have_gpu
from bapo_megatron.runtime.http import ask, without_proxy

PYTHON_VARIABLE = "BAPO_SGLANG_PYTHON"
START_VARIABLE = "BAPO_SERVER_START_S"
"""Environment variable with a server's start-up limit in seconds. A Slurm task, which lacks the recipe, reads
it from the server's environment (``start_limit`` in slurm/task.sh) and ends slower servers."""
CUDA_ENVIRONMENT = ".venv-cluster-sglang"
_ENVIRONMENTS = (".venv-sglang", CUDA_ENVIRONMENT)
"""Folders in which `make sglang` (CPU builds) and `make cluster` (CUDA builds) install SGLang."""
_LAUNCHER = Path(__file__).parents[1] / "sglang_launch/launch.py"
_CPU_LAUNCHER = Path(__file__).parents[1] / "sglang_cpu/launch.py"
_CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    "--sleep-on-idle",  # an idle server would busy-wait on a core
)
_CPU_CACHE_TOKENS = 65_536
"""KV cache size on a CPU in tokens, unless a sequence is longer: other programs need memory, too."""
_OTHER_ENVIRONMENT = ("PYTHONPATH", "VIRTUAL_ENV", "SGLANG_GRPC_PORT", "SGLANG_RETURN_ORIGINAL_LOGPROB")
"""Variables that servers must not inherit: Python environment, open port, log-probs without temperature."""
_LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Rank variables (torchrun, ``runtime/distributed.py``): a server would join the trainer's store and hang."""
_CPU_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",  # to compile its sampling takes seconds, and a C++ compiler
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # hybrids; the default, bfloat16, costs 5e-5 in a log-prob
}
_VARIABLES = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
"""Allows a server context above the model's (by ``RESERVED_TOKENS``); no request is that long."""

_LEAST_WAIT_S = 30.0
"""A server is asked at least so long: others may have taken the time since its start."""
_WATCHDOG = "--watchdog-timeout"
_OVERRIDE = "--json-model-override-args"
_TEXT_ALONE = "language_model_only"
"""config.json field that skips the vision tower; SGLang's flag of this name is for other models."""
_RELEASED_GRAPHS = ("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
"""Makes a ``cuda_graph`` release free graph memory, with a host copy; otherwise SGLang frees nothing."""


def server_flags(config: RunConfig, number: int = 0, cuda: bool = True) -> list[str]:
    """Return the ``sglang.launch_server`` flags of a recipe's server ``number``."""
    sglang = config.rollout.sglang
    context = (sglang.context or config.longest_request) + RESERVED_TOKENS
    place = (
        ("--base-gpu-id", str(gpus_of(sglang, number)[0]))
        if cuda
        else ("--max-total-tokens", str(max(_CPU_CACHE_TOKENS, context)))
    )
    return [
        *place,
        *("--dtype", config.model.dtype),
        # As in the trainer: logits rounded to bfloat16 would change log-probs.
        *((flag(FP32_HEAD),) if config.model.dtype == "bfloat16" else ()),
        *("--tp-size", str(sglang.tensor)),
        *("--mem-fraction-static", str(sglang.memory_fraction)),
        *("--context-length", str(context)),
        # On a CPU SGLang answers the release calls without it.
        *(("--enable-memory-saver",) if cuda and sglang.colocated else ()),
        *(NO_PREFILL_GRAPH if cuda and not _names(sglang.flags, NO_PREFILL_GRAPH[0]) else ()),
        *(_routes(sglang.flags, cuda) if config.rollout.route_replay != "off" else ()),
        *(_patience(config) if not _names(sglang.flags, _WATCHDOG) else ()),
        *more_flags(sglang),
    ]


def _routes(own: Sequence[str], cuda: bool) -> list[str]:
    """Return the flags of servers that return routes. ``own``: the recipe's; its choice of a kernel stays."""
    chosen = _names(own, ROUTED_KERNEL[0]) or _names(own, "--moe-a2a-backend")
    return [flag(ROUTES), *(ROUTED_KERNEL if cuda and not chosen else ())]


def _patience(config: RunConfig) -> list[str]:
    """Return the flag of a watchdog that outlasts weight loads with ``on_update=in_place``, else none. SGLang
    ends servers whose batch waits for 300 s (``create_scheduler_watchdog`` in invariant_checker.py)."""
    sglang = config.rollout.sglang
    if sglang.on_update != "in_place":
        return []
    longest_s = load_seconds(config.model.hf_path, 60 * sglang.update_minutes)
    return [_WATCHDOG, str(max(300, int(longest_s) + 60))]


def _names(flags: Sequence[str], name: str) -> bool:
    """Return whether ``flags`` contain flag ``name``, as ``name value`` or ``name=value``. Ignores JSON in
    ``--cuda-graph-config``: SGLang takes both, and the JSON has precedence."""
    return any(flag.partition("=")[0] == name for flag in flags)


def gpus_of(sglang: SglangConfig, number: int) -> range:
    """Return the GPUs of the run's server ``number``, one per tensor-parallel rank."""
    first = sglang.first_gpu + number * sglang.tensor
    return range(first, first + sglang.tensor)


def more_flags(sglang: SglangConfig) -> list[str]:
    """Return the flags that `on_update` needs, then the recipe's flags."""
    in_place = [flag(setting) for setting in IN_PLACE]
    return [*(in_place if sglang.on_update == "in_place" else []), *sglang.flags]


def server_command(
    python: Path, hf_path: Path, host: str, port: int, cuda: bool, flags: Sequence[str] = ()
) -> list[str]:
    """Return the command line of a server with the model in ``hf_path`` as weight version 0."""
    overrides = {} if _names(flags, _OVERRIDE) else config_overrides(hf_path)
    return [
        *(str(python), str(_LAUNCHER if cuda else _CPU_LAUNCHER)),
        *("--model-path", str(hf_path), "--host", host, "--port", str(port)),
        *("--weight-version", "0", "--skip-tokenizer-init"),
        *(("--device", "cuda") if cuda else _CPU_FLAGS),  # SGLang itself would fall back to a CPU
        *((_OVERRIDE, json.dumps(overrides)) if overrides else ()),
        *flags,
    ]


def config_overrides(hf_path: Path) -> dict[str, Any]:
    """Return config.json fields that a server needs and ``hf_path`` lacks: hybrid fields that transformers
    omits, and the choice of a multi-modal model's text model. Empty if config.json is unreadable, which
    SGLang reports, or of another family. Raises ConfigError for a hybrid that SGLang does not serve."""
    try:
        config = json.loads((hf_path / "config.json").read_text())
        family = FAMILIES[config["model_type"]]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    try:
        missing = fields_for_servers(config[family.text] if family.text else config)
    except ValueError as error:
        raise ConfigError(f"model.hf_path={hf_path} cannot be served by SGLang: {error}") from None
    if family.text is None:
        return missing
    return {_TEXT_ALONE: True, **({family.text: missing} if missing else {})}


@dataclass(frozen=True)
class ServeCommand:
    """The flags of ``bapo rollout-server``: the recipe's, without a prefix, and the address to listen on."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    host: str = "127.0.0.1"
    """Address to listen on: this machine's, as the trainer reaches it. Who reaches it and has the key can
    sample and replace the weights."""
    port: int = 30000


def serve(command: ServeCommand, cuda: bool) -> NoReturn:
    """Replace this process with a server (exec), which thus gets its signals and sets its exit code."""
    run = command.run
    python, flags = sglang_python(run.rollout.sglang.python), server_flags(run, cuda=cuda)
    line = server_command(python, run.model.hf_path, command.host, command.port, cuda, flags)
    key_file = servers_key_file(run)
    print(f"the server asks for the API key in {key_file}", flush=True)
    environment = server_environment(cuda, key_file, run.rollout.sglang.colocated, python, command.host)
    folder = private_folder(environment.get("TMPDIR"))
    _remove_after_this_process(folder)
    start_s = load_seconds(run.model.hf_path, 60 * run.rollout.sglang.start_minutes)
    os.execvpe(line[0], line, environment | {"TMPDIR": folder, START_VARIABLE: str(int(start_s))})


_REMOVER = """
import os, shutil, signal, sys
if os.fork() == 0:
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.read(int(sys.argv[1]), 1)
    shutil.rmtree(sys.argv[2], ignore_errors=True)
"""
"""Program that removes a folder when the pipe's other end is closed. A fork waits, so that it is not a child
of the server, which kills its children; it ignores the signals that Slurm sends to each process of a step."""


def _remove_after_this_process(folder: str) -> None:
    """Have ``folder`` removed once this process has ended, even by SIGKILL or after an exec."""
    lifeline, held = os.pipe()
    os.set_inheritable(held, True)  # an exec keeps it open
    words = [sys.executable, "-I", "-S", "-c", _REMOVER, str(lifeline), folder]
    nothing = subprocess.DEVNULL
    subprocess.run(words, pass_fds=(lifeline,), stdin=nothing, stdout=nothing, stderr=nothing, check=True)
    os.close(lifeline)


def server_environment(
    cuda: bool,
    key_file: Path | None = None,
    colocated: bool = False,
    python: Path | None = None,
    host: str | None = None,
) -> dict[str, str]:
    """Return a server's environment: this process's without the trainer's variables, plus those of servers.
    ``key_file``: API key file, None for no authentication. ``python``: SGLang's interpreter. ``host``: the
    listening address, which needs no proxy."""
    # No proxy: a server ends unless it reaches itself (``_execute_server_warmup`` in http_server.py).
    environment = os.environ | _VARIABLES | without_proxy(host)
    launchers = [name for name in environment if name.startswith(("TORCHELASTIC_", "PET_"))]
    for name in (*_OTHER_ENVIRONMENT, *_LAUNCHER_VARIABLES, KEY_FILE_VARIABLE, *launchers):
        environment.pop(name, None)
    if key_file is not None:
        environment[KEY_FILE_VARIABLE] = str(key_file)
    for name in (ALLOCATOR_VARIABLE, "PYTORCH_CUDA_ALLOC_CONF"):
        if name in environment:  # SGLang's memory saver refuses the trainer's setting
            items = environment.pop(name).split(",")
            if others := [item for item in items if not item.strip().startswith("expandable_segments:")]:
                environment[name] = ",".join(others)
    if cuda and colocated:
        environment.setdefault(*_RELEASED_GRAPHS)
    if cuda and python is not None:
        # SGLang and FlashInfer compile kernels with `ninja` from their environment, which is not activated.
        # A folder already in PATH keeps its place: /usr/bin must not precede a module's compilers.
        folders = (environment.get("PATH") or os.defpath).split(os.pathsep)
        own = str(python.parent)
        environment["PATH"] = os.pathsep.join(folders if own in folders else [own, *folders])
        if colocated and (path := library_path(python, environment.get("LD_LIBRARY_PATH"))):
            environment["LD_LIBRARY_PATH"] = path
    if not cuda:
        environment |= _CPU_VARIABLES
    return environment


def sglang_python(given: Path | None = None) -> Path:
    """Return SGLang's interpreter: ``given``, else BAPO_SGLANG_PYTHON, else `make cluster`'s; without a GPU
    `make sglang`'s is preferred. Raises ConfigError if there is none."""
    variable = environment_variable(PYTHON_VARIABLE)
    named = given or (Path(variable) if variable else None)
    folders = [Path(name) for name in (_ENVIRONMENTS[1:] if should_have_gpu() else _ENVIRONMENTS)]
    places = [named] if named else [folder / "bin/python" for folder in folders]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ConfigError(
            f"no interpreter at {' or '.join(map(str, places))}: `{install_command()}` installs SGLang into "
            f"{folders[0]}; an environment elsewhere is named by {PYTHON_VARIABLE}"
        )
    return path.absolute()


class ServerProcess(ChildProcess):
    """A running server process, which ends with this process. Its children end with it, even during their
    imports, when SGLang's schedulers have not yet tied themselves to it. ``wait_ready`` and ``stop`` block.
    Call ``close`` or ``stop`` even if the server has ended: they remove its private temporary folder."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], url: str, log: Path) -> None:
        """Start the server and append its output to ``log``. Raises OSError if it cannot be started."""
        self.url, self.log = url, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._folder = private_folder(environment.get("TMPDIR"))
        environment = {**environment, "TMPDIR": self._folder}
        self.began = time.monotonic()
        with log.open("ab") as output:
            super().__init__(command, environment, guarded=True, stdout=output, stderr=subprocess.STDOUT)

    def wait_ready(self, seconds: float = 300.0) -> None:
        """Wait until it is ready. Raises RuntimeError with its log if it ends, or is stopped as too slow.
        ``seconds``: since its start, so that servers that start together share the time."""
        deadline = max(self.began + seconds, time.monotonic() + _LEAST_WAIT_S)
        while not self.is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server at {self.url} ended:\n{self._tail()}")
            if time.monotonic() > deadline:
                self.stop()
                took_s = time.monotonic() - self.began
                raise RuntimeError(
                    f"the server at {self.url} was not ready in {took_s:.0f} s:\n{self._tail()}"
                )
            time.sleep(0.2)

    def stop(self, seconds: float = 10.0) -> None:
        """End the server and its children: SIGTERM, after ``seconds`` SIGKILL. Then ``close``."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.close()

    def is_ready(self) -> bool:
        try:
            return ask(f"{self.url}/ready", timeout_s=2).status == 200
        except OSError:
            return False

    def close(self) -> None:
        """Kill and reap the server, and remove its temporary folder."""
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tail(self) -> str:
        with self.log.open("rb") as file:  # appended to by every start: it may reach gigabytes
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            return file.read().decode(errors="replace")


_LONGEST_BASE = 46
"""Longest path of the folder's parent, in bytes. Socket paths have at most 107: SGLang and Python need 45
(``sgl_ar_fd_.../rank_...``, ``pymp-.../listener-...``), the folder 14."""


def private_folder(parent: str | None) -> str:
    """Make a server's temporary folder, mode 0700. /tmp replaces a ``parent`` that is too long for sockets,
    not writable or missing (a Slurm node's TMPDIR inside a container)."""
    base = parent or "/tmp"
    if len(os.fsencode(base)) > _LONGEST_BASE:
        base = "/tmp"
    try:
        return tempfile.mkdtemp(prefix="bapo-", dir=base)
    except OSError:
        return tempfile.mkdtemp(prefix="bapo-", dir="/tmp")
