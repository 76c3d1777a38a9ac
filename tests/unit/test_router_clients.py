"""Clients that cancel, go away, read slowly or come too many; and what the router tells of itself."""

import asyncio
import math
from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader

from diptych.client.aio import AsyncClient
from diptych.client.values import Piece
from diptych.domain.errors import DiptychError, Draining, InvalidField, Overloaded
from diptych.rpc.status import from_rpc_error
from diptych.v1 import router_pb2
from diptych.v1.router_pb2_grpc import RouterStub
from services.router.decisions import Reason
from services.router.requests import CheckedRequest
from services.router.server import REQUEST_ID
from services.router.validate import Validator
from tests.support.fake_decode import FakeDecode, expected_output, until
from tests.support.router_rig import RouterRig, tokens_of


@pytest.fixture
async def worker() -> AsyncIterator[FakeDecode]:
    async with FakeDecode(manual=True) as worker:
        yield worker


async def test_closing_the_call_cancels_on_the_worker_and_touches_nobody_else(worker: FakeDecode) -> None:
    async with RouterRig(worker) as rig:
        other = asyncio.create_task(rig.generate("other", 3))
        await until(lambda: worker.running)
        async with rig.stream("hello") as generation:
            await until(lambda: len(worker.running) == 2)
            worker.step()
            assert (await anext(generation)).tokens
        await until(lambda: worker.cancels == [generation.request_id])
        await until(lambda: len(rig.loop.live) == 1)
        worker.step()
        worker.step()

        assert tokens_of(await other) == expected_output(b"other", 3)
        assert (await rig.status()).fallbacks == {"client_gone": 1}


async def test_a_deadline_of_the_callers_cancels_as_well(worker: FakeDecode) -> None:
    async with RouterRig(worker) as rig:
        async with AsyncClient(rig.server.address, timeout_s=0.2) as client:
            with pytest.raises(Exception, match="Deadline Exceeded"):
                async for _ in client.generate("hello", max_tokens=8):
                    pass
        await until(lambda: worker.cancels)
        await rig.at_rest()


async def test_cancel_by_id_is_for_the_tenant_and_ends_with_abort(worker: FakeDecode) -> None:
    async with RouterRig(worker) as rig, AsyncClient(rig.server.address, tenant="acme") as acme:
        async with acme.generate("hello", max_tokens=8) as generation:
            await until(lambda: worker.running)
            worker.step()
            first = await anext(generation)
            assert not await rig.client.cancel(first.request_id), "another tenant's"
            assert not await acme.cancel("nobody")
            assert await acme.cancel(first.request_id)
            rest = [piece async for piece in generation]

        assert rest[-1].finish
        assert rest[-1].finish.reason == "abort"
        assert not await acme.cancel(first.request_id), "it has ended"
        assert worker.cancels == [first.request_id]


async def test_the_id_is_told_before_the_first_token(worker: FakeDecode) -> None:
    async with RouterRig(worker) as rig, grpc.aio.insecure_channel(rig.server.address) as channel:
        request = router_pb2.GenerateRequest(prompt="hello")
        request.params.max_tokens = 8
        call = RouterStub(channel).Generate(request)
        request_id = dict(await call.initial_metadata())[REQUEST_ID]
        assert await rig.client.cancel(str(request_id))

        last = [message async for message in call][-1]
        assert last.request_id == request_id


async def test_a_request_that_waits_is_cancelled_at_once() -> None:
    async with RouterRig() as rig:
        async with rig.stream("hello") as generation:
            waiting = asyncio.ensure_future(anext(generation))
            await until(lambda: rig.loop.live)
            (request_id,) = rig.loop.live
            assert await rig.client.cancel(request_id)
            piece = await waiting

        assert piece.finish
        assert piece.finish.reason == "abort"


async def test_a_worker_that_does_not_confirm_is_waited_for_only_so_long(worker: FakeDecode) -> None:
    worker.deaf = True
    async with RouterRig(worker, cancel_wait_s=0.2) as rig:
        async with rig.stream("hello"):
            await until(lambda: worker.running)
        await until(lambda: worker.cancels)
        await rig.at_rest()

        assert (await rig.status()).fallbacks == {"client_gone": 1, "cancel_unconfirmed": 1}


async def test_a_client_that_comes_back_late_gets_all_of_it() -> None:
    async with FakeDecode() as worker, RouterRig(worker) as rig, rig.stream("hello", 1000) as generation:
        first = await anext(generation)
        await until(lambda: rig.loop.num_finished == 1)
        rest = [piece async for piece in generation]

        assert tokens_of([first, *rest]) == expected_output(b"hello", 1000)


