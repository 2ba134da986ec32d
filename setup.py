"""Builds the kernels; without a compiler the package still installs and uses its torch and numpy paths."""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

UNIX_FLAGS = ["-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
"""Nothing that changes results: no fused or reordered arithmetic. Wider instructions are chosen at run time."""

STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")
"""One binary for all Pythons, where there is a stable interface."""

kernel = Extension(
    "clew.stats._kernel",
    sources=["src/clew/stats/_kernel.c"],
    depends=sorted(map(str, Path("src/clew/stats").glob("_*.h"))),
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
    extra_compile_args=["/std:c11"] if sys.platform == "win32" else UNIX_FLAGS,
    py_limited_api=STABLE,
    optional=True,
)

pair = Extension(
    "clew.compare._pair",
    sources=["src/clew/compare/_pair.c"],
    depends=["src/clew/compare/_bits.h", "src/clew/compare/_mapped.h"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
    extra_compile_args=["/std:c11"] if sys.platform == "win32" else [*UNIX_FLAGS, "-fopenmp-simd"],
    py_limited_api=STABLE,
    optional=True,
)

stacks = Extension(
    "clew.capture._stacks",
    sources=["src/clew/capture/_stacks.c"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
    extra_compile_args=["/std:c11"] if sys.platform == "win32" else ["-O1", "-std=c11"],
    libraries=["dl"] if sys.platform == "linux" else [],
    py_limited_api=STABLE,
    optional=True,
)

ending = Extension(
    "clew.capture._ending",
    sources=["src/clew/capture/_ending.c"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
    extra_compile_args=["/std:c11"] if sys.platform == "win32" else ["-O1", "-std=c11"],
    py_limited_api=STABLE,
    optional=True,
)

setup(
    ext_modules=[kernel, pair, stacks, ending],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {},
)
