"""Addresses that channels listen on and peers dial."""

from __future__ import annotations

import ipaddress

from diptych.domain.errors import InvalidField


def bracketed(host: str) -> str:
    """IPv6 addresses go in brackets before a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def check_dialable(host: str, advertise_host: str | None) -> None:
    """Raises InvalidField for an address that peers can't dial, unless another one is advertised."""
    if advertise_host is None and _is_wildcard(host):
        raise InvalidField("kv host", f"peers can't dial {host}: an address to advertise is needed")


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == ""
