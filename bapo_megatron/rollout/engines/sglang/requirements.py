"""What SGLang's servers require: an environment, flags and settings, one NCCL version, a CUDA runtime, GPUs.

No third-party package is imported, because `bapo doctor` runs on a bare machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import CommandResult, run_command
from bapo_megatron.runtime.device import should_have_gpu

if TYPE_CHECKING:
    from bapo_megatron.config import RolloutConfig

FP32_HEAD = "enable_fp32_lm_head"
"""The setting for bfloat16 models: an output layer in float32, as in the trainer."""

NO_PREFILL_GRAPH = ("--cuda-graph-backend-prefill", "disabled")
"""The flag that disables CUDA graphs of the prefill, on every server with GPUs; those of decoding stay.

SGLang's default, graphs in pieces (``breakable``), crashes a colocated server when it frees the graphs'
memory (``BreakableCudaGraphBackend`` raises NotImplementedError). It also keeps only weak references to the
pieces' inputs: greedy responses were silently wrong (sglang issue 37606)."""

ROUTES = "enable_return_routed_experts"
"""The setting of servers that return routes (``rollout.route_replay``)."""

ROUTED_KERNEL = ("--moe-runner-backend", "triton")
"""The flag of servers on GPUs that return routes: a kernel that is told the experts of each token.

SGLang notes routes where it chooses experts outside of the kernel. On Blackwell its default for Qwen3 MoE is
``flashinfer_trtllm`` (``_qwen3_moe_family_overrides``), which chooses within it: every route would be zeros
(``bind_runner_backend`` in layers/moe/topk.py). On Hopper the default is this kernel.
"""

CHOOSING_KERNELS = ("flashinfer_trtllm", "experimental_sgl_trtllm", "triton_kernel", "flashinfer_mxfp4")
"""Kernels of experts (``moe_runner_backend``) that choose within, and so return no routes."""

IN_PLACE = ("disable_radix_cache", "disable_overlap_schedule")
"""The settings (fields of ``ServerArgs``, flags with dashes) of servers with ``on_update=in_place``.

With a prefix cache, keys and values of old weights would serve new requests. With the overlap scheduler, a
pause in place leaves the results of the last step unread (``event_loop_overlap`` and ``pause_generation`` in
scheduler.py): its tokens come from the old weights, but are counted to the new ones, because the server
records the number of a request's tokens when the weights change (``record_weight_version_events``). A pause
that retracts reads the results first.
"""

OUTLIVING = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv")
"""The settings of caches that a server must not have: stores outside of its own memory.

A flush after new weights empties the server's own cache, the tier in host memory too, and leaves these
(``_reset_full`` in unified_radix_cache.py). They find keys and values by token ids, whatever weights made
them, so new requests would be served from those of earlier weights.
"""

SPECULATIVE = "--speculative-algorithm"
"""The flag of speculative decoding. New weights in parts leave a draft model as it was (sglang 27718)."""

RESERVED_TOKENS = 8
"""Reserved tokens of a server's context, which no sequence may fill.

SGLang ends a request at context - 2 - input new tokens (``init_req_max_new_tokens`` in scheduler.py; its
``max_req_len`` is context - 1) and refuses an input of context - 6 tokens or more (``max_req_input_len`` in
tp_worker.py). The last token of a sequence of n may be asked for with an input of n - 1, so n + 6 would do.
"""


def install_command() -> str:
    """The command that installs the tested SGLang for this machine."""
    return "make cluster" if should_have_gpu() else "make sglang"


def prefill_graph(settings: Mapping[str, Any]) -> str | None:
    """The backend of prefill CUDA graphs in a server's settings (``/server_info``); None if not stated."""
    graphs = settings.get("cuda_graph_config")
    prefill = graphs.get("prefill") if isinstance(graphs, Mapping) else None
    backend = prefill.get("backend") if isinstance(prefill, Mapping) else None
    return backend if isinstance(backend, str) else None


def drafting(settings: Mapping[str, Any]) -> str | None:
    """The algorithm in a server's settings that drafts with a model; None without one, as for n-grams."""
    algorithm = settings.get("speculative_algorithm")
    return algorithm if isinstance(algorithm, str) and algorithm.upper() not in ("NGRAM", "NONE") else None


def flag(setting: str) -> str:
    """The command-line flag of a setting."""
    return "--" + setting.replace("_", "-")


SHARED_FRACTION = 0.5
"""Largest share of a GPU's memory for a server on a GPU where the policy trains at the same time."""


