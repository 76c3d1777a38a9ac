"""The KV channels of an engine process, opened from plain values that cross the pair of processes.

`auto` opens all that work here: NIXL where it is installed and nothing has to be encrypted, and gRPC, which
works everywhere. Channels that are named have to work.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from diptych.domain.errors import InvalidField
from diptych.domain.ports import KvChannel, Region
from diptych.domain.records import ChannelEndpoint
from diptych.rpc.tls import tls_from_files
from diptych.transfer.channel_tls import ChannelTls
from diptych.transfer.nixl_library import Transport, installed
from diptych.transfer.open import open_channel
from diptych.transfer.several import ChannelSet

log = logging.getLogger(__name__)

AUTO = "auto"
ALL = ("nixl", "grpc")


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """`kinds` of channel, best first, comma-separated, or `auto`; where they listen and what peers dial. PEM
    files, empty for plain text."""

    kinds: str
    host: str
    advertise_host: str
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    nixl_transport: Transport = "auto"


def open_kv_channels(settings: ChannelSettings) -> ChannelSet:
    """Opens them on free ports. Raises InvalidField where a named one, an address or certificates can't be
    used."""
    tls = tls_from_files(settings.tls_cert, settings.tls_key, settings.tls_ca)
    channel_tls = None
    if tls is not None:
        channel_tls = ChannelTls(tls.server_credentials(), tls.channel_credentials(), tls.server_name)
    opened: list[KvChannel] = []
    try:
        for kind in ALL if settings.kinds == AUTO else dict.fromkeys(settings.kinds.split(",")):
            channel = _open(kind, settings, channel_tls)
            opened += [channel] if channel else []
    except InvalidField:
        ChannelSet(opened).close()
        raise
    return ChannelSet(opened)


def endpoint(probe: Region) -> ChannelEndpoint:
    """Where the owner of a probe region is read."""
    return ChannelEndpoint(probe.kind, probe.address, probe_key=probe.key.hex(), probe_bytes=probe.num_bytes)


def _open(kind: str, settings: ChannelSettings, tls: ChannelTls | None) -> KvChannel | None:
    """None: left out, which only `auto` allows."""
    may_fail = settings.kinds == AUTO and kind == "nixl"
    if may_fail and (tls is not None or not installed()):
        return None
    try:
        return open_channel(
            kind,
            settings.host,
            0,
            advertise_host=settings.advertise_host or None,
            tls=tls,
            nixl_transport=settings.nixl_transport,
        )
    except InvalidField as problem:
        if not may_fail:
            raise
        log.warning("KV crosses without %s: %s", kind, problem)
        return None
