"""Whether a peer's memory can be read without the peer's help.

A read is *one-sided* when hardware (RDMA, NVLink) or the kernel (another process of the same host) fetches
the bytes: its owner may be stopped, and hears nothing of a reader's death. Over plain TCP, UCX has the owner
send them. Seen with UCX as in nixl-cu12 1.5.1: where a reader hangs up in mid-read (3 of 4 times) or is
killed (1 of 24), the owner's UCX finds its reply undeliverable and *aborts the owner's process*. The death of
a decode worker must not kill a prefill worker, so such a pair speaks gRPC, unless the operator asks for TCP
by name.

The kernel lets a process read another's memory where both share the namespaces of processes and of IPC, and
it may trace it. UCX looks at the same three things.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path


class _Piece(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


@cache
def place() -> str:
    """Names the host and the namespaces of this process. Empty when the kernel does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "ipc")]
    except OSError:
        return ""
    return " ".join((boot, *spaces))


def may_read(pid: int) -> bool:
    """Whether the kernel would let us read the memory of process `pid`, in our namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    nowhere = _Piece(None, ctypes.sizeof(_Piece))
    arguments = (ctypes.byref(nowhere), 1, ctypes.byref(nowhere), 1, 0)
    read = libc.process_vm_readv(pid, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments))
    # Permission is looked at before the address, which is a bad one on purpose.
    return bool(read >= 0 or ctypes.get_errno() == errno.EFAULT)


def why_not_one_sided(peer_place: str, peer_pid: int, both_have_rdma: bool) -> str:
    """Why reads from a process would need its help; empty when they would not."""
    if both_have_rdma:
        return ""
    if not peer_place or peer_place != place():
        return "no RDMA, and not in one place with us (host, or its namespaces)"
    if not may_read(peer_pid):
        return "no RDMA, and the kernel does not let us read its memory"
    return ""
