"""`python -m services.cache`: from settings to a cache that serves, and back to nothing."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import closing

from diptych.domain.errors import Stale
from diptych.rpc.process import run_service
from diptych.rpc.settings import read_settings
from diptych.rpc.tls import TlsSettings
from diptych.store.connect import connect
from diptych.store.directory import ChunkDirectory
from diptych.store.registry import Registry
from diptych.telemetry.log import configure_logging
from diptych.transfer.channel_tls import ChannelTls
from diptych.transfer.open import open_channel
from services.cache.config import CacheSettings
from services.cache.service import CacheService

log = logging.getLogger(__name__)


def main() -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit status."""
    settings = read_settings(CacheSettings, "cache")
    configure_logging(settings.log_level, settings.log_format, settings.worker_id)
    log.info("settings: %s", settings.printable())
    return run_service(lambda leave: run(settings, leave))


async def run(settings: CacheSettings, leave: asyncio.Event) -> None:
    """Serves until `leave` is set. Raises Stale when a later start of this worker has taken its name."""
    tls = settings.tls
    redis = await connect(settings.redis_url)
    try:
        channel = open_channel(
            settings.channel,
            settings.listen_host,
            settings.kv_port,
            advertise_host=settings.advertise or None,
            tls=_channel_tls(tls) if tls else None,
        )
        with closing(channel):
            service = CacheService(
                settings, Registry(redis, settings.shard), ChunkDirectory(redis, settings.shard), channel
            )
            try:
                await service.start(tls)
                sys.stdout.write(f"cache {settings.worker_id} listening on {service.address}\n")
                sys.stdout.flush()
                await _first(leave, service.membership.replaced)
            finally:
                await service.leave()
    finally:
        await redis.aclose()
    if not leave.is_set():
        raise Stale(f"a later start of worker {settings.worker_id} has taken its name")


async def _first(*events: asyncio.Event) -> None:
    """Returns when any of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _channel_tls(tls: TlsSettings) -> ChannelTls:
    return ChannelTls(tls.server_credentials(), tls.channel_credentials(), tls.server_name)


if __name__ == "__main__":
    sys.exit(main())
