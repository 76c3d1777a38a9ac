"""Lua libraries: read from `functions/`, named by their content.

The name of a library and of each of its functions ends in a digest of the file. Two versions of Diptych can
therefore share a server during a rolling upgrade, and nobody can forget to raise a version.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

PLACEHOLDER = "__VERSION__"


@dataclass(frozen=True, slots=True)
class Library:
    """One file of Redis functions, ready for FUNCTION LOAD."""

    name: str
    version: str
    source: str

    @classmethod
    def read(cls, name: str) -> Library:
        """The library in `functions/{name}.lua`."""
        text = (files("diptych.store") / "functions" / f"{name}.lua").read_text(encoding="utf-8")
        version = "_" + hashlib.sha256(text.encode()).hexdigest()[:12]
        return cls(name, version, text.replace(PLACEHOLDER, version))

    def function(self, verb: str) -> str:
        """The full name that FCALL takes."""
        return f"diptych_{self.name}_{verb}{self.version}"
