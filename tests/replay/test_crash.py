"""Crashes, hangs and requests leave the stacks of all threads in the run; a clean end leaves nothing."""

import ctypes
import faulthandler
import os
import shutil
import signal
import sys
import textwrap
import time

import pytest
import torch
import torch._dynamo

import clew
from clew.capture import crash_signals
from clew.capture.crash import CrashWatch
from clew.capture.crash_family import Family
from clew.capture.crash_native import write_native_stacks
from clew.cli import main
from clew.store.crash import read_crash
from clew.views import crash_card
from zygote import Job

_stacks = crash_signals._load_native()
needs_native = pytest.mark.skipif(_stacks is None, reason="native stacks cannot be had here")

TRAIN = """
import ctypes, os, signal, sys, threading, time, faulthandler
import torch
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
def until_written(step):
    import clew
    while clew.open_run("runs/run").last_step < step:
        time.sleep(0.05)
def is_in_file(*texts, seconds=20):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with open("runs/run/rank0/crash.txt") as file:
            found = file.read()
        if all(text in found for text in texts):
            return True
        time.sleep(0.05)
    return False
"""


@pytest.fixture
def run_script(zygote, tmp_path):
    """Return a function that runs a training under clew and gives its ending and its file of stacks."""

    def run(text, *options):
        (tmp_path / "train.py").write_text(TRAIN + textwrap.dedent(text))
        words = ["-m", "clew", "run", "--no-status", "--name", "run", *options, "train.py"]
        # A debugger that is installed here would stop the process for seconds.
        (done,) = zygote.run(Job(tmp_path, words, {"PATH": "/nowhere"}))
        return done, tmp_path / "runs" / "run" / "rank0" / "crash.txt"

    return run


