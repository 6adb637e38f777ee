"""GPU placement of the SGLang servers that a run starts: the check of `bapo plan` and `bapo train`.

It returns the problem as text, and starts nothing. Used by ``commands/cluster/job.py``,
``planning/job.py`` and ``backend.py``.
"""

from __future__ import annotations

from bapo_megatron.config import RolloutConfig

SHARED_FRACTION = 0.5
"""Largest share of a GPU's memory for a server on a GPU where the policy trains at the same time."""


def placement_problem(rollout: RolloutConfig, gpus: int, training: int) -> str | None:
    """The placement error, with the fix, of servers that a run starts on rank 0's node; None if they fit.

    ``gpus``: number of that node's GPUs. ``training``: number of training processes, one on each of the first
    GPUs. Servers that run already (``rollout.sglang.urls``) need none. The memory of colocated servers, which
    take turns with the policy, is estimated by `bapo plan`.
    """
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
    if sglang.sync == "ipc" and needed > train:
        return (
            f"{taken}, and this run trains on GPUs 0 to {train - 1}: with rollout.sglang.sync=ipc a server "
            f"reads the memory of the process that trains on its GPU; start fewer servers, or use sync=disk"
        )
    if sglang.first_gpu < train and not sglang.colocated and sglang.memory_fraction > SHARED_FRACTION:
        return (
            f"{taken}, and this run trains on GPUs 0 to {train - 1}: set rollout.sglang.first_gpu to {train} "
            f"and train on fewer processes if that is too many, {elsewhere}, or share GPUs: in turns with "
            f"rollout.sglang.colocated and parallel.offload, or with rollout.sglang.memory_fraction of at "
            f"most {SHARED_FRACTION}"
        )
    return None
