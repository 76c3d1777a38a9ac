"""Diptych: LLM inference with prefill and decode as separate services."""
