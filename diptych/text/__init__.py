"""Text to token ids and back: tokenizers, chat templates, incremental decoding, stop strings. No torch, no
I/O beyond reading a model's tokenizer files.

One direction each: `chat.encode_chat` and `Tokenizer.encode` turn what a client says into ids, in which the
client's words are never control tokens; `Detokenizer` and `StopStrings` turn ids into text that is valid
UTF-8 at every cut.
"""
