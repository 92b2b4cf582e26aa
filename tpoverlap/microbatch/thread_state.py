"""What a worker thread takes over from the thread that called the executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class ThreadState:
    """Grad mode, inference mode, autocast, CUDA device and stream of a thread; torch keeps them thread-local."""

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    cuda_stream: torch.cuda.Stream | None

    @classmethod
    def of_this_thread(cls) -> ThreadState:
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES),
            torch.is_autocast_cache_enabled(),
            torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference_mode))
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for device, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.autocast_cache))
            if self.cuda_stream is not None:
                stack.enter_context(torch.cuda.stream(self.cuda_stream))  # and its device
            yield
