"""`diptych generate` and `diptych chat`: an answer as it comes, and in one line what it took."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import grpc
from rich.text import Text

from diptych.cli import figures
from diptych.cli.certificates import tls_from_environment
from diptych.cli.console import err, out, show_error, write
from diptych.cli.whereabouts import find_router
from diptych.client import Client, Finish, Generation, Trail
from diptych.client.requests import Message, Options
from diptych.domain.errors import DiptychError, InvalidField, PeerLost

HELP = "An empty line is not sent; /new forgets the conversation; Ctrl-C ends an answer, Ctrl-D the chat."


@contextlib.contextmanager
def router_at(given: str) -> Iterator[Client]:
    """A client of the router that was given or found, and errors that name it where it can't be reached."""
    with Client(find_router(given), tls=tls_from_environment()) as client:
        try:
            yield client
        except PeerLost as error:
            if isinstance(error.__cause__, grpc.RpcError):
                raise PeerLost(f"the router at {client.address} does not answer: {error}") from error
            raise


def read_prompt() -> str:
    """All of standard input. Raises InvalidField where that is not text."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField("prompt", f"standard input is not UTF-8 at byte {error.start}") from None


def answer_once(router: str, prompt: str, model: str, options: Options) -> None:
    """`diptych generate`."""
    with router_at(router) as client:
        finish = say(client.generate(prompt, model=model, **options), [])
    err.print(Text(summary(finish), "dim"), soft_wrap=True)


def chat_on(router: str, model: str, max_tokens: int, temperature: float) -> None:
    """`diptych chat`."""
    with router_at(router) as client:
        served = ", ".join(info.name for info in client.models()) or "no model yet"
        out.print(f"{served} at {client.address}. {HELP}", markup=False, soft_wrap=True)
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # `input` edits lines and remembers them once this is imported
        converse(client, model, max_tokens, temperature, lambda: input("> "))


def say(generation: Generation, said: list[str]) -> Finish:
    """Prints an answer as it comes and adds it to `said`. Leaving early, as by Ctrl-C, cancels it."""
    with generation:
        for piece in generation:
            said.append(piece.text)
            write(piece.text)
            if piece.finish:
                out.print()
                return piece.finish
    raise PeerLost("the answer has no end")


def summary(finish: Finish) -> str:
    """What an answer took, in one line."""
    trail = finish.trail
    parts = [
        f"{trail.num_output_tokens} tokens ({finish.reason})",
        f"TTFT {figures.milliseconds(trail.ttft_s)}",
        f"TPOT {figures.milliseconds(trail.tpot_s)}",
        _path(trail),
    ]
    return ", ".join(part for part in parts if part)


def _path(trail: Trail) -> str:
    if trail.path == "disaggregated":
        size = figures.size(trail.kv_bytes)
        return f"prefill on {trail.prefill_worker}, {size} of KV to {trail.decode_worker}"
    return f"all on {trail.decode_worker} ({trail.path_reason})" if trail.decode_worker else ""


def converse(
    client: Client, model: str, max_tokens: int, temperature: float, read_line: Callable[[], str]
) -> None:
    """A conversation until the end of input, or Ctrl-C at the prompt."""
    messages: list[Message] = []
    while True:
        try:
            line = read_line().strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if line == "/new":
            messages = []
        elif line:
            messages = _answered(client, model, max_tokens, temperature, [*messages, _message("user", line)])


def _answered(
    client: Client, model: str, max_tokens: int, temperature: float, messages: list[Message]
) -> list[Message]:
    """The conversation with its next answer, as far as that came; without the question where none came."""
    said: list[str] = []
    try:
        answer = client.generate(
            messages=messages, model=model, max_tokens=max_tokens, temperature=temperature
        )
        err.print(Text(summary(say(answer, said)), "dim"), soft_wrap=True)
    except KeyboardInterrupt:
        out.print()
        err.print(Text("cancelled", "dim"))
    except DiptychError as error:
        if said:
            out.print()
        show_error(error)
    text = "".join(said)
    return [*messages, _message("assistant", text)] if text else messages[:-1]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
