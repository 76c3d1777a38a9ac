"""The router in front of decode workers of real gRPC: sessions, and what comes down them."""

import asyncio
import time
from dataclasses import replace

import pytest

from diptych.domain.errors import Draining, Internal, LayoutMismatch, Overloaded, TransferFailed
from diptych.domain.ids import RequestId
from diptych.domain.records import Role
from diptych.v1 import common_pb2, decode_pb2
from tests.support.fake_decode import DEADLINE_S, FakeDecode, expected_output, until
from tests.support.router_rig import RouterRig, text_of, tokens_of


async def test_a_request_is_streamed_to_its_end() -> None:
    async with FakeDecode() as worker, RouterRig(worker) as rig:
        pieces = await rig.generate(
            "hello", 5, seed=7, temperature=0.5, stop=["x"], priority=-3, cache_salt="s"
        )

        expected = expected_output(b"hello", 5)
        assert tokens_of(pieces) == expected
        assert text_of(pieces) == "".join(f"<{token}>" for token in expected)
        finish = pieces[-1].finish
        assert finish
        assert finish.reason == "length"
        assert (finish.trail.seed, finish.trail.num_prompt_tokens, finish.trail.num_output_tokens) == (
            7,
            5,
            5,
        )
        assert (finish.trail.decode_worker, finish.trail.num_resumed) == ("decode-0", 0)
        assert len({piece.request_id for piece in pieces}) == 1
        (submit,) = worker.submits
        assert list(submit.tokens) == list(b"hello")
        assert (submit.num_tokens, submit.num_output, submit.placement) == (5, 0, 1)
        assert (submit.priority, submit.cache_salt) == (-3, "s")
        assert (submit.params.temperature, submit.params.top_p, list(submit.params.stop)) == (0.5, 1.0, ["x"])


async def test_a_seed_is_minted_and_told() -> None:
    async with FakeDecode() as worker, RouterRig(worker) as rig:
        first, second = await rig.generate("a", 1), await rig.generate("a", 1)

        seeds = [pieces[-1].finish.trail.seed for pieces in (first, second) if pieces[-1].finish]
        assert [submit.params.seed for submit in worker.submits] == seeds
        assert seeds[0] != seeds[1]


async def test_a_long_prompt_comes_in_pieces() -> None:
    prompt = "abc" * 5000
    async with FakeDecode(max_context=20_000) as worker, RouterRig(worker) as rig:
        pieces = await rig.generate(prompt, 2)

        assert tokens_of(pieces) == expected_output(prompt.encode(), 2)
        kinds = [message.split()[0] for message in worker.received]
        assert kinds == ["submit", "piece", "piece", "piece"]
        assert worker.submits[0].num_tokens == 15_000
        assert len(worker.submits[0].tokens) == 4096


async def test_one_session_carries_all_requests() -> None:
    prompts = [f"prompt {i}" for i in range(20)]
    async with FakeDecode() as worker, RouterRig(worker) as rig:
        streams = await asyncio.gather(*(rig.generate(prompt, 10) for prompt in prompts))

        assert [tokens_of(s) for s in streams] == [expected_output(p.encode(), 10) for p in prompts]
        assert worker.num_sessions == 1


async def test_two_workers_share_the_load() -> None:
    async with FakeDecode("w0", manual=True) as w0, FakeDecode("w1", manual=True) as w1:
        async with RouterRig(w0, w1) as rig:
            await rig.linked()
            streams = [asyncio.create_task(rig.generate(f"prompt {i}", 1)) for i in range(10)]
            await until(lambda: len(w0.running) + len(w1.running) == 10)

            assert len(w0.running) == len(w1.running) == 5
            w0.step()
            w1.step()
            await asyncio.gather(*streams)


async def test_idle_peers_hear_each_other() -> None:
    async with FakeDecode() as worker, RouterRig(worker, session_silent_s=0.2) as rig:
        await rig.linked()
        await until(lambda: worker.sessions[0].heartbeats >= 10)

        assert worker.num_sessions == 1, "the session was lost while both were well"


async def test_a_router_that_was_away_does_not_take_its_own_absence_for_the_peers() -> None:
    async with FakeDecode() as worker, RouterRig(worker, session_silent_s=0.2) as rig:
        await rig.linked()
        time.sleep(0.6)  # the whole loop stands still: heartbeats wait in the socket
        beats = worker.sessions[0].heartbeats
        await until(lambda: worker.sessions[0].heartbeats > beats + 3)

        assert worker.num_sessions == 1


@pytest.mark.parametrize(
    ("index", "tokens", "problem"),
    [
        (3, [1], "sent output 3 where 2 was next"),
        (1, [1], "sent output 1 where 2 was next"),
        (2, [1] * 7, "more than 8 tokens"),
    ],
    ids=["gap", "repeat", "too many"],
)
async def test_a_stream_that_is_not_contiguous_fails(index: int, tokens: list[int], problem: str) -> None:
    async with FakeDecode(manual=True) as worker, RouterRig(worker) as rig:
        async with rig.stream("hello", 8) as generation:
            await until(lambda: worker.running)
            worker.step()
            worker.step()
            heard = [*(await anext(generation)).tokens]
            (request_id,) = worker.running
            worker.send(
                worker.sessions[0], decode_pb2.Delta(request_id=request_id, index=index, tokens=tokens)
            )
            with pytest.raises(Internal, match=problem):
                async for piece in generation:
                    heard += piece.tokens

        assert heard == expected_output(b"hello", 2), "only what was right reached the client"
        await until(lambda: worker.cancels == [request_id])
        assert (await rig.status()).fallbacks == {"broken_stream": 1}


