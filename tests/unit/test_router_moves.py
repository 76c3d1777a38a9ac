"""A decode worker goes while it serves: its streams go on elsewhere, with no token lost and none repeated."""

import asyncio

import pytest

from diptych.client.values import Piece
from diptych.domain.errors import PeerLost
from diptych.domain.ids import RequestId, Tenant
from diptych.domain.sampling import SamplingParams
from diptych.store.membership import new_epoch
from diptych.v1 import common_pb2
from services.router.requests import CheckedRequest, LiveRequest
from tests.support.fake_decode import FakeDecode, expected_output, until
from tests.support.router_rig import RouterRig, text_of, tokens_of

PROMPT = "tell me"


async def start(
    rig: RouterRig, worker: FakeDecode, num_tokens: int, max_tokens: int = 6
) -> asyncio.Task[list[Piece]]:
    """A request on `worker` (steps by hand) that has had `num_tokens` tokens, all of them taken by the
    router."""
    await rig.linked()
    running = asyncio.create_task(rig.generate(PROMPT, max_tokens, seed=11))
    await until(lambda: worker.running)
    for _ in range(num_tokens):
        worker.step()
    await until(lambda: all(len(live.output) == num_tokens for live in rig.loop.live.values()))
    return running


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5])
async def test_a_stream_survives_its_worker(num_tokens: int) -> None:
    async with FakeDecode("w0", manual=True) as w0, FakeDecode("w1") as w1, RouterRig(w0) as rig:
        running = await start(rig, w0, num_tokens)
        rig.list(w0, w1)
        await rig.linked()
        await w0.kill()
        pieces = await running

        expected = expected_output(PROMPT.encode(), 6)
        assert tokens_of(pieces) == expected
        assert text_of(pieces) == "".join(f"<{token}>" for token in expected)
        first, second = w0.submits[0], w1.submits[0]
        assert list(second.tokens) == [*PROMPT.encode(), *expected[:num_tokens]]
        assert (second.num_output, second.placement) == (num_tokens, 2)
        assert second.request_id == first.request_id
        assert second.params == first.params, "same seed, same everything"
        finish = pieces[-1].finish
        assert finish
        assert (finish.trail.num_resumed, finish.trail.fallbacks) == (1, {"decode_lost": 1})
        assert finish.trail.num_output_tokens == 6
        assert (await rig.status()).fallbacks == {"decode_lost": 1}


async def test_a_worker_that_falls_silent_is_lost_though_no_stream_was_closed() -> None:
    async with FakeDecode("w0", manual=True) as w0, FakeDecode("w1") as w1:
        async with RouterRig(w0, session_silent_s=0.3) as rig:
            running = await start(rig, w0, 2)
            rig.list(w0, w1)
            await rig.linked()
            w0.frozen = True
            pieces = await running

            assert tokens_of(pieces) == expected_output(PROMPT.encode(), 6)
            finish = pieces[-1].finish
            assert finish
            assert finish.trail.fallbacks == {"decode_silent": 1}
            assert w1.submits[0].num_output == 2


async def test_what_a_lost_worker_still_says_changes_nothing() -> None:
    async with FakeDecode("w0", manual=True) as w0, FakeDecode("w1", manual=True) as w1:
        async with RouterRig(w0, session_silent_s=0.3) as rig:
            running = await start(rig, w0, 2)
            rig.list(w0, w1)
            await rig.linked()
            w0.frozen = True
            await until(lambda: w1.running)
            w0.frozen = False
            w0.step()
            for _ in range(4):
                w1.step()

            assert tokens_of(await running) == expected_output(PROMPT.encode(), 6)


async def test_a_worker_lost_between_its_last_token_and_its_last_word() -> None:
    async with FakeDecode("w0", manual=True) as w0, FakeDecode("w1") as w1, RouterRig(w0) as rig:
        running = await start(rig, w0, 5)
        (request,) = w0.running.values()
        request.submit.params.max_tokens = 99  # so that it does not say that token 6 is the last
        w0.step()
        await until(lambda: all(len(live.output) == 6 for live in rig.loop.live.values()))
        rig.list(w0, w1)
        await rig.linked()
        await w0.kill()
        pieces = await running

        assert tokens_of(pieces) == expected_output(PROMPT.encode(), 6)
        finish = pieces[-1].finish
        assert finish
        assert finish.reason == "length"
        assert not w1.submits, "nothing was left to compute"


async def test_a_stream_survives_two_workers() -> None:
    async with (
        FakeDecode("w0", manual=True) as w0,
        FakeDecode("w1", manual=True) as w1,
        FakeDecode("w2") as w2,
    ):
        async with RouterRig(w0) as rig:
            running = await start(rig, w0, 2)
            rig.list(w0, w1)
            await rig.linked()
            await w0.kill()
            await until(lambda: w1.running)
            w1.step()
            await until(lambda: all(len(live.output) == 3 for live in rig.loop.live.values()))
            rig.list(w1, w2)
            await rig.linked()
            await w1.kill()
            pieces = await running

            assert tokens_of(pieces) == expected_output(PROMPT.encode(), 6)
            finish = pieces[-1].finish
            assert finish
            assert finish.trail.num_resumed == 2
            assert (w2.submits[0].num_output, w2.submits[0].placement) == (3, 3)


