"""What a tested program can reach: nothing of others, as root and as an ordinary user, also in containers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.sandbox import file_system, isolation, system_calls
from bapo_megatron.reward.sandbox import sandbox as sandbox_module
from bapo_megatron.reward.sandbox.sandbox import Sandbox, checked_sandbox
from tests.support import sandbox_attacks

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[3]
NOBODY = 65534
BEYOND_AN_ORDINARY_USER = {
    *("library of one's own", "mode of a device", "device made", "descriptors left open", "host name"),
    *("environment of the server", "root of the server", "mount", "chroot", "BPF", "performance"),
    *("32-bit numbers", "root again"),
}
"""Attacks that fail without walls, too, if the program's user is not root; they are for root."""


def interpreter_of(user: int) -> str:
    """A Python that the user may run; skips where there is none."""
    if user == os.geteuid():
        return sys.executable
    probe = "import sys, bapo_megatron.reward.sandbox.sandbox; sys.exit(sys.version_info < (3, 11))"
    for python in filter(None, (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin"))):
        try:
            done = run_as(user, [python, "-c", probe])
        except OSError:
            continue
        if done.returncode == 0:
            return python
    pytest.skip(f"user {user} can run no Python here that can read {REPOSITORY}")


def run_as(user: int, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as the user, with this repository's package."""
    other = {"user": user, "group": user, "extra_groups": []}
    identity: dict[str, Any] = {} if user == os.geteuid() else other
    variables = {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    return subprocess.run(
        command, capture_output=True, text=True, cwd="/", env={**variables, **environment}, **identity
    )


@pytest.fixture
def public() -> Iterator[Callable[[int], Path]]:
    """A maker of directories for a user, where all users may go."""
    made: list[str] = []

    def make(user: int) -> Path:
        made.append(tempfile.mkdtemp(prefix="bapo_attacks_", dir="/tmp"))
        os.chmod(made[-1], 0o755)
        if user != os.geteuid():
            os.chown(made[-1], user, user)
        return Path(made[-1])

    yield make
    for path in made:
        shutil.rmtree(path)


def attacked(user: int, mode: str, folder: Path, container: tuple[str, ...] = ()) -> dict[str, Any]:
    """What each attack came to. ``container``: a command before Python's."""
    if user != os.geteuid() and os.geteuid() != 0:
        pytest.skip(f"only root can become user {user}")
    python = interpreter_of(NOBODY if container else user)  # what root becomes there must be able to read it
    if container and (shutil.which(container[0]) is None or run_as(user, [*container, "true"]).returncode):
        pytest.skip(f"user {user} cannot run {container[0]} here")
    command = [*container, python, sandbox_attacks.__file__, mode, str(folder)]
    done = run_as(user, command, TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


ROOT_OF_DOCKER = ("setpriv", "--bounding-set=-sys_admin")
ROOTLESS = ("unshare", "--user", "--map-root-user")


@pytest.mark.parametrize(
    ("user", "mode", "container"),
    [
        *((user, mode, ()) for user in (0, NOBODY) for mode in ("full", "old kernel")),
        # Docker with a relaxed profile; a rootless container, whose user is root. Programs are neither.
        (0, "full", ROOT_OF_DOCKER),
        (NOBODY, "full", ROOTLESS),
    ],
)
def test_no_attack_works_behind_all_walls(
    user: int, mode: str, container: tuple[str, ...], public: Callable[[int], Path]
) -> None:
    found = attacked(user, mode, public(user), container)
    if notes := found.pop("notes"):
        pytest.skip(f"this kernel does not permit the whole sandbox: {notes}")
    assert {name: result for name, result in found.items() if result is not False} == {}
    assert len(found) > 110


def test_threads_of_the_machines_root_are_told(public: Callable[[int], Path]) -> None:
    """In a user namespace of its root alone: the kernel counts no threads of that user."""
    if os.geteuid() != 0:
        pytest.skip("only root is root")
    found = attacked(0, "full", public(0), ROOTLESS)
    is_told = "nothing counts" in "".join(found.pop("notes"))
    if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:  # root of the machine
        assert is_told
    worked = {name for name, result in found.items() if result is not False}
    assert worked <= ({"many threads"} if is_told else set())


@pytest.mark.parametrize("user", [0, NOBODY])
def test_without_namespaces_landlock_and_the_filter_hold(user: int, public: Callable[[int], Path]) -> None:
    """Docker's default profile. The directory is on the machine's disk then, which may limit files itself."""
    found = attacked(user, "docker", public(user))
    assert "no namespaces" in found.pop("notes")[-1]
    if file_system.landlock_version() < 3:
        pytest.skip(f"the kernel has version {file_system.landlock_version()} of Landlock, not 3")
    assert {name for name, result in found.items() if result is not False} <= {"many files"}


FILES = {
    *("read", "read in C", "list", "write", "write in C", "truncate", "truncate in C", "dir_fd", "rename"),
    *("rename in C", "remove in C", "remove by dir_fd", "link in C", "fifo written", "sqlite"),
    *("sqlite attached", "shared memory in C", "library of one's own", "device", "command lines"),
    *("command line in C", "environment", "memory", "TCP table", "kernel's settings"),
}
"""Attacks on what the run's user may read or write, /proc among it."""


@pytest.mark.parametrize("user", [0, NOBODY])
def test_what_one_wall_alone_holds(user: int, public: Callable[[int], Path]) -> None:
    """Landlock holds files, the filter all else. For ``reward.allow_weak_sandbox``."""
    found = {mode: attacked(user, mode, public(user)) for mode in ("filter alone", "landlock alone")}
    assert [results.pop("notes")[-1][:11] for results in found.values()] == ["no Landlock", "no filter"]
    worked = {mode: {name for name, result in found[mode].items() if result is not False} for mode in found}
    assert worked["filter alone"] <= FILES | {"many files"}
    if file_system.landlock_version() < 3:
        pytest.skip(f"the kernel has version {file_system.landlock_version()} of Landlock, not 3")
    assert not worked["landlock alone"] & FILES


NO_WALLS = """
from bapo_megatron.reward.sandbox import isolation as w
w.enter_namespaces, w._become = lambda *_: w.Walls(), lambda *_: None
w.file_system.confine, w.system_calls.problem = lambda *_: False, lambda: "no filter"
"""


def test_without_any_wall_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sandbox_module, "_BEGIN", sandbox_module._BEGIN.replace("del sys", NO_WALLS + "del sys")
    )
    with pytest.raises(
        ConfigError, match="nothing would hold programs on this machine: no Landlock .*; no filter"
    ):
        checked_sandbox(allow_weak=True)


def test_the_attacks_are_attacks(public: Callable[[int], Path]) -> None:
    """Without any wall they work, for an ordinary user."""
    user = os.geteuid() or NOBODY
    found = attacked(user, "none", public(user))
    del found["notes"]
    assert {name for name, result in found.items() if result is not True} <= BEYOND_AN_ORDINARY_USER


@pytest.mark.parametrize(
    ("machine", "headers"),
    [
        ("x86_64", ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h")),
        ("aarch64", ("/usr/include/asm-generic/unistd.h",)),
    ],
)
def test_numbers_are_those_of_the_kernels_headers(machine: str, headers: tuple[str, ...]) -> None:
    texts = [Path(header).read_text() for header in headers if Path(header).is_file()]
    if not texts:
        pytest.skip(f"no headers of the kernel for {machine} here")
    defined = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", texts[0], re.MULTILINE)
    known = {name: int(number) for name, number in defined}
    tables = (system_calls.DENIED, system_calls.DENIED_ON_SHARED_FILES, system_calls.CHECKED)
    ours = {name: number for table in tables for name, number in system_calls.numbers(table, machine).items()}
    younger = {"fchmodat2", "statmount", "listmount"}  # than the headers of some distributions
    assert {name: number for name, number in ours.items() if known.get(name) != number}.keys() <= younger
    every = {entry.split(":")[0] for table in tables for entry in table.split()}
    assert not [name for name in every - ours.keys() if name in known]  # "-" stands where there is none


def test_the_filter_fits_both_machines() -> None:
    """Jumps of classic BPF reach 255 instructions, and a program may have 4,096."""
    for machine in ("x86_64", "aarch64"):
        for shared in (False, True):
            assert len(system_calls.program(machine, shared)) // 8 < 255


ORDINARY = {
    "threads": "from concurrent.futures import ThreadPoolExecutor as T\nprint(sum(T(32).map(int, '1234')))",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 10\n"
    "print(asyncio.run(f()))",
    "named temporary file": "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n"
    "    f.write('10'); f.flush()\n    print(open(f.name).read())",
    "sqlite file": "import sqlite3\nc = sqlite3.connect('own.db')\n"
    "c.execute('create table t (a)')\nprint(10)",
    "files": "import os, pathlib, shutil\npathlib.Path('a').write_text('10')\nos.rename('a', 'b')\n"
    "os.makedirs('c/d'); shutil.copy('b', 'c/d/e')\nprint(pathlib.Path('c/d/e').read_text())\n"
    "os.truncate('b', 1); shutil.rmtree('c')",
    "ctypes": "import ctypes\nprint(ctypes.CDLL(None).abs(-10))",
    "recursion": "import sys, threading\nsys.setrecursionlimit(100000)\nthreading.stack_size(64 << 20)\n"
    "def f(n): return n and 1 + f(n - 1)\n"
    "t = threading.Thread(target=lambda: print(f(20000) // 2000)); t.start(); t.join()",
    "null": "print(10, file=open('/dev/null', 'w'))\nprint(10)",
    "limits": "import resource as r\nr.setrlimit(r.RLIMIT_STACK, r.getrlimit(r.RLIMIT_STACK))\nprint(10)",
}
STDIN = {
    "path": "print(sum(map(int, open('/dev/stdin').read().split())))",
    "descriptor": "print(sum(map(int, open(0).read().split())))",
}


def prints(source: str) -> str:
    with Sandbox(source, "", 1024, 20.0) as sandbox:
        ended = sandbox.run("1 9\n", 20.0)
        assert ended is not None
        return ended.output


@pytest.mark.parametrize("source", [*ORDINARY.values(), *STDIN.values()], ids=[*ORDINARY, *STDIN])
def test_ordinary_programs_run(source: str) -> None:
    assert prints(source) == "10\n"


MANY_THREADS = """
import threading
threading.stack_size(65536)
done, count = threading.Event(), 0
try:
    for _ in range(400):
        threading.Thread(target=done.wait, daemon=True).start()
        count += 1
except RuntimeError:
    pass
done.set()
print(count)
"""


def test_threads_are_counted() -> None:
    """With memory for all of them: the limit is that of the program's user."""
    with Sandbox(MANY_THREADS, "", 64_000, 20.0) as sandbox:
        ended = sandbox.run("", 20.0)
    assert ended is not None
    assert 32 < int(ended.output) < isolation.TASKS


def docker(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = sandbox_module._BEGIN.replace("del sys", sandbox_attacks.BEGIN["docker"] + "del sys")
    monkeypatch.setattr(sandbox_module, "_BEGIN", begin)


def test_ordinary_programs_run_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    docker(monkeypatch)
    names = ("threads", "named temporary file", "sqlite file", "asyncio", "null")
    for source in (STDIN["path"], *(ORDINARY[name] for name in names)):
        assert prints(source) == "10\n", source


STAYS = """
import ctypes, signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
libc = ctypes.CDLL(None)
libc.setsid()
libc.prctl(1, 0)
for _ in range(3000):
    libc.mkdir(b"d", 0o700)
    libc.chdir(b"d")
time.sleep(1000)
"""


@pytest.mark.parametrize("walls", ["all", "without namespaces"])
def test_a_program_that_would_stay_leaves_nothing(
    walls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores all signals, would leave its session, and digs deeper than paths reach."""
    if walls != "all":
        docker(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox(STAYS, "", 512, 20.0) as sandbox:
        assert sandbox.run("", 1.0) is None
        processes = [psutil.Process(sandbox._child.pid)]
        processes += processes[0].children(recursive=True)
        assert len(processes) == 3
    assert psutil.wait_procs(processes, timeout=20)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_an_environment_in_a_hidden_place_works_and_shows_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A venv whose interpreter is a link, reached by a link itself, with data beside its libraries."""
    home = tmp_path / "home"
    venv.create(home / "project/venv", symlinks=True)
    (folder,) = (home / "project/venv").glob("lib/python*/site-packages")
    (folder / "mine.py").write_text("value = 10\n")
    for place in (home, home / "project", home / "project/venv"):
        (place / "answers.jsonl").write_text("secret")
    (tmp_path / "link").symlink_to(home / "project/venv")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "link/bin/python"))
    source = f"""
import mine, os
found = [os.path.join(where, name) for where, _, names in os.walk({str(tmp_path)!r}) for name in names]
result = [mine.value, [name for name in found if not name.endswith(".py")], os.path.exists({str(home)!r})]
"""
    with Sandbox(source, "", 512, 20.0) as sandbox:
        if sandbox.notes:
            pytest.skip(f"this kernel does not permit the whole sandbox: {sandbox.notes}")
        ended = sandbox.value("result", 20.0)
    assert ended is not None
    assert json.loads(str(ended.value))[1] == [10, ["list", []], False]


def test_a_sandbox_that_does_not_work_is_a_problem_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "_BEGIN", "raise SystemExit(3)")
    with pytest.raises(ConfigError, match="the sandbox did not start: .*exit code 3"):
        checked_sandbox(allow_weak=True)


POOL = """
import asyncio, json, sys
import numpy as np
from bapo_megatron.config import RewardConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.types import Prompt
{docker}
async def main():
    prompt = Prompt(0, np.array([1], np.int32), json.dumps({{"inputs": ["1"], "outputs": ["1"]}}), "", {{}})
    for more in ({{}}, {{"allow_weak_sandbox": True}}):
        pool = RewardPool(RewardConfig("code", workers=1, **more), 10)
        try:
            await pool.start()
            print((await pool.score(prompt, "```python\\nprint(input())\\n```", 1)).reward)
        except ConfigError as error:
            print(error)
        await pool.close()
asyncio.run(main())
"""


def test_the_pool_refuses_where_the_kernel_refuses() -> None:
    """All processes of the pool are under the filter, as in a container."""
    script = POOL.format(docker=sandbox_attacks.BEGIN["docker"])
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    refused, reward = done.stdout.splitlines()
    assert re.search("no namespaces.*reward.allow_weak_sandbox", refused)
    assert reward == "1.0"
