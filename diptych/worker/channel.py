"""The KV channel of an engine process, opened from plain values that cross the pair of processes."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.domain.ports import KvChannel
from diptych.rpc.tls import tls_from_files
from diptych.transfer.channel_tls import ChannelTls
from diptych.transfer.open import open_channel


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """`kind` of channel, where it listens and what peers dial. PEM files, empty for plain text."""

    kind: str
    host: str
    advertise_host: str
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""


def open_kv_channel(settings: ChannelSettings) -> KvChannel:
    """Opens it on a free port. Raises InvalidField where address or certificates can't be used."""
    tls = tls_from_files(settings.tls_cert, settings.tls_key, settings.tls_ca)
    channel_tls = None
    if tls is not None:
        channel_tls = ChannelTls(tls.server_credentials(), tls.channel_credentials(), tls.server_name)
    return open_channel(
        settings.kind, settings.host, 0, advertise_host=settings.advertise_host, tls=channel_tls
    )
