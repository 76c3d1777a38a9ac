"""The certificates that the commands dial with: those of the services, from the same variables.

`DIPTYCH_TLS_CA` names the authority that routers and workers must have, `DIPTYCH_TLS_CERT` and
`DIPTYCH_TLS_KEY` what we show, which they ask for where they were given an authority themselves. PEM files;
none set: plain text. A command that runs beside a service, as in its container, finds what that was told.
"""

from __future__ import annotations

import os

from diptych.rpc.tls import TlsSettings, tls_from_files


def tls_from_environment() -> TlsSettings | None:
    """None: plain text. The files are read, and refused with InvalidField, by whoever dials."""
    cert, key, ca = (os.environ.get(f"DIPTYCH_TLS_{part}", "") for part in ("CERT", "KEY", "CA"))
    return tls_from_files(cert, key, ca)
