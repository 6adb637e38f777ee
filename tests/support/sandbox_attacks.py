"""Attacks on the code sandbox, tried by a program of one: ``python sandbox_attacks.py MODE FOLDER``.

MODE: ``full``; ``old kernel``, which lacks mount_setattr; ``docker``, where seccomp denies namespaces and
mounts, as Docker's default profile does; ``filter alone``, which lacks Landlock, too; ``landlock alone``,
which lacks the filter instead; ``none``, without any wall, which shows that the attacks would work. Prints
{attack: true if it worked, false if not, or the text of an error in the attack itself} as JSON, with the
sandbox's notes. Only the standard library is needed, so that any user's interpreter can run it. All that is
attacked was made in FOLDER or by this process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bapo_megatron.reward.sandbox import sandbox as sandbox_module
from bapo_megatron.reward.sandbox import system_calls

HELPERS = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
OUT, PID, N = {out!r}, {pid}, {numbers}
ANSWERS = OUT + "/answers.jsonl"
C = ANSWERS.encode()
def call(name, *arguments):
    return libc.syscall(N[name], *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]) >= 0
def reached(result):
    # whether the kernel took the call, though its arguments may be of no use
    return result >= 0 or ctypes.get_errno() != errno.EPERM
def vector(data, size):
    return (ctypes.c_void_p * 2)(ctypes.cast(data, ctypes.c_void_p), size)
def spliced(name, *arguments):
    # whether pages were put into a pipe: of memory, a file or another pipe
    ends, others = os.pipe(), os.pipe()
    os.write(others[1], b"x")
    page = ctypes.create_string_buffer(8192)
    with open("spliced", "wb+", 0) as file:
        file.write(b"x")
        file.seek(0)
        given = dict(vmsplice=(ends[1], vector(page, 1), 1, 0),
                     splice=(file.fileno(), None, ends[1], None, 1, 0),
                     sendfile=(ends[1], file.fileno(), None, 1), tee=(others[0], ends[1], 1, 0))
        return libc.syscall(N[name], *given[name]) == 1
def own_filter():
    # that allows everything
    code = ctypes.create_string_buffer((6).to_bytes(4, "little") + (0x7FFF0000).to_bytes(4, "little"), 8)
    described = (1).to_bytes(8, "little") + ctypes.addressof(code).to_bytes(8, "little")
    return libc.prctl(22, 2, described, 0, 0) == 0
def timers(count):
    return all(libc.timer_create(1, None, ctypes.byref(ctypes.c_long())) == 0 for _ in range(count))
def worked(attack):
    try:
        return bool(attack())
    except (OSError, ValueError, AttributeError, ImportError, MemoryError, RuntimeError) as error:
        return False
    except BaseException as error:
        return type(error).__name__ != "OperationalError" and repr(error)
def address():
    return b"\\x01\\x00" + (OUT + "/datagrams").encode() + b"\\x00"
def pair():
    import socket
    global kept
    kept = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return kept[0]
def forked(number):
    if number == 0:
        os._exit(0)
    return number > 0
def removed(number, control, *arguments):
    control(number, *arguments)
    return number >= 0
def threads(count):
    import threading, time
    threading.stack_size(65536)
    started = 0
    for _ in range(count):
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        started += 1
    return started == count
def files(count):
    for n in range(count):
        os.close(os.open(f"f{{n}}", os.O_CREAT | os.O_WRONLY))
    return True
def content(path):
    try:
        return open(path, "rb").read()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return b""

def anyone(path, *words):
    return any(word in content(path.format(pid)) for pid in os.listdir("/proc") if pid.isdigit()
               and pid != str(os.getpid()) for word in words)
"""

LIMIT_S = 20.0

