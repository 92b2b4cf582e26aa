"""Launching a Triton kernel at the cost of its driver call.

Triton's own launch binds and specializes every argument again at each call, which costs more than a small decode
takes. A :class:`FastLaunch` keeps the compiled kernel of one specialization and starts it directly.
"""

from __future__ import annotations

from typing import Any

from tpoverlap.cuda.triton_available import triton_interpreted


class FastLaunch:
    """One kernel with fixed constants, and with arguments that are always specialized alike.

    The owner keeps one for each device, combination of dtypes and value of the ints that Triton specializes (those
    not in ``do_not_specialize``). Pointers are specialized on 16-byte alignment: a call says whether all are aligned.
    ``options`` are Triton's: num_warps, num_stages, launch_pdl.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: int | bool) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = options
        self._values = tuple(constants.values())
        self._compiled: Any = None

    def __call__(self, programs: int, args: tuple[Any, ...], *, aligned: bool, y: int = 1, z: int = 1) -> None:
        """Launch programs x y x z programs on the current device and stream; ``args`` come before the constants."""
        if self._compiled is not None and aligned:
            self._compiled[(programs, y, z)](*args, *self._values)
            return
        compiled = self._kernel[(programs, y, z)](*args, **self._constants, **self._options)
        if aligned and not triton_interpreted():
            self._compiled = compiled
