"""Limits of a partition, as ``sinfo`` reports them: what a job of ``bapo submit`` would wait for in vain.

Slurm takes a job that no node of its partition can ever start, and lets it wait. Warnings alone, since a
site's QOS may raise the limits; none where Slurm does not answer. Used by ``submit.py``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from bapo_megatron.commands.cluster.cluster_file import ClusterFile, seconds_of
from bapo_megatron.commands.cluster.run_job import SlurmError, call_slurm

_LINE = re.compile(r"([^|]+)\|(infinite|UNLIMITED|n/a|(?:\d+-)?\d+(?::\d+){0,2})\|(\d+)")
"""Partition, time limit and number of nodes."""


def partition_warnings(cluster: ClusterFile, nodes: int) -> Iterator[str]:
    """What the file's partition cannot give: its time, or ``nodes`` nodes."""
    try:
        # Lines of a partition are for each state of its nodes; a hidden partition needs -a.
        said = call_slurm("sinfo", "-a", "-h", "-p", cluster.partition, "-o", "%R|%l|%D")
    except SlurmError:
        return
    sizes: dict[str, int] = defaultdict(int)
    limits: dict[str, str] = {}
    for line in said.splitlines():
        if found := _LINE.fullmatch(line):  # a site's sinfo may say more
            name, limit, count = found.groups()
            sizes[name] += int(count)
            limits[name] = limit
    if not limits:
        return
    ends = [seconds_of(limit) if limit[:1].isdigit() else float("inf") for limit in limits.values()]
    if seconds_of(cluster.time) > max(ends):
        yield (
            f"time = {cluster.time!r} is above the limit of partition {cluster.partition}, "
            f"{', '.join(sorted(set(limits.values())))}: the job would wait for ever (PartitionTimeLimit)"
        )
    if nodes > max(sizes.values()):
        yield (
            f"the job takes {nodes} nodes, and partition {cluster.partition} has {max(sizes.values())}: it "
            f"would wait for ever"
        )
