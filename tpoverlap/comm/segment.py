"""A piece of memory that several processes map, created so that nothing of it outlives them.

An anonymous memory file is preferred: the other ranks open it through /proc, it is not bound by the size of a
container's /dev/shm, and it is gone with its last user, whatever ended that. Where /proc does not serve, a file with
an unguessable name in /dev/shm is used and unlinked as soon as every rank has mapped it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from typing import Literal

import torch

from tpoverlap.errors import ChannelError

SegmentKind = Literal["memfd", "named"]
_SHM = "/dev/shm"
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4


class Segment:
    """A shared mapping of ``size`` bytes. Use :meth:`create` on one rank and :meth:`open` on the others."""

    def __init__(self, fd: int, size: int, path: str, kind: SegmentKind) -> None:
        self.fd = fd
        self.size = size
        self.path = path
        self.kind = kind
        self._map = mmap.mmap(fd, size)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("I")
        self.quads = self.bytes.cast("Q")
        with torch.inference_mode(False):  # or the tensor could not be written outside of it
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    @classmethod
    def create(cls, size: int, kind: SegmentKind, directory: str = _SHM) -> Segment:
        """Creates and fully allocates a segment, readable and writable by this user alone.

        Raises ChannelError when the system has not ``size`` bytes to give, with the limit and what to do.
        """
        try:
            if kind == "memfd":
                fd = os.memfd_create("tpoverlap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                path = f"/proc/{os.getpid()}/fd/{fd}"
            else:
                path = f"{directory}/tpoverlap-{secrets.token_hex(16)}"
                fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise ChannelError(f"cannot create a shared segment ({kind}): {e}") from e
        try:
            # A bare ftruncate would succeed on a full file system and end in SIGBUS at the first write.
            os.posix_fallocate(fd, 0, size)
            if kind == "memfd":
                fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            return cls(fd, size, path, kind)
        except OSError as e:
            os.close(fd)
            if kind == "named":
                os.unlink(path)
            raise ChannelError(_allocation_message(e, size, kind, directory)) from e

    @classmethod
    def open(cls, path: str, size: int, kind: SegmentKind) -> Segment:
        """Maps the segment that another process of this user created. ChannelError when it is not what was promised."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise ChannelError(f"cannot open the group's segment {path}: {e.strerror}") from e
        try:
            stat = os.fstat(fd)
            if stat.st_size != size or stat.st_uid != os.geteuid():
                raise ChannelError(
                    f"{path} is not this group's segment: {stat.st_size} bytes of user {stat.st_uid}, "
                    f"expected {size} bytes of user {os.geteuid()}"
                )
            return cls(fd, size, path, kind)
        except OSError as e:
            os.close(fd)
            raise ChannelError(f"cannot map the group's segment {path}: {e}") from e
        except ChannelError:
            os.close(fd)
            raise

    def unlink(self) -> None:
        """Removes the name of a named segment; those who have mapped it keep it."""
        if self.kind == "named":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def close(self) -> None:
        """Unmaps. Views handed out keep the mapping alive until they are gone; the descriptor is closed at once."""
        if self.fd < 0:
            return
        del self.tensor
        self.words.release()
        self.quads.release()
        self.bytes.release()
        try:
            self._map.close()
        except BufferError:
            del self._map
        os.close(self.fd)
        self.fd = -1


def _allocation_message(e: OSError, size: int, kind: SegmentKind, directory: str) -> str:
    asked = f"the group's shared segment needs {size / 2**20:.1f} MiB"
    fix = "use a smaller copy_engine_max_bytes (HostReduceConfig)"
    if e.errno == errno.ENOSPC and kind == "named":
        fs = os.statvfs(directory)
        free = fs.f_bavail * fs.f_frsize / 2**20
        return f"{asked}, {directory} has {free:.1f} MiB free: enlarge it (docker: --shm-size) or {fix}"
    return f"{asked}, the system refused ({os.strerror(e.errno or 0)}): {fix}, or raise the memory limit"
