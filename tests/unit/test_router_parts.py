"""The router's smaller parts, each by itself."""

import asyncio

import pytest

from diptych.domain.errors import Internal
from diptych.domain.ids import RequestId, Tenant
from diptych.domain.sampling import SamplingParams
from diptych.rpc.settings import read_settings
from diptych.v1 import common_pb2, decode_pb2
from services.router.config import RouterSettings
from services.router.outgoing import PIECE_TOKENS, Outgoing
from services.router.requests import CheckedRequest, LiveRequest, Recent, Times
from services.router.states import TABLE, TERMINAL, Event, State, advance
from services.router.wire import finish_for


def live_request(max_tokens: int = 10_000) -> LiveRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return LiveRequest(RequestId("r"), CheckedRequest((1,), params, Tenant(""), "", 0, ""), 1.0)


async def take_all(outgoing: Outgoing, count: int) -> list[str]:
    told = []
    for _ in range(count):
        message = await asyncio.wait_for(outgoing.take(), 10.0)
        body = message.WhichOneof("body")
        told.append(f"{body} {getattr(getattr(message, str(body)), 'request_id', '')}".strip())
    return told


def submit(name: str) -> decode_pb2.Submit:
    return decode_pb2.Submit(request_id=name)


async def test_prompts_take_turns_and_cancels_overtake() -> None:
    outgoing = Outgoing()
    outgoing.submit(submit("long"), [1] * (3 * PIECE_TOKENS))
    outgoing.submit(submit("short"), [1])
    outgoing.submit(submit("gone"), [1] * (2 * PIECE_TOKENS))
    assert await take_all(outgoing, 2) == ["submit long", "submit short"]
    assert outgoing.cancel(RequestId("long")), "its first piece was sent"
    assert outgoing.cancel(RequestId("short"))
    assert await take_all(outgoing, 3) == ["cancel long", "cancel short", "submit gone"]
    outgoing.beat()
    assert await take_all(outgoing, 1) == ["piece gone"], "no heartbeat while there is something to say"


async def test_a_request_of_which_nothing_was_sent_is_just_dropped() -> None:
    outgoing = Outgoing()
    outgoing.submit(submit("a"), [1])
    assert not outgoing.cancel(RequestId("a"))
    outgoing.beat()
    outgoing.beat()
    assert await take_all(outgoing, 1) == ["heartbeat"], "one is enough"
    waiting = asyncio.create_task(outgoing.take())
    outgoing.submit(submit("b"), [1])
    assert (await asyncio.wait_for(waiting, 10.0)).submit.request_id == "b"


async def test_pieces_hold_all_tokens_once() -> None:
    tokens = list(range(2 * PIECE_TOKENS + 5))
    outgoing = Outgoing()
    outgoing.submit(submit("a"), tokens)
    messages = [await outgoing.take() for _ in range(3)]
    assert messages[0].submit.num_tokens == len(tokens)
    got = list(messages[0].submit.tokens)
    for message in messages[1:]:
        assert message.piece.offset == len(got)
        got += message.piece.tokens
    assert got == tokens


async def test_what_waits_for_a_slow_client_is_merged() -> None:
    live = live_request()
    for i in range(3000):
        live.push(decode_pb2.Delta(request_id="r", index=i, tokens=[i % 7], text="x"), 2.0)
    live.end(finish_for(common_pb2.FINISH_REASON_STOP), 3.0)
    pieces = [await live.next() for _ in range(3)]

    assert [piece.index for piece in pieces] == [0, 1024, 2048]
    assert [token for piece in pieces for token in piece.tokens] == [i % 7 for i in range(3000)]
    assert "".join(piece.text for piece in pieces) == "x" * 3000
    assert [piece.finish is not None for piece in pieces] == [False, False, True]


async def test_nothing_is_taken_in_after_the_last_word() -> None:
    live = live_request()
    assert live.end(finish_for(common_pb2.FINISH_REASON_STOP), 3.0)
    assert not live.end(finish_for(common_pb2.FINISH_REASON_ABORT), 4.0)
    live.push(decode_pb2.Delta(request_id="r", index=5, tokens=[1]), 5.0)

    piece = await live.next()
    assert (piece.tokens, piece.finish) == ([], finish_for(common_pb2.FINISH_REASON_STOP))
    assert live.output == []


def test_text_without_tokens_is_taken_in() -> None:
    live = live_request()
    live.push(decode_pb2.Delta(request_id="r", index=0, tokens=[1]), 2.0)
    live.push(decode_pb2.Delta(request_id="r", text="held until now"), 2.0)
    with pytest.raises(Internal):
        live.push(decode_pb2.Delta(request_id="r", index=0, tokens=[1]), 2.0)
    assert live.output == [1]


def test_medians() -> None:
    recent = Recent(num_requests=3)
    assert (recent.ttft_p50_s, recent.tpot_p50_s) == (0.0, 0.0)
    recent.add(Times(0.0), 0)
    recent.add(Times(0.0, first_at=9.0, latest_at=9.0), 1)
    assert (recent.ttft_p50_s, recent.tpot_p50_s) == (9.0, 0.0)
    for ttft_s in (1.0, 2.0, 3.0):
        recent.add(Times(5.0, first_at=5.0 + ttft_s, latest_at=5.0 + ttft_s + 8.0), 5)
    assert (recent.ttft_p50_s, recent.tpot_p50_s) == (2.0, 2.0)


def test_every_state_has_its_row_and_terminal_ones_no_way_out() -> None:
    assert set(TABLE) == set(State)
    assert {state for state, ways in TABLE.items() if not ways} == TERMINAL
    with pytest.raises(Internal, match="place is not possible in ended"):
        advance(State.ENDED, Event.PLACE)
    assert all(
        Event.CANCEL in TABLE[state] and Event.FAIL in TABLE[state]
        for state in set(State) - TERMINAL - {State.CANCELLING}
    )


def test_settings_reach_the_policy() -> None:
    flags = "--redis-url unix:///x --model toy --model-name mine --max-queue 3 --max-wait-s 4 --max-share 0.5"
    more = "--max-moves 6 --moves-per-s 7 --cancel-wait-s 8 --cell far --worker-id r1"
    settings = read_settings(RouterSettings, "router", f"{flags} {more}".split())
    limits = settings.limits("mine")

    assert (settings.model, settings.model_name, settings.worker_id) == ("toy", "mine", "r1")
    assert (limits.model, limits.cell, limits.max_queue, limits.max_wait_s) == ("mine", "far", 3, 4)
    assert (limits.max_share, limits.max_moves, limits.moves_per_s, limits.cancel_wait_s) == (0.5, 6, 7, 8)


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ("--max-share 0", "--max-share"),
        ("--max-queue -1", "--max-queue"),
        ("--max-prompt-bytes 5000000", "--max-prompt-bytes"),
        ("--slow-client-s nan", "--slow-client-s"),
        ("--session-silent-s 0.1 --session-heartbeat-s 0.1", "session_silent_s"),
    ],
)
def test_a_setting_out_of_bounds_ends_the_start(
    flags: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read_settings(RouterSettings, "router", ["--redis-url", "unix:///x", *flags.split()])
    assert caught.value.code == 2
    assert flag in capsys.readouterr().err
