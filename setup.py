"""Builds the kernels; without a compiler the package still installs and uses its torch and numpy paths."""

import sys

from setuptools import Extension, setup

UNIX_FLAGS = ["-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread"]

HEADERS = ("elements", "lanes", "layout", "measure", "tasks", "vectors")

kernel = Extension(
    "clew.stats._kernel",
    sources=["src/clew/stats/_kernel.c"],
    depends=[f"src/clew/stats/_{name}.h" for name in HEADERS],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    extra_compile_args=[] if sys.platform == "win32" else UNIX_FLAGS,
    extra_link_args=[] if sys.platform == "win32" else ["-pthread"],
    py_limited_api=True,
    optional=True,
)

pair = Extension(
    "clew.compare._pair",
    sources=["src/clew/compare/_pair.c"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    extra_compile_args=[] if sys.platform == "win32" else [*UNIX_FLAGS, "-Wno-psabi"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[kernel, pair])