ATTACKS = {
    # files of others
    "read": "open(ANSWERS).read()",
    "read in C": "libc.open(C, 0) >= 0",
    "list": "os.listdir(OUT)",
    "write": "open(OUT + '/new', 'w')",
    "write in C": "libc.creat(OUT.encode() + b'/new', 0o644) >= 0",
    "truncate": "os.truncate(ANSWERS, 9) is None",
    "truncate in C": "libc.truncate(C, 9) == 0",
    "chmod in C": "libc.chmod(C, 0o644) == 0",
    "times": "os.utime(ANSWERS) is None",
    "times in C": "libc.utimes(C, None) == 0",
    "attribute": "os.setxattr(ANSWERS, 'user.a', b'1') is None",
    "dir_fd": "os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=os.open(OUT, os.O_RDONLY)) >= 0",
    "rename": "os.rename(OUT + '/spare', OUT + '/spare') is None",
    "rename in C": "libc.rename(OUT.encode() + b'/spare', OUT.encode() + b'/spare') == 0",
    "remove in C": "libc.unlink(OUT.encode() + b'/spare') == 0",
    "remove by dir_fd": "os.remove('spare2', dir_fd=libc.open(OUT.encode(), 0o200000)) is None",
    "link in C": "libc.symlink(b'x', OUT.encode() + b'/link') == 0",
    "fifo made": "libc.mkfifo(OUT.encode() + b'/made', 0o600) == 0",
    "fifo by Python": "os.mkfifo(OUT + '/made2') is None",
    "fifo written": "os.write(os.open(OUT + '/fifo', os.O_RDWR | os.O_NONBLOCK), b'x') == 1",
    "sqlite": "__import__('sqlite3').connect(OUT + '/db').execute('create table t (a)')",
    "sqlite attached": "__import__('sqlite3').connect(':memory:').execute('attach ? as o', (OUT + '/db2',))"
    ".execute('create table o.t (a)')",
    "shared memory": "__import__('multiprocessing.shared_memory')"
    ".shared_memory.SharedMemory('bapo_attack2', True, 9)",
    "shared memory in C": "libc.open(b'/dev/shm/bapo_attack', 0o102, 0o600) >= 0",
    "library of one's own": "open(os.__file__, 'a')",
    "device": "[1 for n in ('kvm', 'fuse', 'loop-control', 'vsock', 'ptmx', 'zram0', 'mem', 'vda', 'full')"
    " if libc.open(b'/dev/' + n.encode(), 2) >= 0]",
    "mode of a device": "libc.chmod(b'/dev/null', 0o666) == 0",
    "times of a device": "libc.utimes(b'/dev/null', None) == 0",
    "device made": "libc.mknod(b'node', 0o020666, 0x103) == 0",
    "handle": "call('name_to_handle_at', -100, b'/', ctypes.create_string_buffer(bytes([128, 0, 0, 0]), 200),"
    " ctypes.byref(ctypes.c_int()), 0)",
    "descriptors left open": "[n for n in range(4, 4096) if libc.fcntl(n, 1) >= 0]",
    # processes of others
    "command lines": "anyone('/proc/{}/cmdline', b'answers.jsonl')",
    "command line in C": "libc.open(b'/proc/%d/cmdline' % PID, 0) >= 0",
    "environment": "open(f'/proc/{PID}/environ', 'rb').read()",
    "memory": "libc.open(b'/proc/%d/mem' % PID, 0) >= 0",
    "environment of the server": "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "root of the server": "os.listdir(f'/proc/{os.getppid()}/root/')",
    "TCP table": "len(open('/proc/net/tcp').readlines()) > 1",
    "kernel's settings": "libc.open(b'/proc/sys/kernel/hostname', 0) >= 0",
    "probe a process": "libc.kill(PID, 0) == 0",
    "signal in C": "libc.syscall(N['tgkill'], PID, PID, 0) == 0",
    "limit of another": "call('prlimit64', PID, 0, None, ctypes.create_string_buffer(16))",
    "limit by Python": "__import__('resource').prlimit(PID, 7)",
    "pidfd": "call('pidfd_open', PID, 0)",
    "owner of a file": "libc.fcntl(pair().fileno(), 8, PID) == 0",
    "owner by Python": "__import__('fcntl').fcntl(pair(), 8, PID) == 0",
    "owner by ioctl": "libc.ioctl(pair().fileno(), 0x8901, ctypes.byref(ctypes.c_int(PID))) == 0",
    "signal of a file": "libc.fcntl(pair().fileno(), 10, 9) == 0",
    "priority": "libc.setpriority(0, PID, 19) == 0",
    "affinity": "call('sched_setaffinity', PID, 8, ctypes.create_string_buffer(b'\\xff' * 8))",
    "scheduling": "call('sched_setscheduler', PID, 3, ctypes.create_string_buffer(4))",
    "I/O priority": "call('ioprio_set', 1, PID, 0x6000)",
    "read a process": "libc.process_vm_readv(PID, None, 0, None, 0, 0) == 0",
    "compare processes": "call('kcmp', PID, PID, 2, 0, 0)",
    "trace me": "libc.ptrace(0, 0, 0, 0) == 0",
    # processes of one's own
    "fork": "forked(libc.fork())",
    "vfork by clone": "forked(libc.syscall(N['clone'], 17, 0, 0, 0, 0))",
    "session": "libc.setsid() >= 0",
    "group": "libc.setpgid(0, 0) == 0",
    "parent's death": "libc.prctl(1, 0, 0, 0, 0) == 0",
    "subreaper": "libc.prctl(36, 1, 0, 0, 0) == 0",
    "execute": "os.posix_spawn('/bin/true', ['true'], {})",
    "own limits": "__import__('resource').setrlimit(7, (4096, 4096)) is None",
    # talking
    "datagram": "libc.sendto(pair().fileno(), b'x', 1, 0, address(), len(address())) == 1",
    "message": "pair().sendmsg([b'x']) == 1",
    "connect": "__import__('socket').socket(1, 2).connect(OUT + '/datagrams') is None",
    "internet": "libc.socket(2, 1, 0) >= 0",
    "netlink": "libc.socket(16, 3, 0) >= 0",
    "abstract": "libc.socket(1, 2, 0) >= 0",
    # memory and names that stay
    "SysV memory": "removed(libc.shmget(0, 750 << 20, 0o1600), libc.shmctl, 0, None)",
    "SysV semaphores": "removed(libc.semget(0, 1, 0o1600), libc.semctl, 0, 0)",
    "SysV queue": "removed(libc.msgget(0, 0o1600), libc.msgctl, 0, None)",
    "POSIX queue": "libc.mq_open(b'/bapo_attack', 0o102, 0o600, None) >= 0"
    " and libc.mq_unlink(b'/bapo_attack') == 0",
    "key": "call('add_key', b'user', b'bapo_attack', b'x', 1, -2)",
    "keyring": "call('keyctl', 0, -3, 0)",
    "memory file": "libc.memfd_create(b'x', 0) >= 0",
    "750 MB": "__import__('mmap').mmap(-1, 750 << 20)",
    "memory in pipes": "spliced('vmsplice')",
    "a file's pages in pipes": "spliced('splice')",
    "a file's pages sent to pipes": "spliced('sendfile')",
    "pages of a pipe in pipes": "spliced('tee')",
    "large pipes": "libc.fcntl(os.pipe()[1], 1031, 1 << 20) > 0",
    "large buffers": "pair().setsockopt(1, 7, 1 << 20) is None",
    "many pipes": "[os.pipe() for _ in range(40)]",
    "files for each thread": "reached(libc.syscall(N['clone'], 0x10000, 0, 0, 0, 0))",
    "locked memory": "libc.mlock(ctypes.create_string_buffer(4096), 4096) == 0",
    "many timers": "timers(100)",
    "asynchronous I/O": "libc.syscall(N['io_setup'], 64, ctypes.byref(ctypes.c_long())) == 0",
    "asynchronous I/O submitted": "reached(libc.syscall(N['io_submit'], 0, 0, None))",
    "watches": "libc.inotify_init1(0) >= 0",
    "old watches": "libc.inotify_init() >= 0",
    "rules of Landlock": "reached(libc.syscall(N['landlock_create_ruleset'], None, 0, 1))",
    "filter": "own_filter()",
    "filter by seccomp": "libc.syscall(N['seccomp'], 2, 0, (0x7FFF0000).to_bytes(4, 'little')) == 0",
    "half of a core": "reached(libc.prctl(62, 0, 0, 0, ctypes.byref(ctypes.c_long())))",
    "sync": "reached(libc.syscall(N['sync']))",
    "sync of a file system": "libc.syncfs(os.open(os.__file__, 0)) == 0",
    "lock of a library": "libc.flock(os.open(os.__file__, 0), 6) == 0",
    "lock by Python": "__import__('fcntl').flock(os.open(os.__file__, 0), 6) is None",
    "pair of internet": "reached(libc.socketpair(2, 1, 0, ctypes.create_string_buffer(8)))",
    "pair of netlink": "reached(libc.socketpair(16, 3, 0, ctypes.create_string_buffer(8)))",
    "mount points": "reached(libc.syscall(N['listmount'], None, None, 0, 0))",
    "many threads": "threads(500)",
    "many files": "files(6000)",
    # the kernel
    "user namespace": "libc.unshare(0x10000000) == 0",
    "mount": "libc.mount(b'none', b'/', None, 1 << 18, None) == 0",
    "chroot": "libc.chroot(b'.') == 0",
    "io_uring": "call('io_uring_setup', 1, ctypes.create_string_buffer(200))",
    "BPF": "call('bpf', 0, ctypes.create_string_buffer("
    "b'\\x02\\0\\0\\0\\x04\\0\\0\\0\\x08\\0\\0\\0\\x01'.ljust(72, b'\\0')), 72)",
    "performance": "call('perf_event_open', "
    "ctypes.create_string_buffer(b'\\1\\0\\0\\0\\x70'.ljust(112, b'\\0')),"
    " 0, -1, -1, 0)",
    "page faults": "call('userfaultfd', 1)",
    "personality": "libc.personality(0x0040000) >= 0",
    "fanotify": "call('fanotify_init', 0x200, 0)",
    "32-bit numbers": "libc.syscall(0x40000000 + 39) > 0",
    "newest calls": "libc.syscall(463) >= 0 or ctypes.get_errno() != 38",
    "root again": "os.geteuid() and libc.setuid(0) == 0",
    "host name": "libc.sethostname(b'x', 1) == 0",
}

