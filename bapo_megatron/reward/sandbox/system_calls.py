"""Seccomp filter of a tested program: denied system calls on x86-64 and aarch64.

``program(machine, ...)`` returns the filter's instructions, and ``install`` applies them to the calling
thread and its descendants. A denied call fails with EPERM; clone3, and calls newer than this file, with
ENOSYS. No process is killed, so a library that only probes continues. Numbers come from the kernel's headers
(asm/unistd_64.h, asm-generic/unistd.h).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

# name:x86-64:aarch64, "-" if the architecture lacks it
DENIED = """
execve:59:221 execveat:322:281 fork:57:- vfork:58:- kill:62:129 tkill:200:130 tgkill:234:131
rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 pidfd_open:434:434 pidfd_send_signal:424:424
pidfd_getfd:438:438 setsid:112:157 setpgid:109:154 setpriority:141:140 ioprio_set:251:30
sched_setscheduler:144:119 sched_setparam:142:118 sched_setattr:314:274 sched_setaffinity:203:122
migrate_pages:256:238 move_pages:279:239 process_madvise:440:440 process_mrelease:448:448
socket:41:198 connect:42:203 bind:49:200 listen:50:201 accept:43:202 accept4:288:242 sendmsg:46:211
sendmmsg:307:269 recvmsg:47:212 recvmmsg:299:243
unshare:272:97 setns:308:268 mount:165:40 umount2:166:39 pivot_root:155:41 chroot:161:51
open_tree:428:428 move_mount:429:429 fsopen:430:430 fsconfig:431:431 fsmount:432:432 fspick:433:433
mount_setattr:442:442
ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 kcmp:312:272
perf_event_open:298:241 bpf:321:280 userfaultfd:323:282 io_uring_setup:425:425
io_uring_enter:426:426 io_uring_register:427:427
shmget:29:194 shmat:30:196 shmctl:31:195 shmdt:67:197 semget:64:190 semop:65:193 semtimedop:220:192
semctl:66:191 msgget:68:186 msgsnd:69:189 msgrcv:70:188 msgctl:71:187 mq_open:240:180
mq_unlink:241:181 mq_timedsend:242:182 mq_timedreceive:243:183 mq_notify:244:184
mq_getsetattr:245:185 add_key:248:217 request_key:249:218 keyctl:250:219 memfd_create:319:279
memfd_secret:447:447 setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14
lremovexattr:198:15 fremovexattr:199:16
mknod:133:- mknodat:259:33 name_to_handle_at:303:264 open_by_handle_at:304:265 fanotify_init:300:262
fanotify_mark:301:263
vmsplice:278:75 splice:275:76 tee:276:77 sendfile:40:71 setsockopt:54:208 io_setup:206:0 io_submit:209:2
inotify_init:253:- inotify_init1:294:26 flock:73:32 sync:162:81 syncfs:306:267 seccomp:317:277
landlock_create_ruleset:444:444 landlock_add_rule:445:445 landlock_restrict_self:446:446
statmount:457:457 listmount:458:458
init_module:175:105 finit_module:313:273 delete_module:176:106 kexec_load:246:104
kexec_file_load:320:294 reboot:169:142 swapon:167:224 swapoff:168:225 sethostname:170:161
setdomainname:171:162 iopl:172:- ioperm:173:- modify_ldt:154:- acct:163:89 quotactl:179:60
quotactl_fd:443:443 syslog:103:116 settimeofday:164:170 clock_settime:227:112 adjtimex:159:171
clock_adjtime:305:266 personality:135:92 vhangup:153:58 lookup_dcookie:212:18
"""
"""Always denied: processes and signals, sockets (except socketpair), namespaces and mounts, process
inspection, memory and keys that no limit counts or that outlive the program, device nodes, machine settings.

Pages that a pipe holds by reference (vmsplice, splice, tee, sendfile) count for no limit once they are
unmapped or truncated, and one byte holds a whole huge page. Rulesets, filters and watches are kernel memory
without a limit.
"""

DENIED_ON_SHARED_FILES = """
chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55 lchown:94:-
fchownat:260:54 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88
"""
"""Also denied where the program sees the machine's files: Landlock does not cover these."""

CHECKED = """
clone:56:220 clone3:435:435 sendto:44:206 socketpair:53:199 prlimit64:302:261 fcntl:72:25 ioctl:16:29
prctl:157:167
"""
"""Calls with some denied arguments."""

