"""Numbers of system calls, for the filter. Each machine has its own; from 424 on they are the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass

# What is refused: name, number on x86_64, number on aarch64.
_REFUSED = {
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "adjtimex": (159, 171),
    "chroot": (161, 51),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "clock_settime": (227, 112),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "mknodat": (259, 33),
    "unshare": (272, 97),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "clock_adjtime": (305, 266),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "memfd_create": (319, 279),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "memfd_secret": (447, 447),
    "process_mrelease": (448, 448),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "vhangup": (153, 58),
}
_ONLY_X86_64 = {
    "uselib": 134,
    "mknod": 133,
    "ustat": 136,
    "sysfs": 139,
    "_sysctl": 156,
    "modify_ldt": 154,
    "iopl": 172,
    "ioperm": 173,
    "create_module": 174,
    "get_kernel_syms": 177,
    "query_module": 178,
}
_NEWEST = 450  # calls above it are not known here and are answered as if they did not exist


@dataclass(frozen=True)
class Machine:
    """The numbers that a filter for one machine needs."""

    architecture: int
    newest: int
    clone: int
    clone3: int
    socket: int
    ioctl: int
    calls: dict[str, int]


MACHINES = {
    "x86_64": Machine(
        architecture=0xC000003E,
        newest=_NEWEST,
        clone=56,
        clone3=435,
        socket=41,
        ioctl=16,
        calls={name: numbers[0] for name, numbers in _REFUSED.items()} | _ONLY_X86_64,
    ),
    "aarch64": Machine(
        architecture=0xC00000B7,
        newest=_NEWEST,
        clone=220,
        clone3=435,
        socket=198,
        ioctl=29,
        calls={name: numbers[1] for name, numbers in _REFUSED.items()},
    ),
}
