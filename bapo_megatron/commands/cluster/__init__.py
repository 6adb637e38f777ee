"""Slurm commands ``bapo submit``, ``status``, ``logs`` and ``cancel``; the last three also take a local
run."""
