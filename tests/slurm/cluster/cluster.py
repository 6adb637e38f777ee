"""Start, failure injection and stop of the local Slurm cluster.

Each slurmd runs in namespaces of its own: its host name is the node's, and its /etc/hosts knows all nodes.
Needs root, `unshare --uts --mount`, and the packages slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.slurm.cluster.configuration import gres_conf, slurm_conf

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_BECOME = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
"""Inside new namespaces: take a host name and a table of hosts, then become the command."""
_DAEMONS = ("munged", "slurmctld", "slurmd")
START_S = 300
"""How long anything of the cluster may take on a busy machine."""


def reason_not_to_run() -> str | None:
    """Why no cluster can be started here, in one line; None if it can. Installs Slurm where it may."""
    if os.geteuid() != 0:
        return "the Slurm tests need root, to start slurmd with a host name of its own"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "the Slurm tests need `unshare --uts --mount` (in a container: CAP_SYS_ADMIN)"
    with (Path(tempfile.gettempdir()) / "bapo_installs_slurm").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # apt-get would refuse a second process
        return _not_installed()


def _not_installed() -> str | None:
    if all(shutil.which(name, path="/usr/sbin:/usr/bin") for name in (*_DAEMONS, "sbatch")):
        return None
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    if shutil.which("apt-get") is None:
        return f"the Slurm tests need Debian's packages {', '.join(PACKAGES)}"
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    subprocess.run(["apt-get", "update", "-qq"], env=quiet, capture_output=True)
    if subprocess.run(install, env=quiet, capture_output=True).returncode:
        return f"the Slurm tests need Slurm, and `{' '.join(install)}` failed"
    return None


class Cluster:
    """A running Slurm. ``environment`` is what its clients need."""

    def __init__(self, folder: Path, nodes: int = 4, gpus: int = 8) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "etc/slurm.conf")}
        self._gpus = gpus

    def start(self) -> None:
        """Bring it up; RuntimeError with the end of the logs if a node does not come."""
        for name in ("etc", "log", "run", "state", "dev", "munge"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        self._configure()
        self._munge()
        self._run("/usr/sbin/slurmctld", "-f", self.environment["SLURM_CONF"])
        for node in self.nodes:
            self._start_node(node)
        deadline = time.monotonic() + START_S
        while len(self._idle()) < len(self.nodes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {self._idle()} of {self.nodes} came up:\n{self._logs()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Cancel all jobs, then end the daemons that this cluster has started."""
        self.call("scancel", "--full", "--user=root")
        deadline = time.monotonic() + 10
        while self.call("squeue", "-h", "-t", "R,CG").strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        for node in self.nodes:
            self._kill_all(node)
        for name in ("slurmctld", "munged"):
            with suppress(OSError, ValueError):
                self._end(int((self.folder / "run" / f"{name}.pid").read_text()), name)

    def call(self, *command: str) -> str:
        """The output of a client, empty if it fails."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=START_S
        ).stdout

    def fail(self, node: str) -> None:
        """A crash: slurmd, its steps and their tasks vanish at once.

        slurmctld would notice after half a minute of silence; it is told at once. It is told again if an
        answer to its last ping, still on its way, brings the node back.
        """
        self._kill_all(node)
        seen, deadline = 0, time.monotonic() + START_S
        while seen < 3:
            assert time.monotonic() < deadline, f"{node} does not stay down:\n{self._logs()}"
            seen += 1
            if not self.call("sinfo", "-hN", "-p", "batch", "-n", node, "-o", "%T").startswith("down"):
                self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=crash")
                seen = 0
            time.sleep(0.1)

    def restore(self, node: str) -> None:
        """Start its slurmd again, and wait until it takes jobs."""
        self._start_node(node)
        self.call("scontrol", "update", f"NodeName={node}", "State=RESUME")
        deadline = time.monotonic() + START_S
        while node not in self._idle() and time.monotonic() < deadline:
            time.sleep(0.2)

    def finalize(self) -> None:
        """Until no job is left and every node takes jobs again."""
        deadline = time.monotonic() + 20
        while self.call("squeue", "-h", "-t", "all", "-o", "%T").split() and time.monotonic() < deadline:
            if not self.call("squeue", "-h", "-t", "PD,R,CG,S").strip():
                break
            time.sleep(0.2)
        for node in set(self.nodes) - set(self._idle()):
            self.restore(node)

    def _configure(self) -> None:
        folder, host = self.folder, socket.gethostname().split(".")[0]
        (folder / "etc/slurm.conf").write_text(
            slurm_conf(folder, host, _free_ports(len(self.nodes) + 1), self.nodes, self._gpus)
        )
        (folder / "etc/gres.conf").write_text(gres_conf(folder, self.nodes, self._gpus))
        # Never asked for, and looked for all the same: without this slurmd may not start in a container.
        (folder / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # 127.0.0.1 for all: an srun inside a job listens where its node's name points, and is called there.
        names = "\n".join(f"127.0.0.1 {name}" for name in ("localhost", host, *self.nodes))
        (folder / "etc/hosts").write_text(names + "\n")
        for number in range(self._gpus):
            device = folder / f"dev/gpu{number}"
            if not device.exists():
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))

    def _munge(self) -> None:
        """A munge daemon of our own, with a key and a socket of its own."""
        private = self.folder / "munge"
        private.chmod(0o700)
        key = private / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        run, log = self.folder / "run", self.folder / "log/munged.log"
        self._run(
            "/usr/sbin/munged", "--force", f"--socket={run}/munge.socket", f"--key-file={key}",
            f"--pid-file={run}/munged.pid", f"--log-file={log}", f"--seed-file={private}/seed",
        )  # fmt: skip

    def _start_node(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir(parents=True, exist_ok=True)
        slurmd = ("/usr/sbin/slurmd", "-N", node, "-f", self.environment["SLURM_CONF"])
        hosts = str(self.folder / "etc/hosts")
        self._run("unshare", "--uts", "--mount", "sh", "-c", _BECOME, "become", node, hosts, *slurmd)

    def _run(self, *command: str) -> None:
        found = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if found.returncode:
            raise RuntimeError(f"{' '.join(command)}: {found.stderr or found.stdout}\n{self._logs()}")

    def _idle(self) -> list[str]:
        lines = self.call("sinfo", "-hN", "-p", "batch", "-o", "%N %T").splitlines()
        return [line.split()[0] for line in lines if re.search(r" (idle|mixed|allocated)$", line)]

    def _kill_all(self, node: str) -> None:
        for pid in list(self._processes_of(node)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes_of(self, node: str) -> Iterator[int]:
        """Everything in the namespace of the node's slurmd."""
        try:
            slurmd = int((self.folder / f"run/slurmd-{node}.pid").read_text())
            if (Path("/proc") / str(slurmd) / "comm").read_text().strip() != "slurmd":
                return
            namespace = os.readlink(f"/proc/{slurmd}/ns/uts")
        except (OSError, ValueError):
            return
        if namespace == os.readlink("/proc/self/ns/uts"):
            return
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if os.readlink(entry / "ns/uts") == namespace:
                        yield int(entry.name)

    def _end(self, pid: int, name: str) -> None:
        """Ask the daemon to end, then make it."""
        process = Path("/proc") / str(pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not process.exists() or (process / "comm").read_text().strip() != name:
                return
            os.kill(pid, number)
            deadline = time.monotonic() + 5
            while process.exists() and time.monotonic() < deadline:
                if (process / "stat").read_text().split()[2] == "Z":
                    return
                time.sleep(0.05)

    def _logs(self) -> str:
        tails = [f"{path.name}:\n{path.read_text()[-800:]}" for path in (self.folder / "log").glob("*.log")]
        return "\n".join(tails)


def _free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])  # workers must not take each other's
    for first in range(26817 + 500 * worker, 26817 + 500 * (worker + 1), count):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
    raise RuntimeError(f"no {count} free ports in a row")