async def test_a_client_that_stays_too_slow_is_cancelled_and_holds_up_nobody() -> None:
    async with (
        FakeDecode(text_of=lambda token: "x" * 20_000) as worker,
        RouterRig(worker, slow_client_s=0.3) as rig,
    ):
        # Reads nothing after the first message; flow control then stops the router's writes.
        async with rig.stream("slow", 4000) as generation:
            await anext(generation)
            quick = await rig.generate("quick", 50)
            await until(lambda: rig.loop.policy.counters[Reason.SLOW_CLIENT] == 1)
            await rig.at_rest()

        assert tokens_of(quick) == expected_output(b"quick", 50)
        assert len(worker.cancels) == 1


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    async with RouterRig(max_queue=4) as rig:
        streams = [rig.stream(f"prompt {i}") for i in range(10)]
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await until(lambda: sum(future.done() for future in waiting) == 6)
        refused = [future.exception() for future in waiting if future.done()]
        assert all(isinstance(error, Overloaded) and error.retry_after_s > 0 for error in refused)
        assert (await rig.status()).num_live == 4

        async with FakeDecode() as worker:
            rig.list(worker)
            await asyncio.gather(*(future for future in waiting if not future.done()))
            for stream in streams:
                stream.close()
            await rig.at_rest()
            rig.list()
            await until(lambda: not worker.sessions)


async def test_two_hundred_requests_half_of_them_dropped_leave_nothing() -> None:
    async with FakeDecode("w0") as w0, FakeDecode("w1") as w1, RouterRig(w0, w1) as rig:
        await rig.linked()

        async def drop(prompt: str) -> None:
            async with rig.stream(prompt, 1000) as generation:
                await anext(generation)

        await asyncio.gather(*(drop(f"{i}") if i % 2 else rig.generate(f"{i}", 20) for i in range(200)))
        await rig.at_rest()

        loads = rig.loop.policy.loads()
        assert [loads.of(ref).num_requests for ref in rig.loop.policy.usable] == [0, 0]
        assert not w0.running
        assert not w1.running
        status = await rig.status()
        assert status.num_live == 0
        # A client that hears nothing for a second, because this process is busy with 200, calls again.
        assert status.num_finished >= 200


async def test_draining_finishes_streams_and_refuses_new_ones(worker: FakeDecode) -> None:
    async with RouterRig(worker) as rig:
        running = asyncio.create_task(rig.generate("hello", 2))
        await until(lambda: worker.running)
        draining = asyncio.create_task(rig.server.drain(20.0))

        async def refused() -> DiptychError:
            while True:
                try:
                    await rig.client.status()
                except DiptychError as error:
                    return error

        error = await asyncio.wait_for(refused(), 20.0)
        assert isinstance(error, Draining)
        assert error.retry
        worker.step()
        worker.step()
        assert tokens_of(await running) == expected_output(b"hello", 2)
        assert await draining


async def test_draining_is_bounded(worker: FakeDecode) -> None:
    async with RouterRig(worker) as rig, AsyncClient(rig.server.address, reattach_s=0.0) as client:

        async def generate() -> list[Piece]:
            return [piece async for piece in client.generate("hello", max_tokens=2)]

        running = asyncio.create_task(generate())
        await until(lambda: worker.running)
        assert not await rig.server.drain(0.1)

        with pytest.raises(Exception, match=r"CANCELLED|UNAVAILABLE|Cancelled"):
            await running
        assert await rig.loop.drain(20.0)
        assert len(worker.cancels) == 1


async def test_status_tells_of_workers_requests_and_times(worker: FakeDecode) -> None:
    async with RouterRig(worker) as rig:
        running = asyncio.create_task(rig.generate("hello", 3))
        await until(lambda: worker.running)
        assert (await rig.status()).num_live == 1
        for _ in range(3):
            worker.step()
        await running
        rig.store_available = False
        status = await rig.status()

        assert (status.router_id, status.num_live, status.num_finished) == ("router-0", 0, 1)
        assert not status.store_available
        assert 0 < status.tpot_p50_s < status.ttft_p50_s < 20.0
        (known,) = status.workers
        assert (known.worker_id, known.address, known.epoch) == ("decode-0", worker.address, worker.epoch)


