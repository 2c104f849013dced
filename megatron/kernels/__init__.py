"""Ops with a torch reference and optional fused backends."""
