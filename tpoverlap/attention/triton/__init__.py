"""Paged attention kernels in Triton, for every GPU that Triton serves.

``prefill`` (packed), ``rows`` (one decode a prompt row), ``decode`` and ``kv_write`` are the host sides; Triton
itself is imported by the ``*_kernel`` modules, at the first launch.
"""
