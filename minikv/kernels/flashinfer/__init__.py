"""Attention backend on FlashInfer's kernels, and on Triton's for lanes that have log masses.

Nothing here imports flashinfer before `library.load` is called, and only `backend` imports triton.
"""
