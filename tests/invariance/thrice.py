"""Runs one loop three times in this process: plain, inside ``clew.watch``, and plain again."""

import os
import runpy
import sys

loop, runs = sys.argv[1:3]
sys.path[0] = os.path.dirname(loop)
for out in ("", runs, ""):
    os.environ["LOOP_WATCH_OUT"] = out
    runpy.run_path(loop, run_name="__main__")
    print("=== end of training ===")
