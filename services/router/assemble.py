"""A router's parts, put together: from settings and a model to a loop and the servicer in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diptych.domain.records import WorkerRecord
from diptych.rpc.dial import Dialer
from diptych.telemetry.recorder import Recorder
from services.router.config import RouterSettings
from services.router.decisions import WorkerRef
from services.router.loop import RouterLoop
from services.router.model import ServedModel
from services.router.policy import RouterPolicy
from services.router.server import RouterServicer
from services.router.tokens import ResumeTokens
from services.router.validate import Validator


def assemble(
    settings: RouterSettings,
    model: ServedModel,
    router: WorkerRef,
    dialer: Dialer,
    peers: Callable[[], Sequence[WorkerRecord]],
    store_available: Callable[[], bool],
    recorder: Recorder,
    tokens: ResumeTokens,
) -> tuple[RouterLoop, RouterServicer]:
    """`peers` tells the workers last known alive. Nothing runs yet."""
    policy = RouterPolicy(settings.limits(model.name))
    recorder.watch(lambda: {reason.value: count for reason, count in dict(policy.counters).items()})
    loop = RouterLoop(
        policy,
        router,
        dialer,
        peers,
        model.tokenizer.eos_ids,
        recorder,
        heartbeat_s=settings.session_heartbeat_s,
        silent_s=settings.session_silent_s,
    )
    validator = Validator(
        model,
        lambda: policy.bounds,
        max_prompt_bytes=settings.max_prompt_bytes,
        max_share=settings.max_share,
    )
    servicer = RouterServicer(
        router.worker_id,
        model,
        validator,
        loop,
        tokens,
        peers=peers,
        store_available=store_available,
        slow_client_s=settings.slow_client_s,
    )
    return loop, servicer
