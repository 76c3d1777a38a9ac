"""A GGUF's tokenizer as a Hugging Face `tokenizer.json`.

A GGUF holds vocabulary and merges, but only a *name* for how text is cut before merging
(`tokenizer.ggml.pre`). A wrong cut gives plausible ids that the model never saw in training, so that an
unknown name is refused, never guessed. The cuts are those of llama.cpp (`src/llama-vocab.cpp`); tests
compare ids with `llama-tokenize`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from diptych.domain.errors import Unsupported
from diptych.engine.gguf_config import Fields

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""`tokenizer.ggml.token_type`."""

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_PLAIN_BYTES = frozenset({"gpt-2", "mpt", "olmo"})
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})


def build_tokenizer(fields: Fields, source: str) -> Tokenizer:
    """The tokenizer of a GGUF. Raises Unsupported, naming `source`, for a kind that is not served."""
    if not fields.get("tokenizer.ggml.tokens"):
        raise Unsupported(f"{source}: holds no tokenizer (tokenizer.ggml.tokens)")
    try:
        return _build(fields, source)
    except Unsupported:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception, as for a merge of unknown tokens
        raise Unsupported(f"{source}: torn: its tokenizer makes no sense ({error!r})") from None


def _build(fields: Fields, source: str) -> Tokenizer:
    kind = fields.get("tokenizer.ggml.model")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    if kind == "gpt2":
        tokenizer = _byte_level(fields, tokens, source)
    elif kind == "llama":
        tokenizer = _sentencepiece(fields, tokens)
    else:
        raise Unsupported(f"{source}: tokenizer.ggml.model {kind!r} is not served (served: gpt2, llama)")
    for key in ("bos", "eos", "unknown", "padding"):
        if not 0 <= fields.get(f"tokenizer.ggml.{key}_token_id", 0) < len(tokens):
            raise Unsupported(f"{source}: torn: tokenizer.ggml.{key}_token_id is outside of the vocabulary")
    types: Sequence[int] = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    special = [t for t, k in zip(tokens, types, strict=True) if k in (_CONTROL, _UNKNOWN)]
    defined = [t for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in defined])
    _add_bos(tokenizer, fields, tokens, default=kind == "llama")
    return tokenizer


def _byte_level(fields: Fields, tokens: list[str], source: str) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre")
    cut: pre_tokenizers.PreTokenizer
    if pre in _SINGLE_DIGITS:
        cut = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in _PLAIN_BYTES:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _LLAMA3:
        words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
        cut = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        served = ", ".join(sorted(_SINGLE_DIGITS | _PLAIN_BYTES | _LLAMA3))
        raise Unsupported(f"{source}: tokenizer.ggml.pre {pre!r} is not served (served: {served})")
    merges = [_pair(merge) for merge in fields.get("tokenizer.ggml.merges") or []]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _LLAMA3))
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(fields: Fields, tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE stores scores; merges in their order choose the same pairs (best score first)."""
    scores: list[float] = fields["tokenizer.ggml.scores"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, str, str]] = []
    for token, i in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[i], i, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, _, left, right in ranked],
            unk_token=tokens[int(fields.get("tokenizer.ggml.unknown_token_id", 0))],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    strip: list[decoders.Decoder] = []
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        strip.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_bos(tokenizer: Tokenizer, fields: Fields, tokens: list[str], default: bool) -> None:
    if not fields.get("tokenizer.ggml.add_bos_token", default):
        return
    bos_id = int(fields["tokenizer.ggml.bos_token_id"])
    bos = tokens[bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
    )
