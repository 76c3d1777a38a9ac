"""Bad bodies: each is refused with its field and its bound, quickly, and changes nothing for anybody else."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.domain.errors import CallerError, InvalidField, TooLarge, UnknownModel
from diptych.domain.sampling import SamplingParams
from diptych.rpc.status import from_rpc_error
from diptych.v1 import common_pb2, router_pb2
from diptych.v1.router_pb2_grpc import RouterStub
from services.router.model import ServedModel
from services.router.validate import Validator, read_params
from services.router.workers import Bounds
from tests.support.fake_decode import FakeDecode, expected_output, until
from tests.support.router_rig import MODEL, RouterRig, tokens_of

Edit = Callable[[router_pb2.GenerateRequest], object]

NAN, INF = float("nan"), float("inf")


def params(**values: object) -> Edit:
    def edit(request: router_pb2.GenerateRequest) -> None:
        request.params.MergeFrom(common_pb2.SamplingParams(**values))  # type: ignore[arg-type]

    return edit


def ids(*values: int) -> Edit:
    def edit(request: router_pb2.GenerateRequest) -> None:
        request.token_ids.ids.extend(values)
        request.token_ids.SetInParent()

    return edit


def chat(*messages: tuple[str, str]) -> Edit:
    def edit(request: router_pb2.GenerateRequest) -> None:
        request.chat.SetInParent()
        for role, content in messages:
            request.chat.messages.add(role=role, content=content)

    return edit


def set_field(name: str, value: object) -> Edit:
    return lambda request: setattr(request, name, value)


# 8192 positions of context, 10,000 tokens of pool of which 60 % are 6,000; max_prompt_bytes is 20,000.
BAD: list[tuple[str, Edit, str, str]] = [
    ("no input", lambda r: r.ClearField("prompt"), "input", "one of prompt, chat and token_ids"),
    ("empty prompt", set_field("prompt", ""), "prompt", "must not be empty"),
    (
        "prompt too long in bytes",
        set_field("prompt", "é" * 10_001),
        "prompt",
        "at most 20000 bytes, has 20002",
    ),
    ("prompt past the share", set_field("prompt", "x" * 6000), "prompt", "6008 is past 6000 tokens, 60% of"),
    (
        "prompt past the context",
        set_field("prompt", "x" * 8192),
        "prompt",
        "8200 is past the context of 8192",
    ),
    (
        "output past the context",
        params(max_tokens=8190),
        "max_tokens",
        "8195 is past the context of 8192 tokens",
    ),
    (
        "output past the share",
        params(max_tokens=5996),
        "max_tokens",
        "5 tokens of prompt + 5996 of output = 6001",
    ),
    ("ids past the context", ids(*[1] * 9000), "token_ids", "9008 is past the context"),
    ("no ids", ids(), "token_ids", "must not be empty"),
    ("an id past the vocabulary", ids(1, 2, 257), "token_ids[2]", "from 0 to 256, is 257"),
    ("the largest id there is", ids(2**32 - 1), "token_ids[0]", "is 4294967295"),
    ("no messages", chat(), "messages", "at least one message"),
    ("an unknown role", chat(("tool", "x")), "messages[0].role", "one of system, user, assistant, is 'tool'"),
    ("a role as long as a book", chat(("x" * 9000, "x")), "messages[0].role", "must be one of"),
    ("too many messages", chat(*[("user", "")] * 4097), "chat.messages", "at most 4096 messages"),
    ("messages too long", chat(("user", "x" * 20_001)), "chat.messages", "at most 20000 bytes, has 20001"),
    ("a long conversation", chat(("user", "x" * 8300)), "chat", "is past the context"),
    ("no max_tokens", lambda r: r.params.ClearField("max_tokens"), "max_tokens", "must be given"),
    ("no params", lambda r: r.ClearField("params"), "max_tokens", "must be given"),
    ("max_tokens 0", params(max_tokens=0), "max_tokens", "must be from 1"),
    ("max_tokens past all", params(max_tokens=2**32 - 1), "max_tokens", "must be from 1 to"),
    ("temperature NaN", params(temperature=NAN), "temperature", "from 0 to 100, is nan"),
    ("temperature infinite", params(temperature=INF), "temperature", "is inf"),
    ("temperature negative", params(temperature=-0.1), "temperature", "from 0 to 100, is -0.1"),
    ("temperature 101", params(temperature=101.0), "temperature", "from 0 to 100, is 101"),
    ("top_p 0", params(top_p=0.0), "top_p", "above 0"),
    ("top_p NaN", params(top_p=NAN), "top_p", "is nan"),
    ("top_p 1.5", params(top_p=1.5), "top_p", "from 0 to 1, is 1.5"),
    ("top_p negative", params(top_p=-1.0), "top_p", "from 0 to 1, is -1"),
    ("top_k past the vocabulary", params(top_k=258), "top_k", "from 0 to 257, is 258"),
    ("min_p NaN", params(min_p=NAN), "min_p", "is nan"),
    ("min_p 2", params(min_p=2.0), "min_p", "from 0 to 1, is 2"),
    ("min_p negative", params(min_p=-INF), "min_p", "is -inf"),
    ("min_tokens past max_tokens", params(min_tokens=9), "min_tokens", "from 0 to 8, is 9"),
    ("an empty stop string", params(stop=["a", ""]), "stop[1]", "1 to 1024 characters, has 0"),
    ("a long stop string", params(stop=["x" * 1025]), "stop[0]", "has 1025"),
    ("too many stop strings", params(stop=["x"] * 17), "stop", "at most 16 strings, there are 17"),
    ("a stop id past the vocabulary", params(stop_token_ids=[300]), "stop_token_ids[0]", "is 300"),
    ("too many stop ids", params(stop_token_ids=[1] * 65), "stop_token_ids", "at most 64 ids, there are 65"),
    ("n 0", params(n=0), "n", "not served yet"),
    ("n 2", params(n=2), "n", "not served yet: only 1 is, not 2"),
    ("logprobs", params(logprobs=0), "logprobs", "not served yet"),
    (
        "presence_penalty",
        params(presence_penalty=0.5),
        "presence_penalty",
        "not served yet: only 0 is, not 0.5",
    ),
    ("frequency_penalty NaN", params(frequency_penalty=NAN), "frequency_penalty", "not served yet"),
    ("repetition_penalty 0", params(repetition_penalty=0.0), "repetition_penalty", "only 1 is, not 0"),
    ("a long tenant", set_field("tenant", "x" * 257), "tenant", "at most 256 characters, has 257"),
    ("a long label", set_field("label", "x" * 257), "label", "at most 256 characters"),
    ("a long salt", set_field("cache_salt", "é" * 257), "cache_salt", "at most 256 characters"),
]


def good() -> router_pb2.GenerateRequest:
    request = router_pb2.GenerateRequest(prompt="hello")
    request.params.max_tokens = 8
    return request


async def refusal(stub: RouterStub, request: router_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(request, timeout=20.0):  # type: ignore[attr-defined]
            pass
    return caught.value


async def test_every_bad_body_is_refused_beside_a_healthy_stream() -> None:
    async with FakeDecode(capacity_tokens=10_000, manual=True) as worker:
        async with RouterRig(worker, max_prompt_bytes=20_000) as rig:
            await rig.linked()
            healthy = asyncio.create_task(rig.generate("healthy", len(BAD)))
            await until(lambda: worker.running)
            async with grpc.aio.insecure_channel(rig.server.address) as channel:
                for name, edit, field, problem in BAD:
                    request = good()
                    edit(request)
                    status = await refusal(RouterStub(channel), request)
                    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{name}: {status}"
                    error = from_rpc_error(status)
                    assert isinstance(error, InvalidField), f"{name}: {error}"
                    assert error.field == field, name
                    assert problem in error.problem, name
                    worker.step()

            assert tokens_of(await healthy) == expected_output(b"healthy", len(BAD))
            assert len(worker.submits) == 1, "a bad body reached the worker"
            status = await rig.status()
            assert (status.num_live, status.num_finished) == (0, 1)


async def test_an_unknown_model_is_told_what_is_served() -> None:
    async with RouterRig() as rig, grpc.aio.insecure_channel(rig.server.address) as channel:
        request = good()
        request.model = "gpt-9"
        status = await refusal(RouterStub(channel), request)

        assert status.code() is grpc.StatusCode.NOT_FOUND
        assert isinstance(from_rpc_error(status), UnknownModel)
        assert status.details() == "'gpt-9' is not served here; served: 'toy'"


@pytest.mark.parametrize("num_bytes", [4 * 1024 * 1024, 5_000_000])
async def test_a_message_past_grpcs_own_bound_is_refused(num_bytes: int) -> None:
    async with FakeDecode() as worker, RouterRig(worker) as rig:
        async with grpc.aio.insecure_channel(rig.server.address) as channel:
            request = good()
            request.prompt = "x" * num_bytes
            status = await refusal(RouterStub(channel), request)
            assert isinstance(from_rpc_error(status), CallerError)
            assert status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        assert tokens_of(await rig.generate("hello", 2)) == expected_output(b"hello", 2)


async def test_a_request_that_came_before_any_worker_is_refused_by_the_first_it_does_not_fit() -> None:
    async with RouterRig() as rig:
        waiting = asyncio.create_task(rig.generate("hello", 100))
        await until(lambda: rig.loop.live)
        async with FakeDecode(capacity_tokens=100) as worker:
            rig.list(worker)
            with pytest.raises(TooLarge, match="105 tokens of prompt and output fit on no decode worker"):
                await waiting
            rig.list()
            await until(lambda: not worker.sessions)


def test_absent_fields_take_their_defaults() -> None:
    read = read_params(common_pb2.SamplingParams(max_tokens=3, n=1, repetition_penalty=1.0))
    assert read == SamplingParams(max_tokens=3, top_p=1.0, temperature=0.0, seed=read.seed)
    assert 0 <= read.seed < 1 << 63
    assert read_params(common_pb2.SamplingParams(max_tokens=3, seed=0)).seed == 0


async def test_the_three_inputs() -> None:
    bounds = Bounds(max_context=8192, share_tokens=6000, capacity_tokens=10_000)
    validator = Validator(MODEL, lambda: bounds, max_prompt_bytes=20_000, max_share=0.6)
    request = good()
    assert (await validator.check(request)).tokens == tuple(b"hello")
    ids(256, 0, 7)(request)
    assert (await validator.check(request)).tokens == (256, 0, 7)
    chat(("system", "be brief"), ("user", "hi"))(request)
    assert (await validator.check(request)).tokens == tuple(b"system: be brief\nuser: hi\nassistant: ")


async def test_a_request_of_exactly_the_bound_is_served() -> None:
    bounds = Bounds(max_context=6000, share_tokens=6000, capacity_tokens=10_000)
    validator = Validator(MODEL, lambda: bounds, max_prompt_bytes=5992, max_share=0.6)
    request = good()
    request.prompt = "x" * 5992
    assert len((await validator.check(request)).tokens) == 5992


async def test_a_model_without_a_template_takes_no_chat() -> None:
    model = ServedModel("plain", MODEL.tokenizer, None)
    validator = Validator(model, lambda: None, max_prompt_bytes=20_000, max_share=0.6)
    request = good()
    chat(("user", "hi"))(request)
    with pytest.raises(InvalidField, match="plain has no chat template"):
        await validator.check(request)


async def test_health_answers_while_long_prompts_are_tokenised() -> None:
    """Encoding runs in threads, two at a time; the loop goes on."""
    release, num_running, most = asyncio.Event(), 0, 0
    loop = asyncio.get_running_loop()

    class Slow:
        vocab_size, eos_ids, bos_ids = 257, frozenset({256}), ()

        def encode(self, text: str) -> list[int]:
            nonlocal num_running, most
            num_running += 1
            most = max(most, num_running)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20.0)
            num_running -= 1
            return [1]

    validator = Validator(
        ServedModel("toy", Slow(), None),  # type: ignore[arg-type]
        lambda: None,
        max_prompt_bytes=1 << 20,
        max_share=0.6,
    )
    async with RouterRig() as rig, grpc.aio.insecure_channel(rig.server.address) as channel:
        request = good()
        request.prompt = "x" * 100_000
        checks = [asyncio.create_task(validator.check(request)) for _ in range(6)]
        await until(lambda: num_running == 2)
        for _ in range(20):
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=20.0
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        release.set()
        await asyncio.gather(*checks)

    assert most == 2
