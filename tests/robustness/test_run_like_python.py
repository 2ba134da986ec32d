"""A script under ``clew run`` sees, prints and returns what it would under ``python``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from typing import NamedTuple

import psutil
import pytest

PYTHON = [sys.executable]
CLEW = [sys.executable, "-m", "clew", "run", "--out", "../clew-runs"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
TRAIN = """
import torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    loss = model(torch.ones(4, 3)).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""


class End(NamedTuple):
    code: int
    stdout: str
    stderr: str

    @property
    def own_stderr(self) -> str:
        """What the script wrote to standard error, without the lines that are clew's own."""
        return "".join(line for line in self.stderr.splitlines(keepends=True) if not line.startswith("clew:"))


@pytest.fixture
def place(tmp_path):
    """Return a function that writes files into the folder where both sides run."""
    folder = tmp_path / "project"
    folder.mkdir()

    def write(**files: str):
        for name, text in files.items():
            path = folder / (name.replace("__slash__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text), encoding="utf-8")
        return folder

    return write


def run(command: list[str], folder, **options) -> End:
    done = subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )
    return End(done.returncode, done.stdout, done.stderr)


def assert_same(folder, *argv: str, **options) -> tuple[End, End]:
    """Run both sides and compare everything but clew's own lines; return both for more."""
    plain = run([*PYTHON, *argv], folder, **options)
    clew = run([*CLEW, *argv], folder, **options)
    assert clew.stdout == plain.stdout
    assert without_addresses(clew.own_stderr) == without_addresses(plain.stderr)
    assert clew.code == plain.code
    return plain, clew


def without_addresses(text: str) -> str:
    return re.sub("0x[0-9a-f]+", "0x", text)


SCRIPTS = {
    "main module": """
        import builtins, sys
        print(__name__, __file__, __doc__, __package__, __spec__, type(__loader__).__name__)
        print(__builtins__ is builtins, sorted(globals()), sys.modules["__main__"].__dict__ is globals())
        print(sys.path[0], sys.argv)
    """,
    "pickle of a class in main": """
        import pickle
        class Point:
            x = 1
        print(Point, pickle.dumps(Point), pickle.loads(pickle.dumps(Point())).x)
        import __main__
        print(__main__.Point is Point)
    """,
    "no future leaks in": """
        import dataclasses
        @dataclasses.dataclass
        class Config:
            lr: float = 0.1
        print(dataclasses.fields(Config)[0].type, 1 / 2)
    """,
    "exit code": "import sys; print('before'); sys.exit(3)",
    "exit with text": "import sys; sys.exit('it went wrong')",
    "exit with nothing": "raise SystemExit",
    "exit with an object": "raise SystemExit([1, 2])",
    "exit above a byte": "raise SystemExit(256 + 7)",
    "exit at once": "import os; os.write(1, b'raw'); os._exit(5)",
    "exit inside a thread": """
        import sys, threading
        thread = threading.Thread(target=lambda: sys.exit(9))
        thread.start(); thread.join()
    """,
    "quit": "quit(4)",
    "exception": """
        def inner():
            return {}["missing"]
        def outer():
            inner()
        outer()
    """,
    "chained exception": """
        try:
            1 / 0
        except ZeroDivisionError as error:
            try:
                raise ValueError("second")
            except ValueError:
                raise RuntimeError("third") from error
    """,
    "exception in a thread": """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0, name="worker")
        thread.start(); thread.join()
        print("went on")
    """,
    "exception hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hooked", kind, error, trace.tb_lineno)
        raise ValueError("seen")
    """,
    "broken exception hook": """
        import sys
        def hook(kind, error, trace):
            raise KeyError("hook")
        sys.excepthook = hook
        raise ValueError("seen")
    """,
    "syntax error": "def broken(:\n    pass\n",
    "exception at exit": """
        import atexit
        atexit.register(lambda: 1 / 0)
        print("end of script")
    """,
    "exit handlers": """
        import atexit, sys
        value = "global"
        atexit.register(lambda: print("first registered", value, __name__))
        atexit.register(print, "second registered")
        print("end of script")
        sys.exit(2)
    """,
    "pool that nobody shuts down": """
        import time
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        pool.submit(print, "at once").result()
        pool.submit(lambda: (time.sleep(0.2), print("late")))
        print("end of main")
        """,
    "thread that outlives main": """
        import threading, time
        def late():
            time.sleep(0.2)
            print("late", __name__)
        threading.Thread(target=late).start()
        print("end of script")
    """,
    "warnings": """
        import sys, warnings
        print(warnings.filters, sys.warnoptions)
        warnings.warn("shown once")
        warnings.warn("deprecated in main", DeprecationWarning)
    """,
    "streams": """
        import sys
        for number in range(3):
            print("out", number)
            print("err", number, file=sys.stderr)
        sys.stdout.buffer.write(bytes(range(32, 64)))
        print(sys.stdout.encoding, sys.stdout.line_buffering, sys.stderr.line_buffering, type(sys.stdout).__name__)
    """,
    "closed stdout": "import sys; print('x'); sys.stdout.flush(); sys.stdout = None",
    "environment": "import os; print(sorted(os.environ.items()))",
    "limits": """
        import sys, signal, threading
        print(sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile())
        print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGPIPE))
        print(threading.current_thread().name, threading.excepthook is threading.__excepthook__)
        print(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.flags)
    """,
    "source of main": """
        import inspect
        def function():
            return 1
        print(inspect.getsource(function), inspect.getsourcefile(function), inspect.getmodule(function))
    """,
    "fork in the script": """
        import os, sys
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print("child"); sys.exit(6)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
    "subprocess": """
        import subprocess, sys
        print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv)"], capture_output=True).stdout)
        subprocess.run([sys.executable, "-c", "print('straight through')"])
    """,
    "spawned processes": """
        import multiprocessing
        print("imported as", __name__)
        def square(number):
            return number * number, __name__
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]))
    """,
    "cwd": """
        import os, pathlib
        os.mkdir("elsewhere-" + str(os.getpid()))
        os.chdir("elsewhere-" + str(os.getpid()))
        print(os.path.basename(os.getcwd()).split("-")[0])
        os.rmdir(os.getcwd())
    """,
    "replaced process": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1); exit(8)'])",
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name, place):
    assert_same(place(script=SCRIPTS[name]), "script.py")


