"""Finds collectives that a piece issues by other means than its group.

Such a collective runs on the compute stream while another piece's runs on the communication stream; whichever of them
a rank's device takes first, another rank's may take last, and both wait for ever or read each other's data.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey, _dispatch_keys, _dispatch_keyset_full_after
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from tpoverlap.errors import UnsupportedError

# torch's own: torch.distributed, functional collectives, symmetric memory, DTensor.
_COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"}
)
_LOCAL_OPERATORS = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})
# Nothing in them communicates, so that their calls need not be looked into.
_PLAIN_NAMESPACES = frozenset({"aten", "prims", "prim"})
_BELOW_PYTHON = _dispatch_keyset_full_after(DispatchKey.Python)


def foreign_collective_watch(operators: Collection[str] = ()) -> ForeignCollectiveWatch:
    """A watch of one thread; see there."""
    return (_beside_compiled_code() if "torch._dynamo" in sys.modules else ForeignCollectiveWatch)(operators)


class ForeignCollectiveWatch(TorchDispatchMode):
    """Sees every operator that its thread dispatches, and raises UnsupportedError in place of a foreign collective.

    Found are torch's collectives wherever they are called, also deep inside a custom operator and from a compiled
    graph, and the operators named in ``operators`` ("namespace::name"). What calls NCCL or a communicating kernel
    without torch's dispatcher must be named by the operator around it.

    It costs some 20 us of host time an operator, so it is for single batches.
    """

    supports_higher_order_operators = True

    def __init__(self, operators: Collection[str] = ()) -> None:
        super().__init__()
        self._operators = frozenset(operators)
        self._in_group = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code runs, and is compiled, as it would without this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, which takes over a second, at the first operator."""
        return False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In place of ``with watch``, whose flags are the process's: pieces do not leave in the order of entering."""
        _push_mode(self)
        try:
            yield
        finally:
            _pop_mode()

    @contextmanager
    def collective_of_the_group(self) -> Iterator[None]:
        """What is dispatched in here is the group's own."""
        self._in_group = True
        try:
            yield
        finally:
            self._in_group = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace = getattr(func, "namespace", "")
        if self._in_group or namespace in _PLAIN_NAMESPACES or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        name = func._schema.name
        if name in self._operators or (namespace in _COLLECTIVE_NAMESPACES and name not in _LOCAL_OPERATORS):
            raise UnsupportedError(
                f"{name} issues a collective that does not go through the executor's group, beside which other pieces "
                "communicate: call GroupCoordinator's collectives instead, or turn the fused operator off"
            )
        keys = None
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                keys = _dispatch_keys(leaf) if keys is None else keys | _dispatch_keys(leaf)
        if keys is None:
            return func(*args, **kwargs)
        # The kernel itself, with this mode on again for what it calls.
        _push_mode(self)
        try:
            return func.redispatch(keys & _BELOW_PYTHON, *args, **kwargs)
        finally:
            _pop_mode()


@functools.cache
def _beside_compiled_code() -> type[ForeignCollectiveWatch]:
    """A class that torch's compiler, once it is loaded, leaves alone where operators run beside a graph break."""
    return type(
        "ForeignCollectiveWatch",
        (ForeignCollectiveWatch,),
        {"__torch_dispatch__": torch.compiler.disable(ForeignCollectiveWatch.__torch_dispatch__)},
    )
