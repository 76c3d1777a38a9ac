"""URLs, and what is said when nobody answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.domain.errors import InvalidField, StoreUnavailable, Unsupported
from diptych.store.connect import client, connect, redacted
from diptych.store.shard import Shard
from tests.support.pretender import Pretender, pretender

__all__ = ["pretender"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:geheim@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:geheim@host/1?ssl_ca_certs=x", "rediss://user:***@host/1?ssl_ca_certs=x"),
        ("redis://host/0?password=geheim&db=1", "redis://host/0?password=***&db=1"),
        ("redis://host/0?db=1&PASSWORD=geheim", "redis://host/0?db=1&PASSWORD=***"),
        ("rediss://host/0?ssl_password=geheim", "rediss://host/0?ssl_password=***"),
        ("unix:///tmp/a.sock", "unix:///tmp/a.sock"),
        ("unix:///tmp/a@b:c.sock?password=geheim", "unix:///tmp/a@b:c.sock?password=***"),
        ("unix://:geheim@/tmp/a.sock", "unix://:***@/tmp/a.sock"),
        ("user:geheim@host", "user:***@host"),
        ("redis://:ge/he?im@host:6379", "redis://:***@host:6379"),
        ("redis://:ge@geheim@host", "redis://:***@host"),
        ("", ""),
    ],
)
def test_secrets_are_not_shown(url: str, shown: str) -> None:
    assert redacted(url) == shown


@given(st.text(st.characters(codec="ascii", exclude_categories=["C", "Z"]), min_size=4))
def test_no_password_is_ever_shown(password: str) -> None:
    secret = f"<{password}>"
    assert secret not in redacted(f"redis://user:{secret}@host:6379/0")
    assert secret not in redacted(f"unix://:{secret}@/tmp/x.sock?db=0")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://:geheim@host",
        "redis://:geheim@host:port/0",
        "redis://:geheim/more@host",
        "redis://host?decode_responses=true",
        "redis://host?db=1&socket_timeout=1",
    ],
)
async def test_a_wrong_url_is_named(url: str) -> None:
    with pytest.raises(InvalidField, match="redis_url") as caught:
        await connect(url)
    assert "geheim" not in str(caught.value)


async def test_an_unreachable_store_is_named_with_advice() -> None:
    with pytest.raises(StoreUnavailable) as caught:
        await connect("redis://:geheim@127.0.0.1:1/0")
    message = str(caught.value)
    assert "redis://:***@127.0.0.1:1/0" in message
    assert "REDIS_URL" in message
    assert "geheim" not in message


async def test_a_silent_server_is_given_up(pretender: Pretender) -> None:
    url = await pretender(lambda _: b"")
    with pytest.raises(StoreUnavailable, match=r"no answer within 0.2 s"):
        await connect(url, timeout_s=0.2)


@pytest.mark.parametrize(
    "nonsense", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$x\r\n", b":\r\n", b"*x\r\n", b"\xff\r\n", b"-\r\n"]
)
async def test_another_protocol_is_unavailable(pretender: Pretender, nonsense: bytes) -> None:
    url = await pretender(lambda _: nonsense)
    with pytest.raises(StoreUnavailable):
        await connect(url, timeout_s=0.5)


async def test_an_old_server_is_refused(pretender: Pretender) -> None:
    info = b"# Server\r\nredis_version:6.2.14\r\n"
    bulk = b"$%d\r\n%s\r\n" % (len(info), info)
    url = await pretender(lambda command: bulk if b"INFO\r\n$6" in command else b"+OK\r\n")
    with pytest.raises(Unsupported, match=r"Redis 6\.2\.14"):
        await connect(url)


@pytest.mark.parametrize("name", ["", "a{b", "a}b", "a:b"])
def test_a_shard_is_a_plain_name(name: str) -> None:
    with pytest.raises(InvalidField, match="shard"):
        Shard(client("redis://localhost"), name)


def test_all_keys_of_a_shard_hash_alike() -> None:
    shard = Shard(client("redis://localhost"), "s1")
    assert shard.key("worker", "{x}") == "diptych:{s1}:worker:{x}"
