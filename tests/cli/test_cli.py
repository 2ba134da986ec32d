"""The command line as a whole: what it understands, what it says when it does not, how it ends."""

import subprocess
import sys

import pytest

import clew
from clew.cli import COMMANDS, main
from clew.cli.run import split


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"clew {clew.__version__}\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(capsys, words):
    assert main(words) == 0
    out = capsys.readouterr().out
    for name, (_, text) in COMMANDS.items():
        assert f"  {name}" in out
        assert text in out
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 90


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main([*command.split(), "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("form", ["{} --help", "help {}", "{} -h"])
def test_each_command_explains_itself(capsys, name, form):
    assert main(form.format(name).split()) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: clew {name}")
    assert out.isascii()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shwo"], "clew: unknown command 'shwo'\n  next:  did you mean 'show'?\n"),
        (["xyzzy"], "clew: unknown command 'xyzzy'\n  next:  'clew --help' lists the commands\n"),
        (["--verison"], "clew: unknown option '--verison'\n  next:  did you mean '--version'?\n"),
        (
            ["run", "--evry", "3", "a.py"],
            "clew: unknown argument '--evry'\n  where: clew run\n  next:  did you mean '--every'?\n",
        ),
        (
            ["run"],
            "clew: no script to run\n  where: clew run\n  next:  clew run train.py, or clew run -m package.train\n",
        ),
        (
            ["run", "-m"],
            "clew: no module after -m\n  where: clew run\n  next:  clew run train.py, or clew run -m package.train\n",
        ),
        (
            ["run", "-"],
            "clew: a script on standard input cannot be recorded\n  next:  write it to a file\n",
        ),
        (
            ["run", "--budget", "lots", "a.py"],
            (
                "clew: setting 'budget': 'lots' is not a share of time\n  where: command line\n"
                "  next:  write a share such as 3% or 0.03, or off\n"
            ),
        ),
        (
            ["run", "--kinds", "grads", "a.py"],
            "clew: setting 'kinds': unknown kind 'grads'\n  where: command line\n  next:  did you mean 'grad'?\n",
        ),
        (
            ["run", "--every"],
            (
                "clew: argument --every: expected one argument\n  where: clew run\n"
                "  next:  'clew run --help' lists what it takes\n"
            ),
        ),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(capsys, words, message):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err == message
    assert captured.out == ""


@pytest.mark.parametrize(
    ("line", "own", "rest"),
    [
        ("train.py", "", "train.py"),
        ("train.py --every 3 --help -m x", "", "train.py --every 3 --help -m x"),
        ("--every 10 train.py --every 3", "--every 10", "train.py --every 3"),
        ("--every=10 train.py", "--every=10", "train.py"),
        ("--no-status --out x train.py -m y", "--no-status --out x", "train.py -m y"),
        ("-m pkg.train --lr 0.1", "", "-m pkg.train --lr 0.1"),
        ("-mpkg.train --lr 0.1", "", "-m pkg.train --lr 0.1"),
        ("--name a -m pkg --name b", "--name a", "-m pkg --name b"),
        ("--no-hashes -- --odd-script.py -h", "--no-hashes", "--odd-script.py -h"),
        ("--help train.py", "--help", "train.py"),
        ("-", "", "-"),
        ("", "", ""),
    ],
)
def test_everything_after_the_script_is_the_scripts(line, own, rest):
    assert split(line.split()) == (own.split(), rest.split())


def test_python_m_clew_is_clew():
    done = subprocess.run(
        [sys.executable, "-m", "clew", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout == f"clew {clew.__version__}\n"
