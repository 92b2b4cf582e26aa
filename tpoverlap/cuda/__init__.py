"""What every GPU part shares: checked driver calls, device facts, the NVRTC compile cache, kernel loading and launch.

Nothing here imports cuda-python before it is used, and no question about a device creates a CUDA context.
"""