def test_arguments_belong_to_the_script(place):
    folder = place(script="import sys; print(sys.argv)")
    words = ["--lr", "0.1", "-m", "x", "--budget", "off", "--help", "--", "-", "", "a b", "ü"]
    plain, _ = assert_same(folder, "script.py", *words)
    assert plain.stdout == f"{['script.py', *words]}\n"


def test_script_by_another_path(place):
    text = "import sys, beside; print(__file__, sys.path[0], sys.argv, beside.name)"
    folder = place(sub__slash__script=text, sub__slash__beside="name = 'found'")
    for path in ("sub/script.py", "./sub/../sub/script.py", str(folder / "sub" / "script.py")):
        assert_same(folder, path)
    (folder / "link.py").symlink_to("sub/script.py")
    assert_same(folder, "link.py")


def test_module_with_relative_imports(place):
    folder = place(
        package__slash____init__="print('package', __name__)",
        package__slash__sibling="value = 'from sibling'",
        package__slash____main__="print('main of package', __name__, __package__)",
        package__slash__train="""
            import sys
            from . import sibling
            from .sibling import value
            print(__name__, __package__, __spec__.name, __spec__.origin, __file__, value, sys.argv, sys.path[0])
        """,
        single="import sys; print(__name__, repr(__package__), __spec__.name, sys.argv)",
    )
    assert_same(folder, "-m", "package.train", "--epochs", "3")
    assert_same(folder, "-m", "package", "x")
    assert_same(folder, "-m", "single")


def test_folder_and_archive_with_a_main(place):
    text = (
        "import sys, beside; print(__name__, repr(__package__), __file__, sys.path[0], sys.argv, beside.name)"
    )
    folder = place(app__slash____main__=text, app__slash__beside="name = 'found'")
    assert_same(folder, "app", "--x")
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        for name in ("__main__.py", "beside.py"):
            archive.write(folder / "app" / name, name)
    assert_same(folder, "app.zip", "--x")


