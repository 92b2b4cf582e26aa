"""Which host a rank runs on, and whether its process is alive."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class HostIdentity:
    """What two processes must share to reach each other's memory, and the process id.

    Same host: boot id and network namespace agree. Process ids mean the same only inside one pid namespace.
    """

    boot_id: str
    network_namespace: str
    pid_namespace: str
    pid: int

    def same_host(self, other: HostIdentity) -> bool:
        return (self.boot_id, self.network_namespace) == (other.boot_id, other.network_namespace)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def host_identity() -> HostIdentity:
    """This process's identity. Where /proc is not readable, the host's name stands for the boot id."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot_id = f.read().strip()
    except OSError:
        boot_id = f"hostname:{socket.gethostname()}"
    return HostIdentity(boot_id, _namespace("net"), _namespace("pid"), os.getpid())


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return "unknown"