def show(tmp_path, capsys):
    assert main(["show", str(tmp_path / "runs" / "run")]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_segmentation_fault_leaves_its_stacks_and_its_exit_code(run_script, tmp_path, capsys):
    text = """
        train(3)
        until_written(1)
        def sink():
            ctypes.string_at(0)
        sink()
    """
    done, crash = run_script(text)
    assert done.code == -signal.SIGSEGV
    assert "Fatal" not in done.stderr, "the terminal looks as it does without clew"
    text = crash.read_text()
    assert "in sink" in text
    if _stacks is not None:
        python, _, native = text.partition("Native stacks of process ")
        assert ", signal 11:" in native
        assert "in sink" in python
        failed, *others = native.split("Native thread ")[1:]
        assert "the one that failed:" in failed
        assert "ffi_call" in failed
        assert others, "the threads of the recording, at least"
    page = show(tmp_path, capsys)
    # The step that goes on when the process dies has not ended: it is not in the record.
    assert "the process crashed after step 1: Fatal Python error: Segmentation fault" in page
    assert "in sink" in page
    assert "ffi_call in libffi" in page or _stacks is None
    assert "clew/api/script.py" not in page, "the frames of clew say nothing"


ENDS = {
    "thread": ("t = threading.Thread(target=lambda: ctypes.string_at(0)); t.start(); t.join()", "SIGSEGV"),
    "abort": ("os.abort()", "SIGABRT"),
    "arithmetic": ("os.kill(os.getpid(), signal.SIGFPE); time.sleep(60)", "SIGFPE"),
    "bus": ("os.kill(os.getpid(), signal.SIGBUS); time.sleep(60)", "SIGBUS"),
    "stack": ("sys.setrecursionlimit(10**9)\na = None\nfor _ in range(10**6): a = [a]\nrepr(a)", "SIGSEGV"),
}  # fmt: skip


@needs_native
def test_every_fatal_signal_ends_the_process_as_without_clew(zygote, tmp_path):
    jobs = []
    for name, (text, _) in ENDS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(TRAIN + text)
        words = ["-m", "clew", "run", "--no-status", "--name", "run", "train.py"]
        jobs.append(Job(tmp_path / name, words))
    for name, done in zip(ENDS, zygote.run(*jobs), strict=True):
        number = getattr(signal, ENDS[name][1])
        text = (tmp_path / name / "runs" / "run" / "rank0" / "crash.txt").read_text()
        assert done.code == -number, name
        assert done.stderr == "", name
        assert "Fatal Python error" in text, name
        assert f", signal {int(number)}:\n" in text, name


@needs_native
def test_handlers_of_the_script_and_its_children_are_respected(run_script):
    text = """
        signal.signal(signal.SIGABRT, lambda *_: print("mine", flush=True))
        train(1)
        os.kill(os.getpid(), signal.SIGABRT)
        child = os.fork()
        if child == 0:
            ctypes.string_at(0)
        assert os.waitpid(child, 0)[1] & 127 == signal.SIGSEGV
        faulthandler.enable()
        assert is_in_file(f"Native stacks of process {child}, signal 11:")
        os._exit(3)
    """
    done, crash = run_script(text)
    assert (done.code, done.stdout) == (3, "mine\n"), done.stderr
    assert "signal 6" not in crash.read_text()


def test_native_frames_are_named_up_to_where_python_called_them():
    text = (
        "Native thread 7 (python), the one that failed:\n"
        "/x/libtorch_cpu.so(_ZN2at6native4reluERKNS_6TensorE+0x1f)[0x7f]\n/x/mine.so(+0x12)[0x7f]\n"
        "/x/mine.so(+0x12)[0x7f]\n/x/libpython3.11.so(PyObject_Call+0x1)[0x7f]\n/x/libc.so.6(f)[0x7f]\n"
    )
    shown = [block.text.strip() for block in crash_card._show_native(text)]
    assert shown == ["native:", "at::native::relu in libtorch_cpu.so", "mine.so +0x12"]


def test_a_killed_process_says_how_far_it_came(run_script, tmp_path, capsys):
    done, crash = run_script("train(4)\nuntil_written(2)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert done.code == -signal.SIGKILL
    assert crash.read_text() == ""
    assert "the process ended without a word after step 2" in show(tmp_path, capsys)


def test_a_hang_and_a_request_write_stacks_and_the_run_goes_on(run_script, tmp_path, capsys):
    text = """
        train(2)
        def asked():
            os.kill(os.getpid(), signal.SIGUSR1)
        def stuck():
            return is_in_file("in stuck", "Timeout (0:00:00.500000)!")
        asked()
        assert is_in_file("in asked", seconds=300)
        while not stuck():  # on a busy machine it may have counted as stuck before
            train(1)
        time.sleep(2)  # the thread that says so looks four times in half a second
        train(1)
    """
    done, crash = run_script(text, "--hang-timeout", "0.5")
    assert done.code == 0
    assert "in asked" in crash.read_text()
    assert "in stuck" in crash.read_text()
    assert "clew: no step has ended for 0.5 s" in done.stderr
    assert "stacks were written while it ran" in show(tmp_path, capsys)


def test_what_the_script_does_itself_is_respected(run_script):
    text = """
        faulthandler.enable()
        got = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        train(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [1]
        import atexit
        has_handler = lambda: signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
        atexit.register(lambda: print(faulthandler.is_enabled(), has_handler()))
    """
    done, crash = run_script(text)
    assert (done.code, done.stdout) == (0, "True True\n"), done.stderr
    assert not crash.exists()


def test_a_request_reaches_the_workers_of_a_loader(run_script):
    text = """
        import torch.utils.data
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return self.slow_read(index)
            def slow_read(self, index):
                while index and not os.path.exists("enough"):
                    time.sleep(0.05)
                return torch.ones(4)
        import multiprocessing, subprocess
        innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        loader = iter(torch.utils.data.DataLoader(Data(), num_workers=2))
        next(loader)
        train(1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, "launchers look whether it is taken"
        os.kill(os.getpid(), signal.SIGUSR1)
        workers = [process.pid for process in multiprocessing.active_children()]
        assert is_in_file("in slow_read", *(f"process {pid}, started by" for pid in workers), seconds=300)
        time.sleep(0.5)
        open("enough", "w").close()
        assert innocent.poll() is None, "a process without a handler is left alone"
        innocent.kill(), innocent.wait()
    """
    done, crash = run_script(text)
    assert done.code == 0, done.stderr
    assert crash.read_text().count("in slow_read") >= 1
    assert crash.read_text().count(", started by ") == 2


def test_workers_that_are_started_anew_leave_stacks_too(run_script, tmp_path, capsys):
    """Python starts such a worker with torch, which takes seconds: one test for a request and a crash."""
    text = """
        import torch.utils.data
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, index):
                return self.slow_read(index)
            def slow_read(self, index):
                while index and not os.path.exists("enough"):
                    time.sleep(0.05)
                return torch.ones(4) if not index else ctypes.string_at(0)
        if __name__ == "__main__":
            loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
            batches = iter(loader)
            next(batches)
            train(2)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert is_in_file("in slow_read", ", started by", seconds=300)
            open("enough", "w").close()
            next(batches)
    """
    done, crash = run_script(text)
    assert done.code == 1
    assert "killed by signal: Segmentation fault" in done.stderr
    found = crash.read_text()
    assert "Fatal Python error: Segmentation fault" in found, "torch has handlers of its own in workers"
    assert "(pt_data_worker), the one that failed:" in found or _stacks is None
    assert "a process that it had started, such as a loader's worker, crashed" in show(tmp_path, capsys)


def test_a_hang_says_what_it_knows_of_native_stacks(tmp_path, monkeypatch):
    limit = shutil.which("timeout")
    monkeypatch.setenv("PATH", str(tmp_path))
    with open(tmp_path / "stacks", "w+") as file:
        write_native_stacks(os.getpid(), file.fileno())
        (tmp_path / "timeout").symlink_to(limit)
        fake = tmp_path / "gdb"
        fake.write_text("#!/bin/sh\necho Thread 1 '#0' poll\n")
        fake.chmod(0o755)
        write_native_stacks(os.getpid(), file.fileno())
        fake.write_text("#!/bin/sh\necho No threads.\n")
        write_native_stacks(os.getpid(), file.fileno())
    assert (tmp_path / "stacks").read_text() == (
        "\nnative stacks: none, for neither py-spy nor gdb is installed\n"
        "\nnative stacks, from gdb:\nThread 1 #0 poll\n"
        "\nnative stacks, from gdb:\nNo threads.\nnone: gdb may not look at this process here\n"
    )


def test_native_stacks_are_no_request_for_more(tmp_path):
    """Both a hang and its native stacks go into the file that tells of requests."""
    asked = []
    path = tmp_path / "stacks"
    with path.open("a") as file:
        family = Family(path, file.fileno(), signal.SIGUSR1)
        family._ask_all = lambda: asked.append(path.read_text())
        family.start()
        os.write(file.fileno(), b"hang\n")
        family.write_apart(lambda: os.write(file.fileno(), b"native\n"))
        family.write_apart(lambda: os.write(file.fileno(), b"native\n"))
        family.stop()
    assert asked == ["hang\n"]


# ------------------------------------------------------------------------ in this process


@pytest.fixture
def without_faulthandler():
    """Take pytest's own faulthandler away for a test."""
    was_on = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    if was_on:
        faulthandler.enable(sys.__stderr__)


@pytest.mark.usefixtures("without_faulthandler")
def test_a_clean_end_leaves_nothing(tmp_path):
    enable = faulthandler.enable
    with clew.watch(out=str(tmp_path), name="run", hang_timeout="30") as run:
        assert faulthandler.is_enabled()
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert not faulthandler.is_enabled()
    assert faulthandler.enable is enable
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert not (run.path / "rank0" / "crash.txt").exists()


@needs_native
@pytest.mark.usefixtures("without_faulthandler")
def test_handlers_of_libraries_stay_whether_they_come_before_or_later(tmp_path):
    library = ctypes.CDLL(None)
    library.signal.restype = library.signal.argtypes = None
    library.signal.restype, library.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    foreign = ctypes.cast(library.getpid, ctypes.c_void_p)
    library.signal(signal.SIGFPE, foreign)
    try:
        with clew.watch(out=str(tmp_path), name="run"):
            library.signal(signal.SIGBUS, foreign)
            during = [_stacks.owner(number) for number in (signal.SIGSEGV, signal.SIGFPE)]
        after = [_stacks.owner(number) for number in (signal.SIGSEGV, signal.SIGFPE, signal.SIGBUS)]
    finally:
        library.signal(signal.SIGFPE, None)
        library.signal(signal.SIGBUS, None)
    assert (during[0], "libc" in during[1]) == ("python", True)
    assert (after[0], "libc" in after[1], "libc" in after[2]) == ("", True, True)


@pytest.mark.usefixtures("without_faulthandler")
def test_where_native_stacks_cannot_be_had_the_record_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(crash_signals, "_load_native", lambda: None)
    watch = CrashWatch(tmp_path, hang_seconds=None, tell=print)
    watch.start()
    said = (tmp_path / "crash.txt").read_text()
    assert said.startswith("native stacks of a crash: none, for ")
    assert read_crash(tmp_path) == "", "nothing has crashed"
    crash_signals.renew()  # as a forked worker does: a second line would be taken for stacks that somebody wants
    assert (tmp_path / "crash.txt").read_text() == said
    watch.stop()
    assert not (tmp_path / "crash.txt").exists()


@needs_native
@pytest.mark.usefixtures("without_faulthandler")
def test_a_recording_inside_another_leaves_crashes_to_the_other(tmp_path):
    outer = CrashWatch(tmp_path, hang_seconds=None, tell=print)
    outer.start()
    (tmp_path / "inner").mkdir()
    inner = CrashWatch(tmp_path / "inner", hang_seconds=None, tell=print)
    inner.start()
    assert (inner.number, outer.number) == (None, signal.SIGUSR1)
    inner.stop()
    assert faulthandler.is_enabled()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert "test_a_recording_inside" in (tmp_path / "crash.txt").read_text()
    outer.stop()
    assert _stacks.owner(signal.SIGSEGV) == ""


def test_a_stop_on_purpose_is_no_hang(tmp_path):
    told = []
    watch = CrashWatch(tmp_path, hang_seconds=0.2, tell=told.append)
    watch.start()
    with watch.standing_still():
        time.sleep(0.6)
    watch.stop()
    assert not told
    assert not (tmp_path / "crash.txt").exists()


def test_a_folder_that_is_gone_is_no_reason_to_fail(tmp_path):
    watch = CrashWatch(tmp_path / "missing", hang_seconds=1.0, tell=print)
    watch.start()
    watch.end_step()
    watch.stop()


@pytest.mark.parametrize("wrong", ["soon", "-1", "0", True])
def test_a_timeout_must_be_a_time(wrong):
    with pytest.raises(clew.ClewError, match="is not a number of seconds"):
        clew.watch(hang_timeout=wrong)
