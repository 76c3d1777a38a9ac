"""How a service process runs and ends.

SIGTERM or SIGINT asks it to leave: an event is set, and the service drains. A second one means now. The exit
status says which it was: 0 left in order, 1 failed, 2 was told something wrong (settings, files, ports),
128 + signal was told twice.
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from diptych.domain.errors import CallerError, DiptychError

log = logging.getLogger(__name__)

OK: Final = 0
FAILED: Final = 1
TOLD_WRONG: Final = 2

_PR_SET_PDEATHSIG: Final = 1


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `main(leave)` on a new event loop until it returns, and give the exit status for `sys.exit`.

    `leave` is set at the first SIGTERM or SIGINT; `main` then drains and returns. An error of the domain is
    printed as one line; anything else is a bug, and its traceback is logged.
    """
    try:
        asyncio.run(_with_signals(main))
    except DiptychError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return TOLD_WRONG if isinstance(error, CallerError) else FAILED
    except Exception:
        log.exception("the service failed")
        return FAILED
    return OK


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked(number: signal.Signals) -> None:
        if leave.is_set():
            # No unwinding: whoever asks twice has seen that draining hangs.
            os._exit(128 + number)
        leave.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)
    await main(leave)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way. Linux; elsewhere no effect.

    `parent_pid` is the parent's own `os.getpid()`, handed over at the spawn: comparing it afterwards closes
    the gap in which the parent died before the kernel was told. The parent must spawn from a thread that
    lives as long as it does, because it is the thread's end that the kernel reports.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)
