"""The default model, fetched and converted for real: ids and numbers are llama.cpp's.

What llama.cpp said was recorded once (`tests/data/llamacpp_*.json` say how). transformers computes on the
directory that our converter made, so that a wrong row order, scale, name or cut would show as other text.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from diptych.engine import catalog
from diptych.engine.catalog import ModelRef
from diptych.text.chat import ChatMessage, encode_chat, load_chat_template
from diptych.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

DATA = Path(__file__).parent.parent / "data"
IDS = json.loads((DATA / "llamacpp_ids.json").read_text(encoding="utf-8"))
TEXT = json.loads((DATA / "llamacpp_text.json").read_text(encoding="utf-8"))
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def found() -> ModelRef:
    return catalog.resolve(catalog.DEFAULT)


@pytest.fixture(scope="module")
def tokenizer(found: ModelRef) -> Tokenizer:
    return load_tokenizer(found.path)


@pytest.fixture(scope="module")
def oracle(found: ModelRef) -> Any:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.float32).eval()


def test_ids_are_llama_cpps(tokenizer: Tokenizer) -> None:
    other = {text: tokenizer.encode(text) for text in IDS["texts"]}
    assert other == dict(zip(IDS["texts"], IDS["smollm"], strict=True))
    assert all(tokenizer.decode(ids) == text for text, ids in other.items())


def test_the_cut_before_merging_matters(tokenizer: Tokenizer) -> None:
    """The fixture can tell the cuts apart: with another one these ids would be wrong."""
    for cut in ("gpt-2", "llama-bpe"):
        other = dict(zip(IDS["texts"], IDS[cut], strict=True))
        assert sum(tokenizer.encode(text) != ids for text, ids in other.items()) >= 3


def test_chats_are_llama_cpps(found: ModelRef, tokenizer: Tokenizer) -> None:
    template = load_chat_template(found.path)
    assert template is not None
    first = [ChatMessage("user", "What is 2+2?")]
    assert encode_chat(tokenizer, template, first) == IDS["chat_ids"][0]
    assert encode_chat(tokenizer, template, [ChatMessage("system", SYSTEM), *first]) == IDS["chat_ids"][0]
    second = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "  Zeilen\n    1\n"),
        ChatMessage("assistant", "Ja 😀"),
        ChatMessage("user", "42"),
    ]
    assert encode_chat(tokenizer, template, second) == IDS["chat_ids"][1]
    assert tokenizer.eos_ids == {2}
    assert tokenizer.bos_ids == ()


def test_other_programs_read_the_directory(found: ModelRef, tokenizer: Tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(found.path)
    messages = [{"role": "user", "content": "Hi 1234"}]
    template = load_chat_template(found.path)
    assert template is not None
    ours = encode_chat(tokenizer, template, [ChatMessage("user", "Hi 1234")])
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == ours
    assert theirs.encode("\n    1") == tokenizer.encode("\n    1")
    assert theirs.eos_token == "<|im_end|>"


@pytest.mark.parametrize("case", TEXT["greedy"], ids=lambda case: case["prompt"][:20])
def test_greedy_text_is_llama_cpps(
    found: ModelRef, tokenizer: Tokenizer, oracle: Any, case: dict[str, Any]
) -> None:
    # The bare library parses control tokens in text, as llama-completion does.
    ids = tokenizers.Tokenizer.from_file(str(found.path / "tokenizer.json")).encode(case["prompt"]).ids
    with torch.no_grad():
        output = oracle.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False,
            max_new_tokens=TEXT["max_tokens"],
        )[0, len(ids) :].tolist()  # fmt: skip
    assert tokenizer.decode(output) == case["text"]
    assert (output[-1] == 2) is case["ended"]


def test_perplexity_is_llama_cpps(tokenizer: Tokenizer, oracle: Any) -> None:
    expected = TEXT["perplexity"]
    context = expected["context"]
    ids = tokenizer.encode(expected["text"])
    windows = torch.tensor([ids[i : i + context] for i in range(0, len(ids) - context + 1, context)])
    with torch.no_grad():
        logits = oracle(windows).logits[:, context // 2 : -1]
    targets = windows[:, context // 2 + 1 :]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert float(loss.exp()) == pytest.approx(expected["value"], rel=1e-4)
