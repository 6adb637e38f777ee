"""Slurm commands ``bapo submit``, ``status``, ``logs`` and ``cancel``; all but ``submit`` take any run."""
