"""Runs on a cluster: submitting them, and seeing how they are. Needs no Slurm to look at a local run."""
