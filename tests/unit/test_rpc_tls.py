"""TLS and mutual TLS with certificates made for the test, and files that are no certificates."""

from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import trustme

from diptych.domain.errors import DiptychError, InvalidField, PeerLost
from diptych.rpc.dial import Dialer
from diptych.rpc.status import domain_errors
from diptych.rpc.tls import TlsSettings
from tests.support.echo_service import EchoStub, echo, echo_service
from tests.support.rpc_fixtures import DEADLINE_S, Serve


def issue(folder: Path, authority: trustme.CA, name: str) -> TlsSettings:
    """Settings of one process: its own pair, and the authority it trusts."""
    cert = authority.issue_cert(name)
    paths = {part: folder / f"{name}.{part}.pem" for part in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca"])
    cert.private_key_pem.write_to_path(paths["key"])
    for blob in cert.cert_chain_pems:
        blob.write_to_path(paths["cert"], append=True)
    return TlsSettings(ca=paths["ca"], cert=paths["cert"], key=paths["key"])


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> TlsSettings:
    return issue(tmp_path_factory.mktemp("ours"), trustme.CA(), "127.0.0.1")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsSettings:
    return issue(tmp_path_factory.mktemp("theirs"), trustme.CA(), "127.0.0.1")


async def ask(address: str, tls: TlsSettings | None) -> bytes:
    async with Dialer(tls) as dialer:
        with domain_errors():
            answer: bytes = await EchoStub(dialer.channel(address)).unary(b"x", timeout=DEADLINE_S)
    return answer


def only_trusting(settings: TlsSettings) -> TlsSettings:
    return TlsSettings(ca=settings.ca)


async def test_tls_with_the_right_authority(serving: Serve, worker: TlsSettings) -> None:
    server = await serving(echo_service(unary=echo), tls=worker)
    assert await ask(server.address, only_trusting(worker)) == b"x"


async def test_tls_refuses_plain_text_and_other_authorities(
    serving: Serve, worker: TlsSettings, stranger: TlsSettings
) -> None:
    server = await serving(echo_service(unary=echo), tls=worker)
    for client in (None, only_trusting(stranger)):
        with pytest.raises(PeerLost):
            await ask(server.address, client)
    assert server.num_running == 0


async def test_a_tls_client_refuses_a_plain_server(serving: Serve, worker: TlsSettings) -> None:
    server = await serving(echo_service(unary=echo))
    with pytest.raises(PeerLost):
        await ask(server.address, only_trusting(worker))


async def test_mutual_tls(serving: Serve, worker: TlsSettings, stranger: TlsSettings) -> None:
    server = await serving(echo_service(unary=echo), tls=replace(worker, require_client_cert=True))

    assert await ask(server.address, worker) == b"x"
    with pytest.raises(PeerLost):
        await ask(server.address, only_trusting(worker))
    with pytest.raises(PeerLost):
        await ask(server.address, replace(stranger, ca=worker.ca))


async def test_a_certificate_for_another_name_needs_that_name(serving: Serve, tmp_path: Path) -> None:
    authority = trustme.CA()
    named = issue(tmp_path, authority, "decode.cell-1.internal")
    server = await serving(echo_service(unary=echo), tls=named)
    with pytest.raises(PeerLost):
        await ask(server.address, only_trusting(named))
    override = replace(only_trusting(named), server_name="decode.cell-1.internal")
    assert await ask(server.address, override) == b"x"


def breakages(ours: TlsSettings, other: TlsSettings, folder: Path) -> dict[str, tuple[TlsSettings, str]]:
    torn = folder / "torn.pem"
    torn.write_bytes(ours.cert.read_bytes()[:200])
    missing = folder / "missing.pem"
    return {
        "no cert file": (replace(ours, cert=missing), "tls.cert: .*missing.pem: No such file"),
        "no key file": (replace(ours, key=missing), "tls.key: .*missing.pem: No such file"),
        "no CA file": (replace(ours, ca=missing), "tls.ca: .*missing.pem: No such file"),
        "a folder": (replace(ours, ca=folder), "tls.ca: .*Is a directory"),
        "torn cert": (replace(ours, cert=torn), "tls.cert: .*torn.pem"),
        "torn CA": (replace(ours, ca=torn), "tls.ca: .*torn.pem"),
        "another's key": (replace(ours, key=other.key), "tls.cert: .*are not a PEM certificate and its key"),
        "cert alone": (replace(ours, key=None), "tls: .*`cert`.*`key`"),
    }


@pytest.mark.parametrize("side", ["server_credentials", "channel_credentials"])
def test_files_that_will_not_do_are_named(
    worker: TlsSettings, stranger: TlsSettings, tmp_path: Path, side: str
) -> None:
    for what, (settings, problem) in breakages(worker, stranger, tmp_path).items():
        with pytest.raises(InvalidField, match=f"^{problem}"):
            getattr(settings, side)()
            pytest.fail(what)


def test_an_encrypted_key_is_refused_and_does_not_ask(worker: TlsSettings, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    assert worker.key is not None
    key = serialization.load_pem_private_key(worker.key.read_bytes(), password=None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(InvalidField, match=r"^tls\.cert: .*locked\.pem"):
        replace(worker, key=locked).server_credentials()


def test_a_server_that_checks_clients_needs_an_authority(worker: TlsSettings) -> None:
    with pytest.raises(InvalidField, match=r"^tls\.ca: client certificates are required"):
        replace(worker, ca=None, require_client_cert=True).server_credentials()


async def test_a_dialler_checks_its_files_at_once(worker: TlsSettings, tmp_path: Path) -> None:
    with pytest.raises(DiptychError, match=r"tls\.ca"):
        Dialer(replace(worker, ca=tmp_path / "missing.pem"))
    assert isinstance(worker.channel_credentials(), grpc.ChannelCredentials)
