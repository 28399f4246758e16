"""Compiled kernels for the CPU: a small C++17 library behind a plain C interface.

The library is built when the package is installed, loaded with ctypes, and optional: without it
the plain torch backend serves. `api.cpp` is the interface; `kernels.h` and what it includes are
compiled once per instruction set and chosen at run time.
"""
