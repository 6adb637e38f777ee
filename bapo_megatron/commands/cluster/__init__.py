"""Slurm commands ``bapo submit``, ``status``, ``logs``, ``cancel``; all but ``submit`` also for local
runs."""
