"""Requirements of SGLang servers: flags, environment variables, CUDA runtime, GPU placement.

The constants name flags and settings, and say why; the functions check them or return what to set. Importing
this file imports no third-party package, because `bapo doctor` runs on a bare machine.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.runtime.child_process import CommandResult, run_command
from bapo_megatron.runtime.device import should_have_gpu

if TYPE_CHECKING:
    from bapo_megatron.config import RolloutConfig

FP32_HEAD = "enable_fp32_lm_head"
"""Setting of bfloat16 models: output layer in float32, as in the trainer."""

NO_PREFILL_GRAPH = ("--cuda-graph-backend-prefill", "disabled")
"""Flag that disables prefill CUDA graphs on every GPU server; decode graphs stay. SGLang's default, piecewise
graphs (``breakable``), cannot free graph memory (NotImplementedError of ``BreakableCudaGraphBackend``) and
holds only weak references to inputs, so that greedy responses were silently wrong (sglang issue 37606)."""

ROUTES = "enable_return_routed_experts"
"""Setting of servers that return routes (``rollout.route_replay``)."""

ROUTED_KERNEL = ("--moe-runner-backend", "triton")
"""Flag of GPU servers that return routes: a kernel that takes the experts of each token as input. SGLang
records routes only if it chooses experts outside the kernel. Its Blackwell default for Qwen3 MoE,
``flashinfer_trtllm`` (``_qwen3_moe_family_overrides``), chooses inside: every route would be zeros
(``bind_runner_backend`` in layers/moe/topk.py). The Hopper default is this kernel."""

IN_PLACE = ("disable_radix_cache", "disable_overlap_schedule")
"""Settings (fields of ``ServerArgs``, flags with dashes) of servers with ``on_update=in_place``. With a
prefix cache, keys and values of old weights would serve new requests. With the overlap scheduler, an in-place
pause leaves the last step's results unread (``event_loop_overlap`` and ``pause_generation`` in scheduler.py):
its tokens come from old weights but are attributed to the new ones, because the server records each request's
token count at the change (``record_weight_version_events``). Retraction reads them first."""

OUTLIVING = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv")
"""Settings of forbidden caches: stores outside the server's memory. The flush after new weights empties the
server's own cache, including its host-memory tier, but not these (``_reset_full`` in unified_radix_cache.py).
They look up keys and values by token ids alone, so that new requests would get those of earlier weights."""

SPECULATIVE = "--speculative-algorithm"
"""Flag of speculative decoding. New weights in parts do not update a draft model (sglang 27718)."""

RESERVED_TOKENS = 8
"""Context tokens of a server beyond the longest sequence, n. SGLang ends a request after context - 2 - input
new tokens (``init_req_max_new_tokens`` in scheduler.py) and refuses inputs of context - 6 tokens or more
(``max_req_input_len`` in tp_worker.py). The last token may need an input of n - 1: n + 6 would suffice."""


def install_command() -> str:
    """Return the command that installs the tested SGLang on this machine."""
    return "make cluster" if should_have_gpu() else "make sglang"


def drafting(settings: Mapping[str, Any]) -> str | None:
    """Return the speculative algorithm in a server's settings if it has a draft model, else None."""
    algorithm = settings.get("speculative_algorithm")
    return algorithm if isinstance(algorithm, str) and algorithm.upper() not in ("NGRAM", "NONE") else None


def flag(setting: str) -> str:
    """Return a setting's command-line flag."""
    return "--" + setting.replace("_", "-")


def setting_problems(settings: Mapping[str, Any], sync: str, on_update: str) -> Iterator[str]:
    """Yield why new weights would not reach every token of a server with these settings, and the fix."""
    if sync != "disk" and (draft := drafting(settings)):
        yield (
            f"its draft model ({SPECULATIVE} {draft}) gets new weights from disk alone: set "
            f"rollout.sglang.sync=disk, or start it without {SPECULATIVE}"
        )
    for field in OUTLIVING:
        if settings.get(field):
            yield f"start it without {flag(field)}: it keeps keys and values of earlier weights"
    for field in IN_PLACE if on_update == "in_place" else ():
        if settings.get(field) is False:
            yield f"start it with {flag(field)} for rollout.sglang.on_update=in_place"


SHARED_FRACTION = 0.5
"""Largest GPU memory fraction of a server on a GPU where the policy trains concurrently."""


def placement_problem(rollout: RolloutConfig, gpus: int, training: int) -> str | None:
    """Return the error in the GPU placement of servers that a run starts on rank 0's node, with its fix; None
    if there is none, or servers already run (``rollout.sglang.urls``). ``gpus``: GPUs of that node.
    ``training``: training processes, one on each of the first GPUs. `bapo plan` estimates the memory."""
    from bapo_megatron.config.transports import TRANSPORTS  # imports third-party packages

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


# --- environment variables of NCCL ---------------------------------------------------------------


def nccl_settings(flags: Collection[str]) -> dict[str, str]:
    """Return the NCCL environment variables that a server with ``flags`` sets if they are unset. A group
    whose ranks differ in them fails to form: one rank offers cuMem memory, another opens it as CUDA IPC
    (NeMo-RL pull request 3612, SkyRL pull request 143). As ``_set_envs_and_config`` in SGLang's engine.py."""
    symmetric = "--enable-symm-mem" in flags
    multicast = symmetric or "--enable-nccl-nvls" in flags
    return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(multicast))}


# --- the CUDA runtime of colocated servers -------------------------------------------------------


_ASK_WHEELS_S = 60.0
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
"""Program that runs an empty program with the preload that SGLang applies to a scheduler."""


def library_path(python: Path, current: str | None) -> str | None:
    """Return LD_LIBRARY_PATH for a colocated server: the interpreter's CUDA runtimes, then ``current``. None
    if both are empty. torch_memory_saver, which SGLang preloads, needs ``libcudart.so.13``: the dynamic
    loader does not find it in torch's wheels, so schedulers would end with code 127 (sglang issue 36533)."""
    return os.pathsep.join([*_runtime_folders(python), *([current] if current else [])]) or None


def tried_preload(python: Path, environment: Mapping[str, str], deadline_s: float) -> CommandResult:
    """Run an empty program in SGLang's interpreter with a scheduler's preload; return its result."""
    return run_command([str(python), "-c", _TRY], deadline_s, environment)


@lru_cache
def _runtime_folders(python: Path) -> tuple[str, ...]:
    # Without PYTHONPATH, as servers run. Importing torch there would take seconds.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = run_command([str(python), "-I", "-c", _ASK_WHEELS], _ASK_WHEELS_S, environment)
    packages = [] if child.ended else [Path(line) for line in child.output.splitlines()]
    folders = [path.parent for package in packages for path in package.glob("*/lib/libcudart.so.*")]
    return tuple(dict.fromkeys(map(str, sorted(folders))))
