"""Tensor-parallel prefill at compute speed on GPUs without peer access.

All-reduces travel through pinned host memory while the other half of the batch computes. The parts, each importable on
its own: ``tpoverlap.comm`` (transport and group coordinator), ``tpoverlap.microbatch`` (the executor that overlaps the
halves), ``tpoverlap.attention`` and ``tpoverlap.quant`` (the kernels it overlaps with), ``tpoverlap.model`` (a lean
decoder that uses them), ``tpoverlap.trace`` (timelines).

Importing any of them neither creates a CUDA context nor compiles anything.
"""

__version__ = "0.1.0"