def test_other_encodings_and_names(place):
    folder = place()
    (folder / "latin").write_bytes(
        "# -*- coding: latin-1 -*-\nprint('gr\xfcn', __file__)\n".encode("latin-1")
    )
    (folder / "marked.txt").write_bytes(b"\xef\xbb\xbfprint('with a mark')\n")
    assert_same(folder, "latin")
    assert_same(folder, "marked.txt")


@pytest.mark.parametrize("target", [["nowhere.py"], ["empty"], ["-m", "nowhere"], ["-m", "empty"], []])
def test_nothing_to_run(target, place):
    folder = place()
    (folder / "empty").mkdir()
    end = run([*CLEW, *target], folder)
    assert end.code == 2
    assert end.stdout == ""
    assert end.stderr.startswith("clew: ")
    assert "next:" in end.stderr
    assert "Traceback" not in end.stderr
    assert not (folder.parent / "clew-runs").exists()


def test_standard_input(place):
    folder = place(
        script="import sys; print(input('name? ')); print(sys.stdin.read().upper()); print(sys.stdin.read())"
    )
    assert_same(folder, "script.py", input="clew\nrest of\nthe text")


def test_order_of_both_streams(place):
    """With both streams on one pipe the lines come in the order they were flushed."""
    folder = place(
        script="""
        import subprocess, sys
        for number in range(20):
            print("out", number, flush=True)
            print("err", number, file=sys.stderr)
            if number % 10 == 0:
                subprocess.run(["echo", "sub", str(number)])
        """
    )
    ends = [
        subprocess.run(
            [*side, "script.py"], cwd=folder, env=ENVIRONMENT, stdout=-1, stderr=-2, text=True, check=True
        )
        for side in (PYTHON, CLEW)
    ]
    plain, clew = (re.sub(r"^clew:.*\n", "", end.stdout, flags=re.MULTILINE) for end in ends)
    assert clew == plain


def test_output_arrives_while_the_script_runs(place):
    folder = place(script="print('ready', flush=True); input(); print('done')")
    with subprocess.Popen(
        [*CLEW, "script.py"], cwd=folder, env=ENVIRONMENT, stdin=-1, stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        stdout, _ = process.communicate("\n", timeout=300)
        assert stdout == "done\n"


def signalled(side, folder, number) -> End:
    """Start the script, send the signal once it says it is ready, and return how it ended."""
    with subprocess.Popen(
        [*side, "script.py"], cwd=folder, env=ENVIRONMENT, stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)  # between the print and the sleep the traceback would be another one
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=300)
        return End(process.returncode, stdout, stderr)


WAIT = "import time\nprint('ready', flush=True)\ntime.sleep(30)\n"
SIGNALS = {
    "interrupt": (signal.SIGINT, WAIT),
    "interrupt caught": (
        signal.SIGINT,
        f"try:\n{textwrap.indent(WAIT, '    ')}except KeyboardInterrupt:\n    print('on')\n",
    ),
    "interrupt handled": (
        signal.SIGINT,
        "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(11))\n" + WAIT,
    ),
    "interrupt with exit handler": (signal.SIGINT, "import atexit\natexit.register(print, 'bye')\n" + WAIT),
    "terminate": (signal.SIGTERM, WAIT),
    "terminate handled": (
        signal.SIGTERM,
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit('told to stop'))\n" + WAIT,
    ),
    "hang up": (signal.SIGHUP, WAIT),
    "user signal": (
        signal.SIGUSR1,
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: 1 / 0)\n" + WAIT,
    ),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_signal(name, place):
    number, script = SIGNALS[name]
    folder = place(script=script)
    plain, clew = signalled(PYTHON, folder, number), signalled(CLEW, folder, number)
    assert (clew.code, clew.stdout, clew.own_stderr) == plain


@pytest.mark.parametrize("flag", ["-O", "-Werror", "-u", "-I", "-Xdev", "-B"])
def test_interpreter_flags(flag, place):
    """Flags are given to the interpreter that runs clew, and reach the script."""
    folder = place(script="import sys, warnings; print(__debug__, sys.flags, sys.warnoptions, sys._xoptions)")
    plain = run([sys.executable, flag, "script.py"], folder)
    clew = run([sys.executable, flag, *CLEW[1:], "script.py"], folder)
    assert (clew.stdout, clew.own_stderr, clew.code) == (plain.stdout, plain.stderr, plain.code)
