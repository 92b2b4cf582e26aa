"""Launching a Triton kernel at the cost of its driver call.

Triton's own launch binds and specializes every argument again at each call, which costs more than a small decode
takes. A :class:`FastLaunch` keeps the compiled kernel of one specialization and starts it directly.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from tpoverlap.cuda.triton_available import triton_interpreted


class FastLaunch:
    """One kernel with fixed constants, and with arguments that are always specialized alike.

    The owner keeps one for each device, combination of dtypes, value of the ints that Triton specializes and width of
    the others (those in ``do_not_specialize``), which are int32 where they fit and int64 elsewhere: a launcher may cut
    a wider int to the width of the first one. Pointers are specialized on 16-byte alignment. ``options`` are Triton's:
    num_warps, num_stages, launch_pdl.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: int | bool) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = options
        self._values = tuple(constants.values())
        self._compiled: Any = None
        from triton import knobs  # whoever imports this module may be without Triton; whoever makes a launch has it

        self._hooks = knobs.runtime

    def __call__(
        self, programs: int, tensors: Sequence[torch.Tensor], values: tuple[Any, ...], *, y: int = 1, z: int = 1
    ) -> None:
        """Launch programs x y x z programs on the current device and stream.

        The kernel's parameters are the tensors, then the values, then the constants. The tensors are on the current
        device, which is not checked: the driver would have to look up every address.
        """
        addresses = (*map(_address_of, tensors),)
        aligned = not functools.reduce(operator.or_, addresses) & 15
        compiled = self._compiled
        if compiled is None or not aligned:
            compiled = self._kernel[(programs, y, z)](*tensors, *values, **self._constants, **self._options)
            if aligned and not triton_interpreted():
                self._compiled = compiled
        elif _set(self._hooks.launch_enter_hook) or _set(self._hooks.launch_exit_hook):
            compiled[(programs, y, z)](*addresses, *values, *self._values)
        else:
            # What compiled[grid](...) does, without the description of the launch that only hooks look at.
            stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
            function, metadata = compiled.function, compiled.packed_metadata
            arguments = (*addresses, *values, *self._values)
            compiled.run(programs, y, z, stream, function, metadata, None, None, None, *arguments)


_address_of = torch.Tensor.data_ptr


def _set(hook: Any) -> bool:
    """Whether somebody, a profiler for instance, asked Triton to be told of launches: a function or a chain of them."""
    return bool(getattr(hook, "calls", hook))
