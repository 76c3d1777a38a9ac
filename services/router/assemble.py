"""A router's parts, put together: from settings and a model to a loop and the servicer in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from diptych.domain.records import WorkerRecord
from diptych.rpc.dial import Dialer
from diptych.rpc.settings import ServiceSettings
from diptych.rpc.tls import TlsSettings
from services.router.config import RouterSettings
from services.router.decisions import WorkerRef
from services.router.loop import RouterLoop
from services.router.model import ServedModel
from services.router.policy import RouterPolicy
from services.router.server import RouterServicer
from services.router.validate import Validator


def assemble(
    settings: RouterSettings,
    model: ServedModel,
    router: WorkerRef,
    dialer: Dialer,
    peers: Callable[[], Sequence[WorkerRecord]],
    store_available: Callable[[], bool],
) -> tuple[RouterLoop, RouterServicer]:
    """`peers` tells the workers last known alive. Nothing runs yet."""
    policy = RouterPolicy(settings.limits(model.name))
    loop = RouterLoop(
        policy,
        router,
        dialer,
        peers,
        model.tokenizer.eos_ids,
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
        peers=peers,
        store_available=store_available,
        slow_client_s=settings.slow_client_s,
    )
    return loop, servicer


def tls_of(settings: ServiceSettings) -> TlsSettings | None:
    """None where no certificate is named. With an authority, TLS is mutual."""
    files = [Path(name) if name else None for name in (settings.tls_ca, settings.tls_cert, settings.tls_key)]
    ca, cert, key = files
    return TlsSettings(ca, cert, key, require_client_cert=ca is not None) if any(files) else None
