"""Device detection without an early import of torch: CUDA or CPU, and environment variables for it.

``uses_gpu`` returns whether this process computes on a GPU. If torch cannot use the machine's GPU (an old
driver, a container without its GPU hook, a CPU build of torch), it raises ConfigError, since a run on the CPU
would be correct and a thousand times too slow; ``BAPO_DEVICE=cpu`` asks for the CPU. ``prepare_device`` sets
the variables of torch and its compilers and must be called before torch is imported, ``silence_libraries``
those of other libraries. ``choose_vector_kernels`` makes MKL's results reproducible.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from bapo_megatron.errors import ConfigError

DEVICE_VARIABLE = "BAPO_DEVICE"
"""Environment variable; `cpu` means computing on the CPU, whatever the machine has."""
ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
GROWING_SEGMENTS = "expandable_segments:True"
_KERNELS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variables of compiled-kernel folders, and their names in the run's folder."""
_FOLDER = "bapo-kernels-"
"""Prefix of that folder's name."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NONE_VISIBLE = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU; the last is Slurm's."""
_SLURM_GPUS = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_ON_NODE"),
    *("SLURM_JOB_GPUS", "SLURM_STEP_GPUS"),
)
"""Slurm variables with a job's GPUs: counts or device lists."""
_DEVICE_FILES = (Path("/dev"), "nvidia[0-9]*")
_DRIVER_FILES = (Path("/proc/driver/nvidia/gpus"), "*")
"""The kernel module's GPU list, visible in containers even without the devices."""


def uses_gpu() -> bool:
    """Whether this process computes on a GPU. Raises ConfigError with torch's reason if this machine should
    have a GPU and torch cannot use it."""
    if wants_cpu():
        return False
    import torch

    if torch.cuda.is_available():
        return True
    if problem := gpu_problem():
        raise ConfigError(problem)
    return False


def gpu_problem() -> str | None:
    """Return why torch cannot use this machine's GPU, with the fix; None if it can or there is no GPU."""
    signs = [] if wants_cpu() else list(gpu_signs())
    if not signs:
        return None
    import torch

    if torch.cuda.is_available():
        return None
    return (
        f"this machine should have a GPU ({'; '.join(signs)}), but torch {torch.__version__} cannot use one: "
        f"{_torch_reason()}. Its CUDA is {torch.version.cuda}: install a CUDA build (`make cluster`), update "
        "the driver (CUDA 13: R580 or newer), or start the container with its GPUs (docker: --gpus all; "
        f"enroot: NVIDIA_VISIBLE_DEVICES=all); {DEVICE_VARIABLE}=cpu asks for the CPU"
    )


def environment_variable(name: str) -> str | None:
    """Return an environment variable; None if unset or empty, as scripts may leave it. All code here reads
    variables this way, except CUDA_VISIBLE_DEVICES: an empty one hides the GPUs."""
    return os.environ.get(name) or None


def set_default(name: str, value: str) -> None:
    """Set an environment variable that is unset or empty."""
    os.environ[name] = environment_variable(name) or value


def wants_cpu() -> bool:
    """Whether the environment asks for the CPU. Raises ConfigError for an unknown device."""
    asked = environment_variable(DEVICE_VARIABLE)
    if asked not in (None, "cpu"):
        raise ConfigError(
            f"{DEVICE_VARIABLE}={asked!r}: `cpu` asks for the CPU; leave it out for a GPU where there is one"
        )
    return asked == "cpu"


def should_have_gpu() -> bool:
    """Whether this machine or job has GPUs to use, by ``gpu_signs``, without torch."""
    return not wants_cpu() and any(gpu_signs())


def prepare_device() -> None:
    """Set the device's environment variables for this process and its children, before torch is imported.

    BAPO_DEVICE=cpu hides every GPU. Otherwise torch's CUDA allocator gets expandable segments, since packs of
    varying length fragment fixed ones. With a GPU, compiled kernels get folders on this machine: Triton's
    default is the home folder, which nodes share, and over a network file system ranks that compile at the
    same time fail ("Stale file handle", triton issue 11512). User settings stay; folders set by a run on
    another machine, passed on by sbatch, are replaced.
    """
    if wants_cpu():
        os.environ[_VISIBLE] = ""
        return
    if environment_variable("PYTORCH_CUDA_ALLOC_CONF") is None:  # the name before torch 2.9
        set_default(ALLOCATOR_VARIABLE, GROWING_SEGMENTS)
    names = [name for name in _KERNELS if _FOLDER in (environment_variable(name) or _FOLDER)]
    for name in names:
        os.environ.pop(name, None)
    if names and any(gpu_signs()) and (folder := _own_folder()):
        os.environ |= {name: os.path.join(folder, _KERNELS[name]) for name in names}


def _own_folder() -> str | None:
    """Return this user's program folder in TMPDIR on this machine; None if it cannot hold programs. Only the
    user may write to it: every rank loads its content."""
    try:
        path = Path(tempfile.gettempdir(), f"{_FOLDER}{os.getuid()}-{socket.gethostname()}")
        path.mkdir(mode=0o700, exist_ok=True)
        about, runs_nothing = path.lstat(), os.statvfs(path).f_flag & os.ST_NOEXEC
    except OSError:
        return None
    is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return str(path) if is_own and not runs_nothing else None


def gpu_signs() -> Iterator[str]:
    """Yield evidence, in words, that this machine has a GPU or this job asked for one.

    An empty or -1 CUDA_VISIBLE_DEVICES hides the machine's GPUs on purpose, but not Slurm variables of a job
    that asked for GPUs.
    """
    yield from _signs_of_job(os.environ)
    visible = os.environ.get(_VISIBLE)
    if visible in _NONE_VISIBLE:
        return
    if visible is not None:
        yield f"{_VISIBLE}={visible}"
    for folder, pattern in (_DEVICE_FILES, _DRIVER_FILES):
        if paths := sorted(folder.glob(pattern)):
            yield f"{paths[0]} exists"


def _signs_of_job(environment: Mapping[str, str]) -> Iterator[str]:
    for name in _SLURM_GPUS:
        value = environment.get(name, "")
        if value.rpartition(":")[2] not in ("", "0"):  # may be a type and a count, as in h100:8
            yield f"{name}={value}"


def _torch_reason() -> str:
    """Return torch's error on CUDA initialization, in one line."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # AssertionError from a CPU build, RuntimeError from the driver
        return " ".join(str(error).split()).rstrip(".")
    return "it counts no device"


def choose_vector_kernels() -> None:
    """Call MKL's vector functions once on one thread, which makes their results reproducible.

    Called before the first forward pass on a CPU. MKL chooses a function's kernel at its first call; with
    several threads in that call, one sometimes gets a less exact kernel: in about one process in ten the RoPE
    cosines of half a pack are off by up to 1.5e-4 in the first forward pass.
    """
    import torch

    values = torch.linspace(0.1, 1.0, 64)  # too few to split between threads
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.tanh):
        function(values)


def silence_libraries() -> None:
    """Called at a process's start: sets defaults (Hugging Face offline, fewer threads) and hides warnings."""
    set_default("HF_HUB_OFFLINE", "1")
    set_default("TOKENIZERS_PARALLELISM", "false")
    set_default("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve their neighbours
    for module in ("megatron", "torch", "transformers", "bapo_megatron.policy.device"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
    for module in ("megatron", "torch.multiprocessing.spawn"):  # the latter reports each process it ends
        logging.getLogger(module).setLevel(logging.ERROR)
