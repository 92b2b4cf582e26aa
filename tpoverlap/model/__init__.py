"""A lean dense decoder (Llama, Qwen2, Qwen3) for tensor-parallel prefill, and its checkpoint loading."""
