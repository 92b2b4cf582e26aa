"""Compiles an attention kernel for a GPU that is not here, as FP16 tensors of unit inner strides launch it."""

from __future__ import annotations

import warnings
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_POINTERS = {"lse": "*fp32", "partial": "*fp32", "counters": "*i32", "multiplier": "fp32", "tanh_factor": "fp32"}
_POINTERS |= dict.fromkeys(("block_table", "cu_seqlens_q", "seq_lens"), "*i32")
_POINTERS |= dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*fp16")
_UNIT_STRIDES = ("q_dim", "k_dim", "v_dim", "out_dim", "table_column")


def compile_kernel(
    kernel: Any, constants: dict[str, Any], capability: tuple[int, int], *, source: Any = ASTSource, **options: int
) -> Any:
    """source: of the kernel's language. options: num_warps, num_stages."""
    signature: dict[str, str] = {}
    values: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants or name in _UNIT_STRIDES:
            signature[name], values[(i,)] = "constexpr", constants.get(name, 1)
            continue
        signature[name] = _POINTERS.get(name, "i32")
        if signature[name].startswith("*") or (signature[name] == "i32" and not parameter.do_not_specialize):
            attributes[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notice about the default of fusing multiply and add
        return triton.compile(source(kernel, signature, values, attributes), target=target, options=options)