NEWEST = 462
"""Number of the newest system call considered for these lists (Linux 6.10, both architectures)."""

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_THREAD, _CLONE_FILES = 0x00010000, 0x00000400
_AF_UNIX = 1
_FCNTL = (8, 10, 15, 1024, 1026, 1031)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY (signals), F_SETPIPE_SZ (a user's pipe pages)."""
_IOCTL = (0x8901, 0x8902, 0x5412, 0x541C, 0x540E)  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX, TIOCSCTTY
_PRCTL = (1, 22, 35, 36, 62)
"""PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_MM, PR_SET_CHILD_SUBREAPER, PR_SCHED_CORE (half of a core)."""
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

# Instructions of classic BPF; offsets are into struct seccomp_data.
_LOAD, _TO_X, _OR_X, _GO, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _GIVE = (
    *(0x20, 0x07, 0x4C, 0x05, 0x15, 0x35, 0x25, 0x45, 0x06),
)
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _DENY, _NO_SUCH_CALL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

Instruction = tuple[int, int, int, int]

_LIBC = ctypes.CDLL(None, use_errno=True)


def numbers(table: str, machine: str) -> dict[str, int]:
    """Return the system call numbers of a table on ``machine``, by name."""
    column = 1 + ("x86_64", "aarch64").index(machine)
    rows = (entry.split(":") for entry in table.split())
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def problem() -> str | None:
    """Return why system calls cannot be filtered here, or None."""
    machine = os.uname().machine
    if machine not in _AUDIT_ARCH:
        return f"no filter of system calls for {machine}: programs may start processes and open sockets"
    ctypes.set_errno(0)
    _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0)  # EFAULT if the kernel supports filters
    if ctypes.get_errno() != errno.EFAULT:
        return "the kernel filters no system calls (seccomp): programs may start processes and open sockets"
    return None


def program(machine: str, shared_files: bool) -> bytes:
    """Return the filter's instructions. ``shared_files``: the program sees the machine's files."""
    return assemble([*_denied(machine, shared_files), *_checked(machine), (_GIVE, 0, 0, _ALLOW)])


def assemble(code: list[Instruction]) -> bytes:
    """Return the instructions in the kernel's form, struct sock_filter."""
    return b"".join(struct.pack("HBBI", *line) for line in code)


def install(code: bytes) -> None:
    """Permanently filter this thread and its descendants. Needs no_new_privs. Raises OSError."""
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    if _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _denied(machine: str, shared_files: bool) -> Iterator[Instruction]:
    """Start of the filter: refuse other architectures, denied calls, and calls newer than this file."""
    tables = DENIED + DENIED_ON_SHARED_FILES * shared_files
    denied = list(numbers(tables, machine).values())
    yield from ((_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_GIVE, 0, 0, _DENY))
    yield from ((_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, 0x40000000), (_GIVE, 0, 0, _DENY))  # x32
    for place, number in enumerate(denied):
        yield _EQUAL, len(denied) - place, 0, number
    yield from ((_GO, 0, 0, 1), (_GIVE, 0, 0, _DENY))
    yield from ((_ABOVE, 0, 1, NEWEST), (_GIVE, 0, 0, _NO_SUCH_CALL))


def _checked(machine: str) -> Iterator[Instruction]:
    """Refuse by argument: processes that are not threads, threads with a separate file table (each would have
    the whole limit of open files), datagram addresses, and other socket pairs and limits."""
    number = numbers(CHECKED, machine)
    first, second, address = _ARGUMENTS, _ARGUMENTS + 8, _ARGUMENTS + 4 * 8
    yield from (
        (_EQUAL, 0, 1, number["clone3"]),
        (_GIVE, 0, 0, _NO_SUCH_CALL),
    )  # libc falls back to clone
    yield from ((_EQUAL, 0, 5, number["clone"]), (_LOAD, 0, 0, first), (_ANY_BIT, 0, 1, _CLONE_THREAD))
    yield from ((_ANY_BIT, 1, 0, _CLONE_FILES), (_GIVE, 0, 0, _DENY), (_GIVE, 0, 0, _ALLOW))
    yield from ((_EQUAL, 0, 7, number["sendto"]), (_LOAD, 0, 0, address), (_TO_X, 0, 0, 0))
    yield from ((_LOAD, 0, 0, address + 4), (_OR_X, 0, 0, 0), (_EQUAL, 1, 0, 0))
    yield from ((_GIVE, 0, 0, _DENY), (_GIVE, 0, 0, _ALLOW))
    yield from _by_value(number["socketpair"], first, (_AF_UNIX,), _ALLOW, _DENY)
    yield from _by_value(number["prlimit64"], first, (0,), _ALLOW, _DENY)
    yield from _by_value(number["fcntl"], second, _FCNTL, _DENY, _ALLOW)
    yield from _by_value(number["ioctl"], second, _IOCTL, _DENY, _ALLOW)
    yield from _by_value(number["prctl"], first, _PRCTL, _DENY, _ALLOW)


def _by_value(
    number: int, argument: int, values: tuple[int, ...], among: int, otherwise: int
) -> Iterator[Instruction]:
    """For one call: ``among`` if the low half of an argument is one of the values, else ``otherwise``."""
    count = len(values)
    yield _EQUAL, 0, count + 3, number
    yield _LOAD, 0, 0, argument
    for place, value in enumerate(values):
        yield _EQUAL, count - place, 0, value
    yield _GIVE, 0, 0, otherwise
    yield _GIVE, 0, 0, among