# The filter of Docker's default profile, as far as it concerns sandboxes; and no wall at all.
BEGIN = {
    "full": "",
    "old kernel": "from bapo_megatron.reward.sandbox import file_system as f; f._SYS_MOUNT_SETATTR = 9999\n",
    "docker": """
from bapo_megatron.reward.sandbox import system_calls as s, isolation as w
n = s.numbers(s.DENIED, w.os.uname().machine)
refuse = [line for name in ("unshare", "mount") for line in ((0x15, 0, 1, n[name]), (6, 0, 0, 0x50001))]
w.LIBC.prctl(38, 1, 0, 0, 0)
s.install(s.assemble([(0x20, 0, 0, 0), *refuse, (6, 0, 0, 0x7FFF0000)]))
""",
    "filter alone": """
from bapo_megatron.reward.sandbox import isolation as w
w.file_system.confine = lambda *_: False
""",
    "landlock alone": """
from bapo_megatron.reward.sandbox import isolation as w
w.system_calls.problem = lambda: "no filter"
""",
    "none": """
from bapo_megatron.reward.sandbox import isolation as w
w.enter_namespaces, w._become = lambda *_: w.Walls(), lambda *_: None
w.file_system.confine, w.system_calls.install = lambda *_: True, lambda *_: None
w._limit = lambda *_: None
""",
}
BEGIN["filter alone"] += BEGIN["docker"]
BEGIN["landlock alone"] += BEGIN["docker"]


