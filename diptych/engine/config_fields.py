"""Typed reading of a JSON object's fields; errors name the file, the field and what was expected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.domain.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a JSON file. A field that is null counts as absent. All methods raise Unsupported."""

    path: Path
    content: dict[str, object]
    prefix: str = ""

    def get(self, name: str, default: object = None) -> object:
        """The raw value."""
        value = self.content.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.unsupported(name, value, "a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.unsupported(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; absent is false."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.unsupported(name, value, "true or false")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A list of strings; absent is empty."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.unsupported(name, value, "a list of names")
        return tuple(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; absent is empty."""
        value = self.get(name, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
            raise self.unsupported(name, value, "a token id or a list of token ids")
        return tuple(items)

    def inner(self, name: str) -> Fields | None:
        """An inner object, None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.unsupported(name, value, "an object")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def unsupported(self, name: str, found: object, served: str) -> Unsupported:
        """The error for a field whose value is not served."""
        shown = "missing" if found is None else repr(found)[:100]
        return Unsupported(f"{self.path}: {self.prefix}{name} is {shown}; served: {served}")
