"""Resume tokens: signed, for one tenant and a time, and believed by all routers that share a key."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from diptych.domain.errors import InvalidField, Stale
from diptych.domain.ids import Epoch, RequestId, Tenant, WorkerId
from diptych.rpc.settings import read_settings
from services.router.config import RouterSettings
from services.router.decisions import WorkerRef
from services.router.tokens import MAX_TOKEN_BYTES, TOKEN_LIFE_S, Claims, ResumeTokens

SECRET = "a secret of sixteen or more"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def claims(tenant: str = "acme") -> Claims:
    return Claims(RequestId("r-1"), Tenant(tenant), WorkerRef(WorkerId("decode-0"), Epoch((1 << 63) - 1)))


def test_what_one_router_minted_another_reads() -> None:
    token = ResumeTokens(SECRET).mint(claims())
    assert ResumeTokens(SECRET).read(token, "acme") == claims()
    assert len(token) < 200


def test_another_tenant_cannot_use_it() -> None:
    tokens = ResumeTokens()
    with pytest.raises(InvalidField, match="resume_token: belongs to another tenant"):
        tokens.read(tokens.mint(claims()), "emca")


def test_routers_that_share_no_key_do_not_believe_each_other() -> None:
    with pytest.raises(InvalidField, match="resume_token: was not given out"):
        ResumeTokens().read(ResumeTokens().mint(claims()), "acme")


def test_it_is_good_for_a_time() -> None:
    clock = Clock()
    tokens = ResumeTokens(SECRET, clock)
    token = tokens.mint(claims())
    clock.now += TOKEN_LIFE_S
    assert tokens.read(token, "acme") == claims()
    clock.now += 1
    with pytest.raises(Stale, match="expired"):
        tokens.read(token, "acme")


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, MAX_TOKEN_BYTES, MAX_TOKEN_BYTES + 1, 3_000_000])
def test_bytes_of_any_length_are_refused(length: int) -> None:
    with pytest.raises(InvalidField, match="^resume_token: "):
        ResumeTokens(SECRET).read(bytes(length), "acme")


@given(st.data())
def test_no_byte_of_it_can_be_changed(data: st.DataObject) -> None:
    tokens = ResumeTokens(SECRET)
    token = bytearray(tokens.mint(claims()))
    token[data.draw(st.integers(0, len(token) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidField, match="was not given out"):
        tokens.read(bytes(token), "acme")


def test_a_token_of_another_version_is_refused() -> None:
    import hashlib
    import hmac

    payload = msgspec.msgpack.encode(["r-1", "acme"])
    signature = hmac.digest(SECRET.encode(), b"diptych resume token 1\0" + payload, hashlib.sha256)
    with pytest.raises(InvalidField, match="another version"):
        ResumeTokens(SECRET).read(signature + payload, "acme")


@pytest.mark.parametrize("secret", ["short", "x" * 1025])
def test_a_secret_has_bounds(secret: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(RouterSettings, "router", ["--redis-url", "unix:///x", "--secret", secret])
    said = capsys.readouterr().err
    assert "--secret" in said
    assert secret not in said


def test_a_secret_is_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_SECRET", SECRET)
    settings = read_settings(RouterSettings, "router", ["--redis-url", "unix:///x"])
    assert settings.secret.get_secret_value() == SECRET
    assert SECRET not in f"{settings} {settings.printable()}"
