"""Models from the Hugging Face hub, or from whatever speaks like it (`HF_ENDPOINT`).

`huggingface_hub` fetches, resumes, checks and keeps the files in its own cache (`HF_HOME`), so that a model
other programs have fetched is not fetched again. Only what the engine reads is asked for.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from diptych.domain.errors import InvalidField, TransferFailed, Unsupported
from diptych.engine.progress import Progress

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
_IN_FOLDERS = "*/*"


def is_hub_id(model: str) -> bool:
    """Whether `model` reads as "org/name", with "@revision" or without."""
    return _ID.fullmatch(model) is not None


def snapshot(model: str, progress: Progress) -> Path:
    """The local directory of a hub model, fetched unless it is there.

    Raises InvalidField("model") when the hub does not know it or refuses it, TransferFailed when the hub
    can't be reached and the model is not here, Unsupported when it holds no safetensors.
    """
    # Its own import takes half a second, which a local model need not wait for.
    from huggingface_hub import errors, snapshot_download

    repo, _, revision = model.partition("@")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    progress(f"fetching {model} from {endpoint}", 0, 0)
    try:
        path = Path(
            snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=list(_FILES),
                ignore_patterns=[_IN_FOLDERS],
                endpoint=endpoint,
            )
        )
    except errors.GatedRepoError:
        raise InvalidField(
            "model", f"{model} is gated at {endpoint}: log in there, accept, set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InvalidField(
            "model", f"{model} is no directory here, and {endpoint} does not know it"
        ) from None
    except errors.RevisionNotFoundError:
        raise InvalidField("model", f"{repo} at {endpoint} has no revision {revision!r}") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError, ValueError) as error:
        raise TransferFailed(f"{model}: {endpoint} did not deliver it: {_first_line(error)}") from None
    if not any(path.glob("*.safetensors")):
        raise Unsupported(f"{model}: holds no safetensors, the only weights that are read from the hub")
    return path


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
