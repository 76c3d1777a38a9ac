"""Small model directories, as our converter makes them, for tests of what reads them."""

from pathlib import Path

from diptych.engine.convert import convert
from tests.support.tiny_gguf import random_weights, write_llama


def tiny_directory(parent: Path, name: str = "tiny", seed: int = 0) -> Path:
    """A random Llama with the byte-level vocabulary of `tiny_gguf`."""
    source = parent / f"{name}.gguf"
    write_llama(source, random_weights(seed))
    directory = parent / name
    directory.mkdir()
    convert(source, directory)
    return directory
