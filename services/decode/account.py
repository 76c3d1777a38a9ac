"""A decode worker's account of itself: what its engine process holds, and for whom this process holds it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from diptych.domain.audit import Held, bounded
from diptych.domain.engine_report import EngineLoad
from diptych.rpc.inspection import held_messages, link_messages
from diptych.v1 import worker_pb2

if TYPE_CHECKING:
    from services.decode.deliveries import Delivery
    from services.decode.worker import DecodeWorker


def tell_more(status: worker_pb2.WorkerStatus, worker: DecodeWorker) -> None:
    """Adds to the answer to `Inspect` what both processes hold, and how far the prefill workers are."""
    now = time.monotonic()
    held, total = joined(worker.load, worker.deliveries, now)
    status.held.extend(held_messages(held))
    status.num_held = total
    status.silent_s = now - worker.heard_at
    status.links.extend(link_messages(worker.link_watch.links()))
    status.max_rtt_s = worker.link_watch.bound.max_rtt_s


def joined(load: EngineLoad, deliveries: Iterable[Delivery], now: float) -> tuple[list[Held], int]:
    """What the engine holds, its requests with the router that wants them, and what only we hold.

    A request that we do not know is left without an owner. One that the engine does not know is a
    "delivery". An ended one is a "last word": not acknowledged yet, or kept for a client that may come back.
    """
    running: dict[str, Held] = {}
    last_words: list[Held] = []
    for delivery in deliveries:
        if delivery.is_running:
            running[delivery.request_id] = _of(delivery, "delivery", now)
        else:
            last_words.append(_of(delivery, "last word", now))
    known = {one.name for one in load.held if one.kind == "request"}
    is_whole = len(load.held) == load.num_held
    unknown = [one for name, one in running.items() if name not in known] if is_whole else []
    held = [_owned(one, running) for one in load.held]
    return [*held, *bounded(unknown, last_words)], load.num_held + len(unknown) + len(last_words)


def _owned(held: Held, running: dict[str, Held]) -> Held:
    ours = running.get(held.name)
    if held.kind != "request" or ours is None:
        return held
    return Held("request", held.name, ours.owner, held.age_s, held.num_blocks, ours.ends_in_s)


def _of(delivery: Delivery, kind: str, now: float) -> Held:
    owner = delivery.router[0] + ("" if delivery.session is not None else " (left)")
    ends_in_s = delivery.until - now if math.isfinite(delivery.until) else None
    return Held(kind, delivery.request_id, owner, now - delivery.since, ends_in_s=ends_in_s)
