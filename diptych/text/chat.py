"""Chat messages to ids through a model's own template, in which no client's word becomes a control token.

A template is a Jinja program that writes control tokens as text ("<|im_start|>"). After rendering, such text
must be cut out and mapped to its id, but only where the *template* wrote it. So before rendering, marks (two
characters that occur nowhere in the messages, the template or the vocabulary's control tokens) are put into
every message:

    a *veto* before each place where a control token's text starts:       "a<|end|>b"  ->  "aV<|end|>b"
    a *wall* at an end that could complete one with what stands beside:   "nd|>" -> "Wnd|>", "<|e" -> "<|eW"

After rendering, control tokens are cut out where no veto stands before and no mark in them, and the marks are
dropped from the rest. Ordinary messages carry no mark, so that a template may trim, split or search them as
it likes. The template runs once, in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diptych.domain.errors import InvalidField, Unsupported
from diptych.text.model_json import read_json, token_text
from diptych.text.tokenizer import TOY, Tokenizer, unicode_bytes

ROLES = ("system", "user", "assistant")

TOY_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. `role` is one of ROLES."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template and the token names it may use (`bos_token`, `eos_token`)."""

    source: str
    names: tuple[tuple[str, str], ...] = ()
    compiled: jinja2.Template = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises Unsupported for a template that is not Jinja."""
        try:
            object.__setattr__(self, "compiled", _ENVIRONMENT.from_string(self.source))
        except jinja2.TemplateSyntaxError as error:
            raise Unsupported(f"chat template, line {error.lineno}: {error.message}") from None


def load_chat_template(model: str | Path) -> ChatTemplate | None:
    """The template of a model directory, or the toy's for "toy". None where the model has none.

    Raises Unsupported, naming the file, for one that is torn or not Jinja.
    """
    if str(model) == TOY:
        return ChatTemplate(TOY_TEMPLATE)
    config = read_json(Path(model) / "tokenizer_config.json")
    source = config.get("chat_template")
    own_file = Path(model) / "chat_template.jinja"
    if own_file.is_file():
        source = own_file.read_text(encoding="utf-8")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        return None
    texts = {
        name: token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    names = tuple((name, text) for name, text in texts.items() if text is not None)
    try:
        return ChatTemplate(source, names)
    except Unsupported as error:
        raise Unsupported(f"{model}: {error}") from None


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool = True,
) -> list[int]:
    """Ids of the conversation as the model was trained to read it.

    Raises InvalidField for an unknown role, text that is not Unicode, no messages at all, or a conversation
    that the template refuses.
    """
    check_messages(messages)
    controls = tokenizer.control_ids
    veto, wall = _free_characters(template, messages, controls)
    conversation = [{"role": m.role, "content": _marked(m.content, veto, wall, controls)} for m in messages]
    text = _render(template, conversation, add_generation_prompt)
    if not controls:
        return tokenizer.encode(text)
    ids: list[int] = []
    # Longest first: where one control token's text begins with another's, the longer one is meant.
    written = "|".join(re.escape(c) for c in sorted(controls, key=len, reverse=True))
    for i, part in enumerate(re.split(f"(?<!{veto})({written})", text)):
        if i % 2:
            ids.append(controls[part])
        elif part:
            plain = part.replace(veto, "").replace(wall, "")
            ids.extend(tokenizer.encode(plain, continues=i > 0))
    return ids


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidField for what no template could take."""
    if not messages:
        raise InvalidField("messages", "must hold at least one message, is empty")
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidField(
                f"messages[{i}].role", f"must be one of {', '.join(ROLES)}, is {message.role[:40]!r}"
            )
        unicode_bytes(message.content, f"messages[{i}].content")


def _render(template: ChatTemplate, conversation: list[dict[str, str]], add_generation_prompt: bool) -> str:
    try:
        return template.compiled.render(
            messages=conversation, add_generation_prompt=add_generation_prompt, tools=None, documents=None,
            **dict(template.names),
        )  # fmt: skip
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise InvalidField("messages", f"the model's chat template refuses them: {error}") from None


def _free_characters(
    template: ChatTemplate, messages: Sequence[ChatMessage], controls: Iterable[str]
) -> tuple[str, str]:
    """Two characters that nobody uses: the first free ones of the private use areas."""
    names = (text for _, text in template.names)
    taken = set(template.source).union(*controls, *names, *(m.content for m in messages))
    areas = chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
    free = (chr(code) for code in areas if chr(code) not in taken)
    first, second = next(free, None), next(free, None)
    if first is None or second is None:
        raise InvalidField("messages", "use every private use character of Unicode")
    return first, second


def _marked(content: str, veto: str, wall: str, controls: Iterable[str]) -> str:
    """`content` such that no control token can be read out of it, nor out of it and what is written
    beside."""
    starts = "|".join(re.escape(control) for control in controls)
    if not starts:
        return content
    core = content.strip()  # templates like to trim
    if not core:
        return content
    lead = content.index(core)
    before, after = content[:lead], content[lead + len(core) :]
    left = wall if any(_continues(core, control) for control in controls) else ""
    right = wall if any(_begins(core, control) for control in controls) else ""
    return before + left + re.sub(f"(?={starts})", veto, core) + right + after


def _continues(text: str, control: str) -> bool:
    """Whether `text`, after some beginning of `control`, would complete or continue it."""
    rests = (control[cut:] for cut in range(1, len(control)))
    return any(text.startswith(rest) or rest.startswith(text) for rest in rests)


def _begins(text: str, control: str) -> bool:
    """Whether `text` ends with a beginning of `control`."""
    return any(text.endswith(control[:cut]) for cut in range(1, len(control)))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As templates expect it: not HTML-escaped."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    """As Hugging Face's, whose templates these are. No clock: a prompt's prefix should not change with the
    day."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


_ENVIRONMENT = _environment()
