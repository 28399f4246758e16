"""Attention backend in Triton. Only `shapes` and `probe` can be imported where triton is not installed."""
