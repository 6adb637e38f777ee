"""A real Slurm of several nodes on this one machine, without systemd and without cgroups."""
