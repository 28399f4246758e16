"""Builds the compiled CPU kernels; without a C++ compiler the package installs all the same."""

import os

from setuptools import Extension, setup

FOLDER = os.path.join("minikv", "kernels", "cpu")
SOURCES = ("api", "team", "isa_generic", "isa_avx2", "isa_avx512", "isa_neon")
HEADERS = (
    *("common", "team", "kernels", "simd", "dots", "matmul", "attention", "ops"),
    *("products", "slots", "look", "lanes", "estimate", "route", "forward"),
)

setup(
    ext_modules=[
        Extension(
            "minikv.kernels.cpu._kernels",
            sources=[os.path.join(FOLDER, f"{name}.cpp") for name in SOURCES],
            depends=[os.path.join(FOLDER, f"{name}.h") for name in HEADERS],
            language="c++",
            # No contraction: sums are fused where the source says so and nowhere else, so that
            # every instruction set and every tile gives a row the same bits.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fvisibility=hidden",
                "-ffp-contract=off",
                "-fno-math-errno",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
