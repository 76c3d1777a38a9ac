"""Small GGUF files for tests: a random Llama with a byte-level vocabulary, and a SentencePiece vocabulary
alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
CONTROL = ["<|end|>", "<|start|>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "Ġ a"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
Weights = Mapping[str, NDArray[np.float32]]


def vocabulary() -> list[str]:
    """Control tokens, the 256 characters of GPT-2's byte alphabet, and what the merges make."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = range(256, 256 + 256 - len(printable))
    return [*CONTROL, *map(chr, printable), *map(chr, others), *(m.replace(" ", "") for m in MERGES)]


def random_weights(
    seed: int, *, tied: bool = True, hidden: int = HIDDEN, ffn: int = FFN, heads: int = HEADS
) -> Weights:
    """Tensors by GGUF name, rows in Hugging Face's order."""
    draw = np.random.default_rng(seed)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return draw.normal(0, 0.1, shape).astype(np.float32)

    weights = {
        "token_embd.weight": matrix(len(vocabulary()), hidden),
        "output_norm.weight": 1 + matrix(hidden),
    }
    if not tied:
        weights["output.weight"] = matrix(len(vocabulary()), hidden)
    for i in range(LAYERS):
        rows = {"attn_q": heads * HEAD_DIM, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM}
        weights |= {f"blk.{i}.{name}.weight": matrix(n, hidden) for name, n in rows.items()}
        weights[f"blk.{i}.attn_output.weight"] = matrix(hidden, heads * HEAD_DIM)
        weights |= {f"blk.{i}.{name}.weight": matrix(ffn, hidden) for name in ("ffn_gate", "ffn_up")}
        weights[f"blk.{i}.ffn_down.weight"] = matrix(hidden, ffn)
        weights |= {f"blk.{i}.{name}.weight": 1 + matrix(hidden) for name in ("attn_norm", "ffn_norm")}
    return weights


def interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of query and key rows: row i of a head's first half next to row i of its second."""
    size = len(rows) // heads
    order = [h * size + i + half for h in range(heads) for i in range(size // 2) for half in (0, size // 2)]
    return rows[order]


def write_llama(
    path: Path, weights: Weights, kind: str = "F32", fields: Mapping[str, Any] | None = None
) -> None:
    """A whole model; matrices in format `kind`, vectors in F32. `fields` replace metadata; None takes it
    away."""
    ffn, hidden = weights["blk.0.ffn_gate.weight"].shape
    heads = len(weights["blk.0.attn_q.weight"]) // HEAD_DIM
    metadata: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": ffn,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HEAD_DIM,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 5000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(vocabulary()) - len(CONTROL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
        **(fields or {}),
    }
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", "llama"))
    _add(writer, metadata)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, values in weights.items():
        if ".attn_q." in name or ".attn_k." in name:
            values = interleaved(values, heads if ".attn_q." in name else KV_HEADS)
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(name, gguf.quantize(values, quantised), raw_dtype=quantised)
    _finish(writer)


def write_sentencepiece(path: Path) -> None:
    """A vocabulary in the manner of Llama 2's: scores, byte fallback, a space before the text. No tensors."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3] + [6] * 256
    pieces = [
        "▁t",
        "er",
        "in",
        "▁a",
        "he",
        "▁the",
        "en",
        "on",
        "at",
        "▁H",
        "ll",
        "ell",
        "ello",
        "▁Hello",
        "or",
        "wor",
    ]
    pieces += ["▁wor", "ld", "▁world", "▁▁", "▁▁▁▁", "re", "ret", "urn", "▁ret", "▁return", "日本", "ing"]
    letters = set("▁abcdefghijklmnopqrstuvwxyzHTQWIBFD.,!?'0123456789()<>|_-=:/é日").union(*pieces)
    known = [*pieces, *sorted(letters)]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(known))]
    tokens += known
    types += [1] * len(known)
    writer = gguf.GGUFWriter(path, "llama")
    _add(
        writer,
        {
            "llama.block_count": 1,
            "llama.context_length": 128,
            "llama.embedding_length": 64,
            "llama.feed_forward_length": 64,
            "llama.attention.head_count": 4,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        },
    )
    _finish(writer)


def _add(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