async def test_many_streams_move_at_once() -> None:
    prompts = [f"prompt {i}" for i in range(30)]
    async with FakeDecode("w0") as w0, FakeDecode("w1") as w1, RouterRig(w0) as rig:
        await rig.linked()
        running = [asyncio.create_task(rig.generate(prompt, 200)) for prompt in prompts]
        await until(lambda: len(rig.loop.live) == 30 and all(live.output for live in rig.loop.live.values()))
        rig.list(w0, w1)
        await rig.linked()
        await w0.kill()
        streams = await asyncio.gather(*running)

        assert [tokens_of(s) for s in streams] == [expected_output(p.encode(), 200) for p in prompts]
        assert w1.submits, "nothing moved"


async def test_a_worker_started_anew_at_the_same_place_takes_over_its_own_requests() -> None:
    async with FakeDecode("w0", manual=True) as w0, RouterRig(w0) as rig:
        running = await start(rig, w0, 2)
        w0.manual = False
        await w0.restart()
        rig.list(w0)
        pieces = await running

        assert tokens_of(pieces) == expected_output(PROMPT.encode(), 6)
        assert [submit.num_output for submit in w0.submits] == [0, 2]


async def test_the_old_session_takes_nothing_with_it_that_the_new_one_needs() -> None:
    async with FakeDecode("w0") as w0, RouterRig(w0) as rig:
        await rig.linked()
        w0.epoch = new_epoch()
        rig.list(w0)
        await rig.linked()
        await until(lambda: len(w0.sessions) == 1)
        assert tokens_of(await rig.generate(PROMPT, 3)) == expected_output(PROMPT.encode(), 3)

        assert w0.num_sessions == 2


async def test_with_nobody_left_it_waits_for_somebody() -> None:
    async with FakeDecode("w0", manual=True) as w0, FakeDecode("w1") as w1, RouterRig(w0) as rig:
        running = await start(rig, w0, 2)
        await w0.kill()
        rig.list()
        await until(lambda: rig.loop.policy.num_queued == 1)
        rig.list(w1)

        assert tokens_of(await running) == expected_output(PROMPT.encode(), 6)


async def test_with_nobody_left_it_fails_after_a_time_and_names_the_cause() -> None:
    async with FakeDecode("w0", manual=True) as w0, RouterRig(w0, max_wait_s=0.3) as rig:
        running = await start(rig, w0, 2)
        await w0.kill()
        with pytest.raises(
            PeerLost, match=r"no decode worker took it within 0\.3 s; the first that had it was lost"
        ):
            await running
        status = await rig.status()
        assert status.fallbacks == {"decode_lost": 1, "no_decode_worker": 1}


async def test_a_request_that_kills_its_workers_stops_at_a_bound() -> None:
    async with FakeDecode("w0", manual=True) as w0, FakeDecode("w1", manual=True) as w1:
        async with RouterRig(w0, max_moves=1) as rig:
            running = await start(rig, w0, 1)
            rig.list(w0, w1)
            await rig.linked()
            await w0.kill()
            await until(lambda: w1.running)
            await w1.kill()
            with pytest.raises(PeerLost, match="given up after 2 decode workers"):
                await running


async def test_an_unlisted_worker_finishes_what_it_has() -> None:
    async with FakeDecode("w0", manual=True) as w0, FakeDecode("w1") as w1, RouterRig(w0) as rig:
        running = await start(rig, w0, 2)
        rig.list(w1)
        await rig.linked()
        await rig.generate("another", 1)
        for _ in range(4):
            w0.step()

        assert tokens_of(await running) == expected_output(PROMPT.encode(), 6)
        assert len(w0.submits) == len(w1.submits) == 1
        await until(lambda: not w0.sessions, "the session with the worker that left is closed")


async def test_a_cancelled_request_does_not_move() -> None:
    async with FakeDecode("w0", manual=True) as w0, FakeDecode("w1") as w1, RouterRig(w0) as rig:
        running = await start(rig, w0, 2)
        w0.deaf = True
        (request_id,) = w0.running
        assert await rig.client.cancel(request_id)
        await until(lambda: w0.cancels)
        rig.list(w0, w1)
        await rig.linked()
        await w0.kill()
        pieces = await running

        finish = pieces[-1].finish
        assert finish
        assert finish.reason == "abort"
        assert not w1.submits


@pytest.mark.parametrize(
    ("output", "options", "reason"),
    [
        ([256], {}, common_pb2.FINISH_REASON_STOP),
        ([256], {"ignore_eos": True}, None),
        ([7], {"stop_token_ids": (7,)}, common_pb2.FINISH_REASON_STOP),
        ([7], {"stop_token_ids": (7,), "min_tokens": 2}, None),
        ([1, 2, 3], {}, common_pb2.FINISH_REASON_LENGTH),
        ([1, 2, 256], {}, common_pb2.FINISH_REASON_STOP),
        ([], {}, None),
    ],
)
async def test_what_an_output_calls_for(
    output: list[int], options: dict[str, object], reason: int | None
) -> None:
    params = SamplingParams(max_tokens=3, **options)  # type: ignore[arg-type]
    live = LiveRequest(RequestId("r"), CheckedRequest((1,), params, Tenant(""), "", 0, ""), 0.0)
    live.output.extend(output)

    assert live.ended_by(frozenset({256})) == reason
