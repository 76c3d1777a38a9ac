"""From a client's message to a request that may be served, or an error that names the field and its bound.

Nothing after this file looks at what the client wrote. Cheap checks come first: no prompt is tokenised that
is too long in bytes or whose other fields are wrong. A long prompt is tokenised in a thread, two at a time,
so that the loop goes on answering; its length in tokens is then held against what the decode workers allow.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from diptych.domain.errors import InvalidField, UnknownModel
from diptych.domain.hashing import chunk_hashes
from diptych.domain.ids import BlockHash, ChunkHash, Tenant
from diptych.domain.sampling import SamplingParams
from diptych.text.chat import ChatMessage, encode_chat
from diptych.text.tokenizer import unicode_bytes
from diptych.v1 import common_pb2, router_pb2
from services.router.model import ServedModel
from services.router.requests import CheckedRequest
from services.router.workers import Bounds

SHORT_PROMPT_BYTES: Final = 2048
"""Up to here tokenising takes well under a millisecond: not worth a thread."""

MAX_NAME_CHARS: Final = 256
MAX_MESSAGES: Final = 4096

_NEUTRAL: Final = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Fields that are not served yet, and the one value that asks for nothing."""


class Validator:
    """Checks requests for one model. `bounds`: what the decode workers allow now; None while none is
    known."""

    def __init__(
        self,
        model: ServedModel,
        bounds: Callable[[], Bounds | None],
        *,
        max_prompt_bytes: int,
        max_share: float,
    ) -> None:
        self._model = model
        self._bounds = bounds
        self._max_prompt_bytes = max_prompt_bytes
        self._max_share = max_share
        self._threads = asyncio.Semaphore(2)

    async def check(self, request: router_pb2.GenerateRequest) -> CheckedRequest:
        """Raises InvalidField or UnknownModel."""
        self._check_model(request.model)
        for field in ("tenant", "label", "cache_salt"):
            length = len(getattr(request, field))
            if length > MAX_NAME_CHARS:
                raise InvalidField(field, f"must have at most {MAX_NAME_CHARS} characters, has {length}")
        params = read_params(request.params)
        params.check(self._model.tokenizer.vocab_size)
        num_bytes = self._check_input(request)
        if num_bytes <= SHORT_PROMPT_BYTES:
            tokens, prefix = self._read_input(request)
        else:
            async with self._threads:
                tokens, prefix = await asyncio.to_thread(self._read_input, request)
        self._check_room(request.WhichOneof("input") or "input", len(tokens), params.max_tokens)
        return CheckedRequest(
            tokens,
            params,
            Tenant(request.tenant),
            request.label,
            request.priority,
            request.cache_salt,
            prefix,
        )

    def _check_model(self, name: str) -> None:
        if name and name != self._model.name:
            raise UnknownModel(f"{name[:MAX_NAME_CHARS]!r} is not served here; served: {self._model.name!r}")

    def _check_input(self, request: router_pb2.GenerateRequest) -> int:
        """What can be said of the input without tokenising it. Gives its length in bytes."""
        match request.WhichOneof("input"):
            case "prompt":
                num_bytes = len(unicode_bytes(request.prompt, "prompt"))
                if not num_bytes:
                    raise InvalidField("prompt", "must not be empty")
                self._check_bytes("prompt", num_bytes)
                return num_bytes
            case "chat":
                return self._check_chat(request.chat)
            case "token_ids":
                self._check_ids(request.token_ids.ids)
                return 4 * len(request.token_ids.ids)
            case _:
                raise InvalidField("input", "one of prompt, chat and token_ids must be given")

    def _check_chat(self, chat: router_pb2.Chat) -> int:
        if self._model.template is None:
            raise InvalidField("chat", f"{self._model.name} has no chat template; send prompt or token_ids")
        if len(chat.messages) > MAX_MESSAGES:
            raise InvalidField(
                "chat.messages", f"at most {MAX_MESSAGES} messages, there are {len(chat.messages)}"
            )
        num_bytes = sum(len(message.content.encode()) for message in chat.messages)
        self._check_bytes("chat.messages", num_bytes)
        return num_bytes

    def _check_bytes(self, field: str, num_bytes: int) -> None:
        if num_bytes > self._max_prompt_bytes:
            raise InvalidField(field, f"must have at most {self._max_prompt_bytes} bytes, has {num_bytes}")

    def _check_ids(self, ids: Sequence[int]) -> None:
        vocab_size = self._model.tokenizer.vocab_size
        if not ids:
            raise InvalidField("token_ids", "must not be empty")
        if max(ids) >= vocab_size:
            i = next(i for i, token in enumerate(ids) if token >= vocab_size)
            raise InvalidField(f"token_ids[{i}]", f"must be from 0 to {vocab_size - 1}, is {ids[i]}")

    def _read_input(
        self, request: router_pb2.GenerateRequest
    ) -> tuple[tuple[int, ...], tuple[ChunkHash, ...]]:
        tokens = tuple(self._encode(request))
        return tokens, tuple(chunk_hashes(prefix_root(request.tenant, request.cache_salt), tokens))

    def _encode(self, request: router_pb2.GenerateRequest) -> list[int]:
        tokenizer = self._model.tokenizer
        match request.WhichOneof("input"):
            case "prompt":
                return [*tokenizer.bos_ids, *tokenizer.encode(request.prompt)]
            case "chat":
                assert self._model.template is not None
                messages = [ChatMessage(m.role, m.content) for m in request.chat.messages]
                tokens = encode_chat(tokenizer, self._model.template, messages)
                if not tokens:
                    raise InvalidField("chat", "comes out empty of the model's chat template")
                return tokens
            case _:
                return list(request.token_ids.ids)

    def _check_room(self, field: str, num_prompt: int, max_tokens: int) -> None:
        """Context and M13's share, of the decode worker that allows most."""
        bounds = self._bounds()
        if bounds is None:
            return
        need = num_prompt + max_tokens
        asked = f"{num_prompt} tokens of prompt + {max_tokens} of output = {need}"
        pool = f"{self._max_share:.0%} of a decode worker's pool of {bounds.capacity_tokens}"
        for most, what in (
            (bounds.max_context, f"the context of {bounds.max_context} tokens"),
            (bounds.share_tokens, f"{bounds.share_tokens} tokens, {pool}"),
        ):
            if need > most:
                raise InvalidField(field if num_prompt >= most else "max_tokens", f"{asked} is past {what}")


def prefix_root(tenant: str, cache_salt: str) -> BlockHash:
    """What the router's hashes of prefixes begin with: equal only for the same tenant and salt."""
    return BlockHash(hashlib.blake2b(repr((tenant, cache_salt)).encode(), digest_size=16).digest())


def read_params(message: common_pb2.SamplingParams) -> SamplingParams:
    """The message's fields, defaults for those that are not there. Raises InvalidField for what is not served
    yet.

    A seed is minted where there is none: 63 random bits.
    """
    if not message.HasField("max_tokens"):
        raise InvalidField("max_tokens", "must be given: 1 or more")
    for field, neutral in _NEUTRAL.items():
        if message.HasField(field) and getattr(message, field) != neutral:  # type: ignore[arg-type]  # a name of it
            raise InvalidField(
                field, f"is not served yet: only {neutral:g} is, not {getattr(message, field):g}"
            )
    if message.HasField("logprobs"):
        raise InvalidField("logprobs", "is not served yet: leave it out")
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
    )
