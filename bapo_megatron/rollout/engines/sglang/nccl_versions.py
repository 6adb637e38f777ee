"""The check of NCCL versions: trainer and SGLang servers need the same one for a weight sync by broadcast.

Made before a run with sync=broadcast on GPUs, by a program in each environment of this machine. NCCL
compares the versions of a group's ranks when it is formed, and refuses unequal ones ("Mismatched NCCL
version detected"). torch's wheels name one version each: torch 2.13.0 wants 2.29.7, and torch 2.14.1, which
SGLang 0.5.23 wants, 2.30.7. Used by ``backend.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import run_command

_DEADLINE_S = 120.0
_ASK = """
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


def check_nccl(servers: Path, trainer: Path | None = None) -> None:
    """Check that two environments have one version of NCCL. ConfigError if not, or if one is unknown.

    ``servers``, ``trainer``: their interpreters; None: this one.
    """
    trainer = trainer or Path(sys.executable)
    ours, theirs = _nccl_of(trainer), _nccl_of(servers)
    if ours != theirs:
        raise ConfigError(
            f"rollout.sglang.sync=broadcast needs one NCCL for trainer and servers, and {trainer} has "
            f"{ours}, {servers} has {theirs}: `make cluster` installs one version in both environments "
            f"(cluster/nccl.txt), or set --rollout.sglang.sync disk"
        )


def _nccl_of(python: Path) -> str:
    child = run_command([str(python), "-I", "-c", _ASK], _DEADLINE_S)
    if child.ended:
        raise ConfigError(
            f"rollout.sglang.sync=broadcast needs one NCCL for trainer and servers, and {python} does not "
            f"say its version ({child.reason()}): install its environment with `make cluster`, or set "
            f"--rollout.sglang.sync disk"
        )
    return child.output.strip()
