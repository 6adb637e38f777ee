"""Slurm commands: submission of runs, and their status, logs and cancellation. Local runs need no Slurm."""