async def test_deltas_of_requests_that_are_not_there_change_nothing() -> None:
    async with FakeDecode(manual=True) as worker, RouterRig(worker) as rig:
        running = asyncio.create_task(rig.generate("hello", 2))
        await until(lambda: worker.running)
        finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_STOP)
        worker.send(
            worker.sessions[0],
            decode_pb2.Delta(request_id="nobody", index=0, tokens=[1]),
            decode_pb2.Delta(request_id="", finish=finish),
        )
        worker.step()
        worker.step()

        assert tokens_of(await running) == expected_output(b"hello", 2)


async def test_a_message_that_comes_again_is_passed_over() -> None:
    # Silent between steps, so that numbers are the test's.
    async with FakeDecode(manual=True, heartbeat_s=DEADLINE_S) as worker:
        async with RouterRig(worker, session_silent_s=DEADLINE_S) as rig:
            running = asyncio.create_task(rig.generate("hello", 3))
            await until(lambda: worker.running)
            (session,) = worker.sessions
            (request_id,) = worker.running
            worker.step()
            await until(lambda: rig.loop.live[RequestId(request_id)].output)
            session.num_sent -= 1
            worker.send(session, decode_pb2.Delta(request_id=request_id, index=1, tokens=[1, 2]))
            worker.step()
            worker.step()

            assert tokens_of(await running) == expected_output(b"hello", 3)
            assert worker.num_sessions == 1


async def test_where_a_message_is_missing_the_request_moves() -> None:
    async with FakeDecode("w0", manual=True) as w0, FakeDecode("w1") as w1, RouterRig(w0) as rig:
        running = asyncio.create_task(rig.generate("hello", 8))
        await until(lambda: w0.running)
        w0.step()
        (request_id,) = w0.running
        await until(lambda: rig.loop.live[RequestId(request_id)].output)
        rig.list(w0, w1)
        await rig.linked()
        w0.sessions[0].num_sent += 1
        w0.step()
        pieces = await running

        assert tokens_of(pieces) == expected_output(b"hello", 8)
        finish = pieces[-1].finish
        assert finish
        assert finish.trail.fallbacks == {"decode_lost": 1}
        assert [submit.num_output for submit in w1.submits] == [1]


async def test_each_session_has_a_number_of_its_own_and_each_message_too() -> None:
    async with FakeDecode() as worker, RouterRig(worker) as rig:
        await rig.linked()
        hellos = [worker.sessions[0].hello]
        await worker.restart()
        rig.list(worker)
        await rig.linked()
        hellos.append(worker.sessions[0].hello)
        await until(lambda: worker.sessions[0].heartbeats >= 3)

        assert hellos[0].session < hellos[1].session
        numbers = worker.sessions[0].numbers
        assert numbers == list(range(1, len(numbers) + 1))


async def test_what_fails_before_the_first_token_is_a_status() -> None:
    async with FakeDecode() as worker, RouterRig(worker) as rig:
        worker.refuse_submits = TransferFailed("the third read failed")
        with pytest.raises(TransferFailed, match="the third read failed"):
            await rig.generate("hello")
        worker.refuse_submits = None

        assert tokens_of(await rig.generate("hello", 3)) == expected_output(b"hello", 3)


async def test_what_fails_later_ends_the_stream_with_its_cause() -> None:
    async with FakeDecode(manual=True) as worker, RouterRig(worker) as rig:
        async with rig.stream("hello") as generation:
            await until(lambda: worker.running)
            worker.step()
            assert (await anext(generation)).tokens
            failure = common_pb2.Failure(kind="TransferFailed", message="no more")
            worker.finish(generation.request_id, common_pb2.FINISH_REASON_ERROR, failure)
            with pytest.raises(TransferFailed, match="no more"):
                await anext(generation)


@pytest.mark.parametrize("error", [Draining("leaving"), Overloaded("full")])
async def test_a_request_that_is_handed_back_goes_elsewhere(error: Exception) -> None:
    async with FakeDecode("w0") as w0, FakeDecode("w1") as w1, RouterRig(w0, w1) as rig:
        await rig.linked()
        w0.refuse_submits = error  # type: ignore[assignment]
        pieces = await rig.generate("hello", 3)

        assert tokens_of(pieces) == expected_output(b"hello", 3)
        finish = pieces[-1].finish
        assert finish
        assert finish.trail.fallbacks == {"decode_handed_back": 1}
        assert (finish.trail.num_resumed, finish.trail.decode_worker) == (1, "w1")
        assert [submit.placement for submit in w1.submits] == [2]


async def test_a_worker_that_refuses_the_session_gets_nothing_and_is_asked_again() -> None:
    async with FakeDecode("w0") as w0, FakeDecode("w1") as w1, RouterRig(w0, w1) as rig:
        w0.refuse_sessions = LayoutMismatch("wire version 1, ours is 2")
        await until(lambda: w0.num_sessions >= 3)
        assert tokens_of(await rig.generate("hello", 3)) == expected_output(b"hello", 3)
        assert not w0.submits

        w0.refuse_sessions = None
        await rig.linked()


async def test_a_worker_that_is_another_than_it_should_be_gets_nothing() -> None:
    async with FakeDecode("w0") as w0, FakeDecode("w1") as w1:
        w0.welcome_epoch = w1.epoch
        async with RouterRig(w0, w1) as rig:
            await until(lambda: w0.num_sessions >= 3)
            await rig.generate("hello", 3)

            assert not w0.submits


async def test_a_worker_of_another_model_or_role_is_not_dialled() -> None:
    async with FakeDecode() as worker, RouterRig() as rig:
        rig.peers = [replace(worker.record, model="other"), replace(worker.record, role=Role.PREFILL)]
        for _ in range(3):
            rig.loop.look()

        assert worker.num_sessions == 0
        assert not rig.loop.policy.usable