def placement_problem(rollout: RolloutConfig, gpus: int, training: int) -> str | None:
    """The placement error, with the fix, of servers that a run starts on rank 0's node; None if they fit.

    ``gpus``: number of that node's GPUs. ``training``: number of training processes, one on each of the first
    GPUs. Servers that run already (``rollout.sglang.urls``) need none. The memory of colocated servers is
    estimated by `bapo plan`.
    """
    from bapo_megatron.config.transports import TRANSPORTS  # with third-party packages, as `rollout`

    sglang = rollout.sglang
    if sglang.urls:
        return None
    train, needed = min(gpus, training), sglang.first_gpu + sglang.servers * sglang.tensor
    taken = (
        f"rollout.sglang.first_gpu={sglang.first_gpu}, servers={sglang.servers} and tensor={sglang.tensor} "
        f"take GPUs {sglang.first_gpu} to {needed - 1}"
    )
    elsewhere = "or name servers that run elsewhere with rollout.sglang.urls"
    if needed > gpus:
        return f"{taken}, but this machine has {gpus}: start fewer servers, {elsewhere}"
    if TRANSPORTS[sglang.sync].reads_trainer_memory and needed > train:
        return (
            f"{taken}, and this run trains on GPUs 0 to {train - 1}: with rollout.sglang.sync={sglang.sync} "
            f"a server reads the memory of the process that trains on its GPU; start fewer servers, or use "
            f"sync=disk"
        )
    if sglang.first_gpu < train and not sglang.colocated and sglang.memory_fraction > SHARED_FRACTION:
        return (
            f"{taken}, and this run trains on GPUs 0 to {train - 1}: set rollout.sglang.first_gpu to {train} "
            f"and train on fewer processes if that is too many, {elsewhere}, or share GPUs: in turns with "
            f"rollout.sglang.colocated and parallel.offload, or with rollout.sglang.memory_fraction of at "
            f"most {SHARED_FRACTION}"
        )
    return None


# --- one NCCL for trainer and servers ------------------------------------------------------------


_ASK_NCCL_S, _ASK_WHEELS_S = 120.0, 60.0
_ASK_NCCL = """
from importlib import metadata
for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
else:
    import torch
    print(".".join(map(str, torch.cuda.nccl.version())))
"""
"""A program that prints NCCL's version: of the wheel that torch loads, else of torch's own build."""


def check_nccl(servers: Path) -> None:
    """Check that the servers' environment has this one's version of NCCL; else ConfigError, as if one is
    unknown. ``servers``: their interpreter.

    NCCL compares the versions of a group's ranks when it is formed, and refuses unequal ones ("Mismatched
    NCCL version detected"). torch's wheels name one each: torch 2.13.0 wants 2.29.7, and torch 2.14.1, which
    SGLang 0.5.23 wants, 2.30.7.
    """
    trainer = Path(sys.executable)
    ours, theirs = _nccl_of(trainer), _nccl_of(servers)
    if ours != theirs:
        raise ConfigError(
            f"rollout.sglang.sync=broadcast needs one NCCL for trainer and servers, and {trainer} has "
            f"{ours}, {servers} has {theirs}: `make cluster` installs one version in both environments "
            f"(cluster/nccl.txt), or set --rollout.sglang.sync disk"
        )


def nccl_settings(flags: Collection[str]) -> dict[str, str]:
    """NCCL's environment variables that a server with ``flags`` sets for itself, where they are not set.

    A group whose ranks differ in them fails when it is formed: one rank offers memory of cuMem, another opens
    it as CUDA IPC (NeMo-RL pull request 3612, SkyRL pull request 143). As ``_set_envs_and_config`` in
    SGLang's engine.py.
    """
    symmetric = "--enable-symm-mem" in flags
    multicast = symmetric or "--enable-nccl-nvls" in flags
    return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(multicast))}


def _nccl_of(python: Path) -> str:
    child = run_command([str(python), "-I", "-c", _ASK_NCCL], _ASK_NCCL_S)
    if child.ended:
        raise ConfigError(
            f"rollout.sglang.sync=broadcast needs one NCCL for trainer and servers, and {python} does not "
            f"say its version ({child.reason()}): install its environment with `make cluster`, or set "
            f"--rollout.sglang.sync disk"
        )
    return child.output.strip()


# --- the CUDA runtime of colocated servers -------------------------------------------------------


_ASK_WHEELS = """
import importlib.util
spec = importlib.util.find_spec("nvidia")
print("\\n".join(spec.submodule_search_locations or () if spec else ()))
"""
_TRY = """
import subprocess, sys, torch_memory_saver
with torch_memory_saver.configure_subprocess():
    sys.exit(subprocess.run([sys.executable, "-I", "-c", ""]).returncode)
"""
"""The preload as SGLang makes it before it starts a scheduler, here with an empty program."""


def library_path(python: Path, current: str | None) -> str | None:
    """LD_LIBRARY_PATH for a colocated server: folders of the interpreter's CUDA runtime, then ``current``.

    None if both are empty. torch_memory_saver, which SGLang preloads, needs one CUDA runtime
    (``libcudart.so.13``), without a path to it. torch finds it in its own wheels; the dynamic loader, which
    runs first, does not, and each scheduler ends with code 127 (sglang issue 36533).
    """
    return os.pathsep.join([*_runtime_folders(python), *([current] if current else [])]) or None


def tried_preload(python: Path, environment: Mapping[str, str], deadline_s: float) -> CommandResult:
    """The result of an empty program of SGLang's interpreter, started with that preload as a scheduler is."""
    return run_command([str(python), "-c", _TRY], deadline_s, environment)


@lru_cache
def _runtime_folders(python: Path) -> tuple[str, ...]:
    # Without PYTHONPATH, as servers run. Importing torch there would take seconds.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = run_command([str(python), "-I", "-c", _ASK_WHEELS], _ASK_WHEELS_S, environment)
    packages = [] if child.ended else [Path(line) for line in child.output.splitlines()]
    folders = [path.parent for package in packages for path in package.glob("*/lib/libcudart.so.*")]
    return tuple(dict.fromkeys(map(str, sorted(folders))))