async def test_models_tells_what_is_served(worker: FakeDecode) -> None:
    async with RouterRig() as rig:
        (model,) = await rig.client.models()
        assert (model.name, model.max_context, model.fingerprint) == ("toy", 0, "")
        rig.list(worker)
        await rig.linked()
        (model,) = await rig.client.models()
        assert (model.name, model.max_context, model.fingerprint) == ("toy", 8192, "fake")


async def test_a_plain_client_reads_the_retry_delay() -> None:
    async with RouterRig(max_queue=0) as rig, grpc.aio.insecure_channel(rig.server.address) as channel:
        request = router_pb2.GenerateRequest(prompt="hello")
        request.params.max_tokens = 8
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in RouterStub(channel).Generate(request):
                pass

        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(caught.value)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == 1.0


async def test_metrics_tell_of_the_same_requests(worker: FakeDecode) -> None:
    reader = InMemoryMetricReader()
    rig = RouterRig(worker)
    rig.readers = [reader]
    async with rig:
        worker.manual = False
        await rig.generate("hello", 3)
        async with rig.stream("gone", 1000) as generation:
            await anext(generation)
        await rig.at_rest()
        data = reader.get_metrics_data()

    assert data
    points = {
        metric.name: list(metric.data.data_points)
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    durations = {
        str(point.attributes["diptych.finish_reason"]): point.count
        for point in points["gen_ai.server.request.duration"]
        if isinstance(point, HistogramDataPoint) and point.attributes
    }
    assert durations == {"length": 1, "abort": 1}
    assert {"gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"} <= set(points)
    events = {
        str(point.attributes["diptych.event"]) for point in points["diptych.events"] if point.attributes
    }
    assert events == {"client_gone"}


async def test_a_quiet_request_gives_the_signs_of_life_that_were_asked_for(worker: FakeDecode) -> None:
    async with RouterRig(worker) as rig, grpc.aio.insecure_channel(rig.server.address) as channel:
        await rig.linked()
        request = router_pb2.GenerateRequest(prompt="hello", heartbeat_s=0.05)
        request.params.max_tokens = 2
        call = RouterStub(channel).Generate(request)
        messages = aiter(call)
        signs = [await anext(messages) for _ in range(4)]
        assert [(sign.request_id, sign.index, list(sign.tokens)) for sign in signs] == [
            (signs[0].request_id, 0, [])
        ] * 4
        assert signs[0].request_id
        assert signs[0].resume_token
        worker.step()
        worker.step()
        rest = [message async for message in messages]
        tokens = [token for message in rest for token in message.tokens]
        assert tokens == expected_output(b"hello", 2)
        assert rest[-1].HasField("finish")


async def test_nobody_gets_signs_of_life_who_did_not_ask(worker: FakeDecode) -> None:
    async with RouterRig(worker) as rig, grpc.aio.insecure_channel(rig.server.address) as channel:
        request = router_pb2.GenerateRequest(prompt="hello")
        request.params.max_tokens = 2
        call = RouterStub(channel).Generate(request)
        await until(lambda: worker.running)
        worker.step()
        worker.step()
        messages = [message async for message in call]
        assert all(message.tokens or message.HasField("finish") for message in messages)


async def test_a_request_that_is_being_looked_at_gives_signs_of_life_too(
    worker: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at, check = asyncio.Event(), Validator.check

    async def slow(self: Validator, request: router_pb2.GenerateRequest) -> CheckedRequest:
        await looked_at.wait()
        return await check(self, request)

    monkeypatch.setattr(Validator, "check", slow)
    async with RouterRig(worker) as rig, grpc.aio.insecure_channel(rig.server.address) as channel:
        request = router_pb2.GenerateRequest(prompt="", heartbeat_s=0.05)
        call = RouterStub(channel).Generate(request)
        assert [await call.read() for _ in range(3)] == [router_pb2.GenerateResponse()] * 3
        looked_at.set()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            while True:
                await call.read()
        assert isinstance(from_rpc_error(refused.value), InvalidField)


@pytest.mark.parametrize("heartbeat_s", [-1.0, 0.001, 1e9, math.nan, math.inf])
async def test_signs_of_life_have_bounds(worker: FakeDecode, heartbeat_s: float) -> None:
    async with RouterRig(worker) as rig, grpc.aio.insecure_channel(rig.server.address) as channel:
        call = RouterStub(channel).Generate(router_pb2.GenerateRequest(prompt="a", heartbeat_s=heartbeat_s))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        error = from_rpc_error(refused.value)
        assert isinstance(error, InvalidField)
        assert error.field == "heartbeat_s"
