"""Tokenizers: text is bytes, control tokens are out of its reach, and ids are llama.cpp's."""

import json
from pathlib import Path

import gguf
import pytest
import tokenizers

from diptych.domain.errors import InvalidField, Unsupported
from diptych.engine.gguf_tokenizer import build_tokenizer
from diptych.text.hf_tokenizer import HfTokenizer
from diptych.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from tests.support.tiny_gguf import CONTROL, vocabulary, write_sentencepiece
from tests.support.tiny_model import tiny_directory

IDS = json.loads((Path(__file__).parent.parent / "data" / "llamacpp_ids.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def tiny(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("spm")
    write_sentencepiece(directory / "spm.gguf")
    fields = {name: f.contents() for name, f in gguf.GGUFReader(directory / "spm.gguf").fields.items()}
    build_tokenizer(fields, "spm").save(str(directory / "tokenizer.json"))
    return HfTokenizer(directory)


def test_bytes_are_ids() -> None:
    toy = load_tokenizer("toy")
    assert isinstance(toy, ByteTokenizer)
    assert toy.encode("a😀") == [97, 0xF0, 0x9F, 0x98, 0x80]
    assert toy.decode([97, 256, 0xF0, 0x9F, 0x98, 0x80, 300]) == "a😀"
    assert toy.decode([0xF0, 0x9F]) == "\ufffd"
    assert (toy.vocab_size, toy.eos_ids, toy.bos_ids) == (257, {256}, ())
    assert [toy.token_bytes(i) for i in (0, 255, 256, 257, -1)] == [b"\0", b"\xff", b"", b"", b""]


def test_text_never_yields_a_control_token(tiny: Tokenizer) -> None:
    assert tiny.control_ids == {"<|end|>": 0, "<|start|>": 1}
    for text in (*CONTROL, "a<|end|>b", "<|start|><|end|>", " <|end|> "):
        ids = tiny.encode(text)
        assert not set(ids) & set(tiny.control_ids.values())
        assert tiny.decode(ids) == text


def test_what_a_token_adds(tiny: Tokenizer) -> None:
    tokens = vocabulary()
    assert tiny.vocab_size == len(tokens)
    assert tiny.token_bytes(tokens.index("Ġthe")) == b" the"
    assert tiny.token_bytes(tokens.index("Ċ")) == b"\n"
    assert tiny.token_bytes(0) == b""
    assert tiny.token_bytes(tiny.vocab_size) == tiny.token_bytes(-1) == b""
    assert {tiny.token_bytes(i) for i in range(2, 258)} == {bytes((b,)) for b in range(256)}


def test_a_lone_surrogate_is_refused(tiny: Tokenizer) -> None:
    for tokenizer in (tiny, ByteTokenizer()):
        with pytest.raises(InvalidField, match="text: is not Unicode: a lone surrogate at character 2"):
            tokenizer.encode("ab\ud83d")


def test_the_digest_tells_tokenizers_apart(
    directory: Path, tiny: Tokenizer, sentencepiece: Tokenizer
) -> None:
    assert HfTokenizer(directory).digest == tiny.digest
    digests = {tiny.digest, sentencepiece.digest, ByteTokenizer().digest}
    assert {len(d) for d in digests} == {16}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [0, 5]}, "config.json": {"eos_token_id": 7}}, {0, 5}),
        ({"config.json": {"eos_token_id": 7}}, {7}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": None}}, set()),
        ({"tokenizer_config.json": {"eos_token": "<|end|>"}}, {0}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|start|>"}}}, {1}),
    ],
)
def test_what_ends_a_sequence(
    directory: Path, tmp_path: Path, files: dict[str, object], expected: set[int]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert HfTokenizer(tmp_path).eos_ids == expected


def test_bos_comes_from_the_post_processor(tiny: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert tiny.bos_ids == ()
    assert sentencepiece.bos_ids == (1,)


@pytest.mark.parametrize(("text", "ids"), list(zip(IDS["texts"], IDS["sentencepiece"], strict=True)))
def test_sentencepiece_ids_are_llama_cpps(sentencepiece: Tokenizer, text: str, ids: list[int]) -> None:
    assert sentencepiece.encode(text) == ids
    # SentencePiece puts a space before the text, and its decoder can't know that it is none of the text's.
    assert sentencepiece.decode(ids) == (f" {text}" if text else "").replace("▁", " ")


def test_stored_truncation_and_padding_are_ignored(directory: Path, tmp_path: Path) -> None:
    stored = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    stored.enable_truncation(4)
    stored.enable_padding(length=8, pad_id=0, pad_token="<|end|>")
    stored.save(str(tmp_path / "tokenizer.json"))
    assert (
        HfTokenizer(tmp_path).decode(HfTokenizer(tmp_path).encode("longer than four")) == "longer than four"
    )
    assert len(HfTokenizer(tmp_path).encode("a")) == 1


def test_errors_name_the_file(tmp_path: Path, directory: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(Unsupported, match=r"tokenizer\.json: can't be read: No such file"):
        HfTokenizer(tmp_path)
    whole = (directory / "tokenizer.json").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Unsupported, match=r"tokenizer\.json: torn, or not a tokenizer"):
        HfTokenizer(tmp_path)
    other = json.loads(whole)
    other["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(other))
    with pytest.raises(Unsupported, match=r"decoder \['WordPiece'\] is not served"):
        HfTokenizer(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(Unsupported, match=r"generation_config\.json: torn, or not JSON"):
        HfTokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(Unsupported, match=r"generation_config\.json: eos_token_id is \['x'\]"):
        HfTokenizer(tmp_path)
