"""A model's name -> a local directory that the engine can load.

    "toy"                      the toy model; no files
    "smollm2-135m"             the default, fetched and converted at first use
    DIRECTORY                  config.json, tokenizer.json and safetensors, as Hugging Face lays them out
    FILE.gguf                  a Llama, converted once into the user's cache
    ORG/NAME[@REVISION]        from the Hugging Face hub

Imports no torch, and neither gguf nor safetensors: conversion is a process of its own, so that a router may
use this. A system resolves a name once and passes `path` on: a hub's branch may move between two looks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diptych.domain import errors
from diptych.domain.errors import DiptychError, Internal, InvalidField, Unsupported
from diptych.engine import hub, model_directory, wheel
from diptych.engine.model_cache import cache_dir, install
from diptych.engine.model_directory import weights_digest
from diptych.engine.progress import Progress, silent

__all__ = ["DEFAULT", "TOY", "ModelRef", "installed", "resolve", "weights_digest"]

DEFAULT = "smollm2-135m"
TOY = "toy"
_DEFAULT_DIRECTORY = "smollm2-135m-instruct"
_DEFAULT_NAMES = frozenset({DEFAULT, _DEFAULT_DIRECTORY, "default"})
_CONVERTER = "1"
"""Raise it when the converter's output changes: what older ones made is then made again."""


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model that is here. `path` is what `open_runner` and `load_tokenizer` take; Path("toy") for the
    toy."""

    name: str
    path: Path
    kind: Literal["toy", "hf"]


def resolve(model: str, progress: Progress = silent) -> ModelRef:
    """Finds `model`, fetching and converting what is missing, and checks that it is whole and served.

    Raises InvalidField("model") for a name or path that leads nowhere, Unsupported, naming the file, for
    one that is torn or of a kind that is not served, TransferFailed or DigestMismatch when fetching failed.
    """
    # os.path, unlike pathlib, answers "no" for names that no file could have.
    path = Path(os.path.expanduser(model))
    if model == TOY:
        return ModelRef(TOY, Path(TOY), "toy")
    if model in _DEFAULT_NAMES:
        directory = install(
            _DEFAULT_DIRECTORY,
            f"{_CONVERTER}:{wheel.SHA256}",
            lambda new: _convert(wheel.default_gguf(progress), new, progress),
        )
        return _checked(DEFAULT, directory)
    if path.suffix.lower() == ".gguf":
        return _checked(path.stem, _converted(path, progress))
    if model and os.path.isdir(path):
        return _checked(path.resolve().name, path.resolve())
    if model and os.path.exists(path):
        raise Unsupported(f"{path}: neither a model directory nor a .gguf file")
    if hub.is_hub_id(model):
        return _checked(model, hub.snapshot(model, progress))
    raise InvalidField(
        "model",
        f"{model[:200]!r} is no directory or .gguf file here, no hub id, and neither {DEFAULT} nor {TOY}",
    )


def installed() -> list[ModelRef]:
    """Models that were converted into the user's cache, by name, without looking whether they are whole."""
    names = {_DEFAULT_DIRECTORY: DEFAULT}
    found = sorted((cache_dir() / "models").glob("[!.]*/config.json"))
    return [ModelRef(names.get(p.parent.name, p.parent.name), p.parent, "hf") for p in found]


def _checked(name: str, directory: Path) -> ModelRef:
    model_directory.check(directory)
    return ModelRef(name, directory, "hf")


def _converted(source: Path, progress: Progress) -> Path:
    """Where the GGUF `source` lies converted. Its name carries its content, so that two versions don't
    meet."""
    if not os.path.isfile(source):
        raise InvalidField("model", f"{source}: no such file")
    digest = model_directory.file_digest(source).hex()
    name = f"{source.stem}-{digest[:12]}"
    return install(name, f"{_CONVERTER}:{digest}", lambda new: _convert(source, new, progress))


def _convert(source: Path, directory: Path, progress: Progress) -> None:
    """Runs the converter in its own process and re-raises what it raises."""
    command = [sys.executable, "-m", "diptych.engine.convert", str(source), str(directory)]
    failure: DiptychError | None = None
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            if "failure" in message:
                failure = getattr(errors, message["failure"])(message["message"])
            else:
                progress("converting", message["done"], message["total"])
        status = process.wait()
        log.seek(0)
        last_words = log.read().strip()[-400:]
    if failure is not None:
        raise failure
    if status != 0:
        raise Internal(f"{source}: the converter ended with {status}: {last_words}")
