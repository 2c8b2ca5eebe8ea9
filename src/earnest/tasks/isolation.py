"""What Linux allows a process without privileges to give up: memory, files, network, processes.

``give_up`` is called in the process that is about to run a tool. Nothing of it can be taken back:

- ``setrlimit``: address space, CPU seconds, size of a file, open files, core dumps;
- capabilities: none are left (also for root);
- Landlock (Linux 5.13 or newer): files can be written in one folder only, and read only in the folders that are given;
- seccomp (x86-64 and arm64): no sockets, no new processes or threads, no signals to other processes, no change of a
  file's owner, mode or times, no memory outside the address space, no io_uring.

This is a protection against mistakes and against a policy that exploits its grader. It is no protection against a bug
in the kernel. The file uses the standard library only: the process that imports it must start fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import platform
import struct
from collections.abc import Iterable

FILES_AT_ONCE = 64
"""Open files of a tool."""

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CAPSET = {"x86_64": 126, "aarch64": 91}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}

# name: (number on x86-64, number on arm64); None where the architecture does not have it
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "clone3": (435, 435),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "kcmp": (312, 272), "io_uring_setup": (425, 425), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "truncate": (76, 45),
}  # fmt: skip

_READ = 0b1101  # execute, read file, read directory
_ALL_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file rights by version of Landlock; 16 from version 5 on."""


def give_up(folder: str, readable: Iterable[str], memory: int, seconds: float) -> set[str]:
    """Restrict this process for ever; returns what was restricted: memory, files, network, processes. folder: the only
    place where it can write. readable: folders and files that it can read. memory: bytes in addition to the present
    address space. seconds: of CPU time, rounded up."""
    import resource  # not on Windows, where this file is only imported

    done: set[str] = set()
    space = _address_space()
    cpu = math.ceil(seconds) + 1
    for which, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, memory),
        (resource.RLIMIT_NOFILE, FILES_AT_ONCE),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        _limit(which, value)
    if space is not None and _limit(resource.RLIMIT_AS, space + memory):
        done.add("memory")
    if os.geteuid() != 0:
        done.add("processes")  # the limit of 0 new processes; it does not hold for root
    if platform.system() != "Linux":
        return done
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return done
    machine = platform.machine()
    if _landlock(libc, folder, readable):
        done.add("files")
    if machine in _CAPSET:
        header, none = struct.pack("II", 0x20080522, 0), bytes(24)
        libc.syscall(_CAPSET[machine], header, none)
    if machine in _AUDIT_ARCH and _seccomp(libc, machine):
        done |= {"network", "processes"}
    return done


def _limit(which: int, value: int) -> bool:
    import resource

    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(which, (value, value))
        return True
    return False


def _address_space() -> int | None:
    """Bytes of address space of this process; None where the system does not report them."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _landlock(libc: ctypes.CDLL, folder: str, readable: Iterable[str]) -> bool:
    version = libc.syscall(444, None, 0, 1)
    if version < 3:  # before version 3 a file could be truncated anywhere
        return False
    every = (1 << _ALL_RIGHTS.get(version, 16)) - 1
    ruleset = libc.syscall(444, struct.pack("Q", every), 8, 0)
    if ruleset < 0:
        return False
    try:
        places = [(folder, every), ("/dev/null", 0b110), *((place, _READ) for place in readable)]
        for place, rights in places:
            try:
                fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
            except OSError:  # a place that does not exist
                continue
            if not os.path.isdir(place):
                rights &= 0b111 | 1 << 14  # execute, write, read, truncate: the rights of a file
            failed = libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, fd), 0)
            os.close(fd)
            if failed:
                return False
        return libc.syscall(446, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _seccomp(libc: ctypes.CDLL, machine: str) -> bool:
    """Deny the calls of the table with EPERM, and limits of other processes; allow the rest."""
    column = 0 if machine == "x86_64" else 1
    numbers = [pair[column] for pair in _DENIED.values() if pair[column] is not None]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, _AUDIT_ARCH[machine]),
        (give, 0, 0, 0x80000000),  # another one: kill the process
        (load, 0, 0, 0),  # the call's number
    ]
    rest = len(numbers) + 4  # instructions from the first comparison of a number to the last line, which denies
    if machine == "x86_64":
        code.append((at_least, rest, 0, 0x40000000))  # the x32 table
    code += [(equal, rest - 1 - i, 0, number or 0) for i, number in enumerate(numbers)]
    code += [
        (equal, 0, 2, _PRLIMIT[machine]),
        (load, 0, 0, 16),  # its first argument: 0 is this process
        (equal, 0, 1, 0),
        (give, 0, 0, 0x7FFF0000),  # allow
        (give, 0, 0, 0x00050000 | errno.EPERM),
    ]
    packed = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(packed)
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer))
    return libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0) == 0