def tried(names: Iterator[str], setup: str) -> Iterator[tuple[str, object]]:
    """What the next attacks came to, in one sandbox; it is lost with one that hangs. And its notes."""
    with sandbox_module.Sandbox("", "", 512, LIMIT_S) as sandbox:
        yield "notes", sandbox.notes
        for name in names:
            ended = sandbox.value(f"worked(lambda: {ATTACKS[name]})", LIMIT_S, setup=setup)
            yield name, bool(ended and ended.value) and json.loads(str(ended and ended.value))
            if ended is None:
                return


def main(mode: str, folder: Path) -> dict[str, object]:
    """What each attack came to."""
    sandbox_module._BEGIN = sandbox_module._BEGIN.replace("del sys", BEGIN[mode] + "del sys")
    folder = folder / "outside"
    folder.mkdir()
    for name in ("answers.jsonl", "spare", "spare2"):
        (folder / name).write_text("the answer is 42")
    os.mkfifo(folder / "fifo")
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(folder / "datagrams"))
    victim = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", str(folder / "answers.jsonl")]
    )
    tables = system_calls.DENIED + " " + system_calls.CHECKED
    numbers = system_calls.numbers(tables, os.uname().machine)
    setup = HELPERS.format(out=str(folder), pid=victim.pid, numbers=numbers)
    found: dict[str, object] = {}
    names = iter(ATTACKS)
    try:
        while len(found) <= len(ATTACKS):
            found.update(tried(names, setup))
    finally:
        victim.kill()
        victim.wait()
        for left in ("bapo_attack", "bapo_attack2"):
            Path("/dev/shm", left).unlink(missing_ok=True)
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
