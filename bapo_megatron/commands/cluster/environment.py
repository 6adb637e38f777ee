"""Environment of a submission: the variables of this shell that a job may get, by the rules of ``submit.py``.

``sbatch`` hands its environment on to the job, where variables of other purposes would take effect without a
word: defaults of sbatch (stronger than the script's header), those of the job that this shell is in (Slurm
24.11 refuses two different SLURM_CPUS_PER_TASK), and settings of a job by plain sbatch, as BAPO_DEVICE=cpu.
Used by ``submit.py``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path

_OF_CLIENTS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_SACK_KEY")
"""Slurm's variables that say where and who its controller is, and not what a job is."""
_OF_CONTAINERS = tuple(f"PYXIS_CONTAINER_{name}" for name in ("IMAGE", "MOUNTS", "WORKDIR", "NAME", "SAVE"))
"""Defaults of pyxis for every srun: also of a job that has no container."""
_OF_JOBS = ("SLURM_", "SLURMD_", "SRUN_")


def submission_environment(
    shell: Mapping[str, str], settings: Container[str], library: Path
) -> tuple[dict[str, str], list[str]]:
    """The environment for the submission of a job, and the names of what it leaves out and a user may miss.

    ``shell``: the environment of the command. ``settings``: names that the job's script sets itself.
    ``library``: the folder ``slurm/lib``, whose ``settings.sh`` has the names of all settings of a job.
    """
    of_plain_sbatch = {"BAPO_DEVICE", *re.findall(r"(?m)^(BAPO_\w+)=", (library / "settings.sh").read_text())}
    in_a_job = "SLURM_JOB_ID" in shell
    kept, left_out = {}, []
    for name, value in shell.items():
        if in_a_job and name.startswith(_OF_JOBS) and name not in _OF_CLIENTS:
            continue
        # NeMo-Run's environment has other versions of packages than this one, which PYTHONPATH would mix in.
        if name == "PYTHONPATH" or name in of_plain_sbatch or name.startswith(("SBATCH_", *_OF_CONTAINERS)):
            if name not in settings:
                left_out.append(name)
            continue
        kept[name] = value
    return kept, sorted(left_out)
