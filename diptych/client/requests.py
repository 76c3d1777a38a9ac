"""From the arguments of `generate` to the router's message; the same for both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypedDict

from diptych.domain.errors import InvalidField
from diptych.v1 import common_pb2, router_pb2

DEFAULT_MAX_TOKENS: Final = 256

Message = Mapping[str, str]
"""`{"role": "user", "content": "…"}`"""


class Options(TypedDict, total=False):
    """What a request may say besides its input and its model. Names and meaning are vLLM's and OpenAI's."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    n: int
    logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    label: str
    priority: int
    cache_salt: str


_OF_REQUEST: Final = frozenset({"label", "priority", "cache_salt"})


def build_request(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: Options,
) -> router_pb2.GenerateRequest:
    """One of the three inputs, and options. Raises InvalidField for what the message can't carry; all other
    bounds are the router's to check.
    """
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise InvalidField("input", "give exactly one of prompt, messages and token_ids")
    request = router_pb2.GenerateRequest()
    if prompt is not None:
        _set(request, "prompt", prompt)
    elif messages is not None:
        request.chat.messages.extend(_message(i, message) for i, message in enumerate(messages))
        request.chat.SetInParent()
    else:
        _set(request.token_ids, "ids", token_ids)
        request.token_ids.SetInParent()
    request.params.max_tokens = DEFAULT_MAX_TOKENS
    for name, value in options.items():
        _set(request if name in _OF_REQUEST else request.params, name, value)
    return request


def _message(i: int, message: Message) -> router_pb2.ChatMessage:
    if set(message) != {"role", "content"}:
        raise InvalidField(f"messages[{i}]", f"has role and content, not {', '.join(map(str, message))}")
    try:
        return router_pb2.ChatMessage(role=message["role"], content=message["content"])
    except (TypeError, ValueError) as error:
        raise InvalidField(f"messages[{i}]", str(error)) from None


def _set(
    target: router_pb2.GenerateRequest | router_pb2.TokenIds | common_pb2.SamplingParams,
    name: str,
    value: object,
) -> None:
    if name not in target.DESCRIPTOR.fields_by_name:
        raise InvalidField(name, "is not an option of generate")
    # A string is a sequence too: stop="ab" must not become two stop strings.
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    try:
        if is_list:
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidField(name, str(error)) from None
