"""Slurm commands ``bapo submit``, ``status``, ``logs`` and ``cancel``.

All but ``submit`` also take a run that was started without Slurm.
"""
