"""What the router knows of the model that it serves: its name, its tokenizer and its chat template. No
weights."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine import catalog
from diptych.text.chat import ChatTemplate, load_chat_template
from diptych.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Immutable; used from several threads."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None


def load_model(model: str, name: str = "") -> ServedModel:
    """Finds the model's files and reads them; blocks. `name`: what it is served as, where not its own.

    Raises InvalidField for a model that is not there, Unsupported for a file that is torn or of another kind.
    """
    ref = catalog.resolve(model)
    return ServedModel(name or ref.name, load_tokenizer(ref.path), load_chat_template(ref.path))
