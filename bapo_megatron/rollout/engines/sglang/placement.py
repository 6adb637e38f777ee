"""The GPUs of SGLang servers that a run starts itself, as `bapo plan` and `bapo train` both ask for them."""

from __future__ import annotations

from bapo_megatron.config import RolloutConfig

SHARED_FRACTION = 0.5
"""Most of a GPU's memory that a server may take where the policy trains at the same time."""


def placement_problem(rollout: RolloutConfig, gpus: int, training: int) -> str | None:
    """Why the servers that a run starts find no GPUs on rank 0's node, or no memory on them; None if they do.

    ``gpus``: of that node. ``training``: processes that train, one on each of the first GPUs. Servers that
    run elsewhere already (``rollout.sglang.urls``) need none. Whether colocated ones, which take turns with
    the policy, find memory is for `bapo plan` to say.
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
