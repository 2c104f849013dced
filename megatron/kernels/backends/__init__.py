"""The fused backends. No other package imports optional dependencies."""
