"""slurm.conf and gres.conf of the local cluster: several slurmd on one host, told apart by port."""

from __future__ import annotations

from pathlib import Path

_GENERAL = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={run}/munge.socket,cred_expire=3
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
# no cgroup, no binding, no systemd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
# nodes may claim more processors, memory and GPUs than the machine has
SlurmdParameters=config_overrides
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=64
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_continue
# fast reactions: these keep the tests short
SlurmctldTimeout=30
SlurmdTimeout=5
MessageTimeout=10
InactiveLimit=0
KillWait=5
UnkillableStepTimeout=20
MinJobAge=3600
BatchStartTimeout=5
JobRequeue=1
StateSaveLocation={folder}/state
SlurmctldPidFile={run}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmctldDebug=info
SlurmdPidFile={run}/slurmd-%n.pid
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdDebug=info
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
_PARTITIONS = """\
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def slurm_conf(folder: Path, host: str, port: int, nodes: list[str], gpus: int) -> str:
    """The whole slurm.conf. Every node is at 127.0.0.1, at a port of its own."""
    general = _GENERAL.format(folder=folder, run=folder / "run", host=host, port=port)
    lines = [
        f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port + 1 + number} "
        f"CPUs=16 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN"
        for number, node in enumerate(nodes)
    ]
    return general + "\n".join(lines) + "\n" + _PARTITIONS


def gres_conf(folder: Path, nodes: list[str], gpus: int) -> str:
    """GPUs that are /dev/null by another name."""
    return (
        f"NodeName={nodes[0]},{','.join(nodes[1:])} AutoDetect=off Name=gpu "
        f"File={folder}/dev/gpu[0-{gpus - 1}]\n"
    )
