"""Commands ``bapo submit``, for Slurm, and ``status``, ``logs`` and ``cancel``, for any run."""
