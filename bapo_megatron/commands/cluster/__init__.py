"""Slurm commands ``bapo submit``, ``status``, ``logs`` and ``cancel``. All but ``submit`` also take a local
run."""
