"""Packed weights compute what plain ones do, and are only used where they work."""

from __future__ import annotations

import pytest
import torch

from diptych.engine import linear
from diptych.engine.linear import can_pack, packed, plain

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_equals_plain(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    if not can_pack("cpu", dtype):  # then runners use plain weights, and there is nothing to compare
        assert linear.packed is packed
        return
    weight = torch.randn(40, 64).to(dtype)
    bias = torch.randn(40).to(dtype) if has_bias else None
    x = torch.randn(rows, 64).to(dtype)
    with torch.inference_mode():
        found, expected = packed(weight, bias)(x), plain(weight, bias)(x)
    torch.testing.assert_close(found, expected, atol=0.1 if dtype is torch.bfloat16 else 1e-4, rtol=1e-2)


def test_nothing_is_packed_for_another_device() -> None:
    assert not can_pack("cuda", torch.bfloat16)


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), AttributeError("no such operator")])
def test_nothing_is_packed_where_the_operators_fail(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(linear, "packed", failing)
    assert not can_pack("cpu", torch.bfloat16)
