"""Makes a process tell what it is full of, whenever it gets SIGUSR2; for tests that look for slow growth.

A process that was started with this folder on its PYTHONPATH and `DIPTYCH_TEST_INSIGHT=FOLDER` writes
`FOLDER/PID.json`. Garbage is collected first, so that what is told is what somebody holds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("DIPTYCH_TEST_INSIGHT", "")


def tell(number: int, frame: object) -> None:
    """The signal's handler: it runs on the main thread, between two of its instructions."""
    gc.collect()
    try:
        num_tasks = len(asyncio.all_tasks())
    except RuntimeError:  # no loop runs here
        num_tasks = 0
    kinds: Counter[str] = Counter()
    for thing in gc.get_objects():
        kinds[f"{type(thing).__module__}.{type(thing).__qualname__}"] += 1
    told: dict[str, Any] = {
        "command": sys.orig_argv,
        "num_tasks": num_tasks,
        "num_blocks": sys.getallocatedblocks(),
        "num_objects": kinds.total(),
        "kinds": dict(kinds.most_common(200)),
    }
    draft = Path(FOLDER) / f"{os.getpid()}.tmp"
    draft.write_text(json.dumps(told))
    draft.rename(draft.with_suffix(".json"))


if FOLDER:
    signal.signal(signal.SIGUSR2, tell)
