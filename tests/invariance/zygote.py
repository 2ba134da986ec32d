"""A process that has imported torch once and forks a child for each script: saves seconds of import per loop.

Reads one JSON list of jobs per line from standard input, runs all jobs of a line at once, and answers with
the list of their exit codes. A job: ``argv`` (as ``python`` would get it), ``folder`` (where it runs and
where ``stdout`` and ``stderr`` go) and ``environment`` (variables to add).
"""

import gc
import json
import os
import runpy
import sys

import numpy  # noqa: F401 - for the children
import pyarrow  # noqa: F401
import torch
import torch._dynamo  # the first optimizer step imports it
import torch.utils.data


def enter(job):
    """Make this forked child look like a fresh ``python`` in the folder of the job."""
    os.chdir(job["folder"])
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, "stdout", os.O_WRONLY),
        (2, "stderr", os.O_WRONLY),
    ):
        opened = os.open(name, flags | os.O_CREAT * (number > 0), 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.update(job["environment"])
    sys.argv = job["argv"]


def serve():
    """Fork a child per job; return the job in the child, and None in the parent when no more jobs come."""
    answers = os.fdopen(os.dup(1), "w")
    for line in iter(sys.stdin.readline, ""):
        children = []
        for job in json.loads(line):
            child = os.fork()
            if child == 0:
                answers.close()
                return job
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        answers.write(json.dumps(codes) + "\n")
        answers.flush()
    return None


def run(argv):
    """Run what ``python *argv`` would run: a script, or a module after ``-m``."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(argv[0])
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a child would copy every page
    todo = serve()
    if todo is not None:
        enter(todo)
        run(todo["argv"])
