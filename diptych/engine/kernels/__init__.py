"""Fused CPU kernels over bf16 memory, compiled by numba. Only `diptych.engine.fused` imports this room.

Addresses are integers (`Tensor.data_ptr()`): a kernel trusts its caller in shapes, strides and lifetimes.
"""
