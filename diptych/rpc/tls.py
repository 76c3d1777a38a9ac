"""Certificates for both sides, read from files and checked before gRPC sees them.

gRPC itself reports a torn or mismatched certificate only as failed handshakes later; here the file is named
at start. Off means plain text, which is the default on loopback.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from diptych.domain.errors import InvalidField


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """What one process shows to others, and whom it trusts. PEM files.

    A server needs `cert` and `key`; with `require_client_cert` also `ca`, and then only clients whose
    certificate that CA signed get in (mutual TLS). A dialler needs `ca`; it shows `cert` and `key` where
    given.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    require_client_cert: bool = False
    server_name: str | None = None
    """Dialler: the name the server's certificate must bear, where peers are dialled by bare address."""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Raises `InvalidField` that names the setting and the file."""
        if self.cert is None or self.key is None:
            raise InvalidField("tls", "a server needs both `cert` and `key`")
        if self.require_client_cert and self.ca is None:
            raise InvalidField("tls.ca", "client certificates are required, but no CA is given to check them")
        return grpc.ssl_server_credentials(
            [self._own_pair()],
            root_certificates=self._trusted(),
            require_client_auth=self.require_client_cert,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Raises `InvalidField` that names the setting and the file. Without `ca` the system's roots are
        trusted.
        """
        if (self.cert is None) != (self.key is None):
            raise InvalidField("tls", "`cert` and `key` come together")
        key, cert = self._own_pair() if self.cert else (None, None)
        return grpc.ssl_channel_credentials(self._trusted(), key, cert)

    def _own_pair(self) -> tuple[bytes, bytes]:
        """Key and certificate chain, checked to belong together."""
        assert self.cert is not None
        assert self.key is not None
        key, cert = _read("tls.key", self.key), _read("tls.cert", self.cert)
        try:
            # An empty password: an encrypted key is refused here instead of asking on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key, password="")
        except (ssl.SSLError, ValueError) as error:
            problem = f"{self.cert} and {self.key} are not a PEM certificate and its key ({_reason(error)})"
            raise InvalidField("tls.cert", problem) from error
        return key, cert

    def _trusted(self) -> bytes | None:
        if self.ca is None:
            return None
        pem = _read("tls.ca", self.ca)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise InvalidField("tls.ca", f"{self.ca} holds no PEM certificate ({_reason(error)})") from error
        return pem


def tls_from_files(cert: str, key: str, ca: str) -> TlsSettings | None:
    """What three PEM files say, of which any may be empty; None, which is plain text, when all are.

    With an authority TLS is mutual.
    """
    if not (cert or key or ca):
        return None
    return TlsSettings(
        ca=Path(ca) if ca else None,
        cert=Path(cert) if cert else None,
        key=Path(key) if key else None,
        require_client_cert=bool(ca),
    )


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidField(field, f"{path}: {error.strerror}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
