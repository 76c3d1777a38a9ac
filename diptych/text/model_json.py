"""The small JSON files that lie beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diptych.domain.errors import Unsupported


def read_json(path: Path) -> dict[str, Any]:
    """An object from a model's JSON file; empty where the file is missing. Raises Unsupported for a torn
    one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Unsupported(f"{path}: torn, or not JSON ({error})") from None
    if not isinstance(value, dict):
        raise Unsupported(f"{path}: not a JSON object")
    return value


def token_text(entry: object) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that holds it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
