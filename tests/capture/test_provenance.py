"""What a run says of its command and its end: secrets hidden, sentences whole."""

import pytest
import torch

import clew
from clew.capture.provenance import hide_secrets, read_environment


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--password", "abc", "-x"], ["--password", "(hidden)", "-x"]),
        (["--url", "https://user:pa@ss@host/x"], ["--url", "https://user:(hidden)@host/x"]),
        (
            ["--url=postgresql+psycopg://me:pass@host:5432/db"],
            ["--url=postgresql+psycopg://me:(hidden)@host:5432/db"],
        ),
        (["redis://:pass@host"], ["redis://:(hidden)@host"]),
        (["https://ghp_abc@github.com/me/x"], ["https://(hidden)@github.com/me/x"]),
        (["https://host/x?a=1&api_key=abc&b=2"], ["https://host/x?a=1&api_key=(hidden)&b=2"]),
        (["ssh://git@host/x", "user@host:/data"], ["ssh://git@host/x", "user@host:/data"]),
        (["http://host:8080/a:b@c", "C:\\\\a@b"], ["http://host:8080/a:b@c", "C:\\\\a@b"]),
    ],
)
def test_secrets_in_the_command_are_hidden(words, kept):
    assert hide_secrets(["train.py", *words]) == ["train.py", *kept]


def test_secrets_in_addresses_of_the_environment_are_hidden(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://me:pass@host")
    assert read_environment()["HF_ENDPOINT"] == "https://me:(hidden)@host"


@pytest.mark.parametrize(
    ("error", "note"),
    [(KeyboardInterrupt(), "ended by KeyboardInterrupt"), (ValueError("mine"), "ended by ValueError: mine")],
)
def test_an_exception_without_words_leaves_no_colon(tmp_path, error, note):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(type(error)), clew.watch(model, out=tmp_path, name="run") as run:
        model(torch.ones(1, 2))
        raise error
    assert note in clew.open_run(run.path).info.notes
