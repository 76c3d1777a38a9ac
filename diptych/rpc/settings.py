"""What every service is told at its start: flags first, then `DIPTYCH_*`, then defaults. Read once, in
`__main__`."""

from __future__ import annotations

import secrets
import sys
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from diptych.rpc.tls import TlsSettings, tls_from_files

S = TypeVar("S", bound="ServiceSettings")


class ServiceSettings(BaseSettings):
    """The settings that all services share. Frozen; a service adds its own fields."""

    model_config = SettingsConfigDict(
        env_prefix="DIPTYCH_",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )

    redis_url: str = Field(description="redis://, rediss:// or unix:// address of the store")
    shard: str = Field("main", min_length=1, max_length=64, description="prefix of all keys in the store")
    cell: str = Field("main", min_length=1, max_length=64, description="workers that share one prefill queue")
    worker_id: str = Field(
        "", max_length=64, description="stable name of this process; empty: one is made up"
    )
    listen: str = Field("127.0.0.1:0", description="host:port to serve on; port 0 takes a free one")
    advertise: str = Field("", description="host peers dial, where it differs from the listening one")
    heartbeat_s: float = Field(0.5, gt=0, le=60, description="seconds between signs of life to the store")
    ttl_s: float = Field(
        3.0, gt=0, le=600, description="seconds without a sign of life after which it is gone"
    )
    drain_s: float = Field(
        30.0, ge=0, le=3600, description="most seconds that SIGTERM waits for streams to end"
    )
    tls_cert: str = Field("", description="PEM file of the server's certificate; empty: no TLS")
    tls_key: str = Field("", description="PEM file of its key")
    tls_ca: str = Field(
        "", description="PEM file of the authority that peers must have; with it TLS is mutual"
    )
    log_level: str = Field("warning", pattern="^(debug|info|warning|error)$")
    log_format: str = Field("text", pattern="^(text|json)$")

    @property
    def listen_host(self) -> str:
        return self.listen.rpartition(":")[0]

    @property
    def advertise_host(self) -> str:
        """The host that peers are told to dial."""
        return self.advertise or self.listen_host

    @property
    def tls(self) -> TlsSettings | None:
        """The certificates to show and to trust; None: plain text."""
        return tls_from_files(self.tls_cert, self.tls_key, self.tls_ca)

    def named(self, role: str) -> Self:
        """The same settings with a worker id, made up where none was given."""
        if self.worker_id:
            return self
        return self.model_copy(update={"worker_id": f"{role}-{secrets.token_hex(4)}"})

    def printable(self) -> dict[str, object]:
        """All settings, with the password of the store's address left out."""
        values: dict[str, object] = self.model_dump()
        head, at, tail = self.redis_url.rpartition("@")
        if at:
            values["redis_url"] = f"{head.split('://', 1)[0]}://***@{tail}"
        return values


def read_settings(settings_type: type[S], role: str, argv: list[str] | None = None) -> S:
    """Reads flags and environment. A bad value ends the process with status 2 and a line for each field."""
    arguments: Any = sys.argv[1:] if argv is None else argv
    try:
        return settings_type(_cli_parse_args=arguments, _cli_prog_name=f"services.{role}").named(role)
    except ValidationError as error:
        for problem in error.errors():
            flag = "--" + ".".join(str(part) for part in problem["loc"]).replace("_", "-")
            print(f"{role}: {flag}: {problem['msg']}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None
