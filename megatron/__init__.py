"""Megatron-Patched: LLM training in Megatron-LM's shape, on CPU (gloo) and GPU (NCCL) alike."""
