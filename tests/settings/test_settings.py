import dataclasses

import pytest

from clew.capture.settings import DEFAULT_KINDS, SETTING_KEYS, Settings, load_settings
from clew.errors import UsageError
from clew.model.schema import KINDS


def load(tmp_path, overrides=None, **environment):
    return load_settings(overrides, start=tmp_path, environment=environment)


def test_defaults_need_no_file(tmp_path):
    settings = load(tmp_path)
    assert settings == Settings()
    assert settings.budget == 0.03
    assert settings.every is None
    assert settings.kinds == DEFAULT_KINDS


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().every = 3


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("every", "10", "every", 10),
        ("every", "every 10", "every", 10),
        ("every", 7, "every", 7),
        ("every", "off", "every", None),
        ("budget", "3%", "budget", 0.03),
        ("budget", "2.5 %", "budget", 0.025),
        ("budget", "0.05", "budget", 0.05),
        ("budget", 0.5, "budget", 0.5),
        ("budget", 1, "budget", 1.0),
        ("budget", "off", "budget", None),
        ("budget", "None", "budget", None),
        ("budget", 0, "budget", None),
        ("budget", "0%", "budget", None),
        ("sites", "layers.*,!*.bias", "sites", ("layers.*", "!*.bias")),
        ("sites", ["a.{b,c}"], "sites", ("a.{b,c}",)),
        ("kinds", "output,grad", "kinds", ("output", "grad")),
        ("kinds", "grad,grad", "kinds", ("grad",)),
        ("kinds", "all", "kinds", KINDS),
        ("histograms", "no", "histograms", False),
        ("hashes", False, "hashes", False),
        ("status", "on", "status", True),
        ("out", "elsewhere", "out", "elsewhere"),
        ("name", "lr-0.1", "name", "lr-0.1"),
        ("quota", "2GB", "quota_bytes", 2_000_000_000),
        ("quota", "500 mb", "quota_bytes", 500_000_000),
        ("quota", "1.5GiB", "quota_bytes", 1_610_612_736),
        ("quota", 1000, "quota_bytes", 1000),
        ("quota", "off", "quota_bytes", None),
        ("warmup", "0", "warmup_steps", 0),
        ("warmup", 50, "warmup_steps", 50),
    ],
)
def test_each_way_to_write_a_value(tmp_path, key, value, field, expected):
    assert getattr(load(tmp_path, {key: value}), field) == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("every", "0", "'0' is not a number of steps"),
        ("every", "-3", "'-3' is not a number of steps"),
        ("every", "ten", "'ten' is not a number of steps"),
        ("every", 2.5, "2.5 is not a number of steps"),
        ("every", True, "True is not a number of steps"),
        ("budget", "3 percent", "'3 percent' is not a share of time"),
        ("budget", "150%", "'150%' is not a share of time"),
        ("budget", -0.1, "-0.1 is not a share of time"),
        ("budget", float("nan"), "nan is not a share of time"),
        ("budget", [1], "[1] is not a share of time"),
        ("sites", "", "the list is empty"),
        ("sites", "a.{b", "the pattern 'a.{b' has a brace without its partner"),
        ("sites", 3, "3 is not a list of names"),
        ("kinds", "output,gradient", "unknown kind 'gradient'"),
        ("kinds", ["grad", 1], "['grad', 1] is not a list of names"),
        ("histograms", "maybe", "'maybe' is neither yes nor no"),
        ("quota", "2 apples", "'2 apples' is not a size"),
        ("quota", -1, "-1 is not a size"),
        ("quota", True, "True is not a size"),
        ("quota", 0, "a quota of 0 leaves no room for a record"),
        ("out", "", "'' is not a folder"),
        ("name", "a/b", "'a/b' cannot name a run"),
        ("name", "..", "'..' cannot name a run"),
        ("name", "latest", "'latest' cannot name a run"),
        ("warmup", -1, "-1 is not a number of steps"),
    ],
)
def test_a_malformed_value_is_named_with_its_key_and_a_next_step(tmp_path, key, value, message):
    with pytest.raises(UsageError) as caught:
        load(tmp_path, {key: value})
    assert caught.value.what == f"setting '{key}': {message}"
    assert caught.value.where == "command line"
    assert caught.value.next_step
    assert caught.value.exit_code == 2


def test_nearest_kind_is_suggested(tmp_path):
    with pytest.raises(UsageError) as caught:
        load(tmp_path, {"kinds": "grads"})
    assert caught.value.next_step == "did you mean 'grad'?"


def test_files_then_environment_then_command_line(tmp_path):
    (tmp_path / "clew.toml").write_text('every = 2\nout = "from-file"\nname = "file"\n')
    settings = load(tmp_path, {"name": "line"}, CLEW_OUT="from-environment", CLEW_NAME="environment")
    assert (settings.every, settings.out, settings.name) == (2, "from-environment", "line")


def test_an_override_of_none_was_not_given(tmp_path):
    (tmp_path / "clew.toml").write_text("every = 2\n")
    assert load(tmp_path, {"every": None}).every == 2


def test_the_nearest_file_upward_counts(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.clew]\nevery = 5\nkinds = ["grad"]\n')
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert load(inner).every == 5
    (tmp_path / "a" / "clew.toml").write_text("every = 6\n")
    settings = load(inner)
    assert settings.every == 6
    assert settings.kinds == DEFAULT_KINDS, "files are not mixed: the nearest one alone counts"


def test_an_inline_table_in_pyproject_counts(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool]\nclew = {every = 5}\n")
    assert load(tmp_path).every == 5


@pytest.mark.parametrize(
    ("file", "text"), [("clew.toml", "evry = 5\n"), ("pyproject.toml", "[tool.clew]\nevry = 5\n")]
)
def test_unknown_key_names_file_key_and_nearest(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    with pytest.raises(UsageError) as caught:
        load(tmp_path)
    assert str(caught.value) == (
        f"unknown setting 'evry'\n  where: {tmp_path / file}\n  next:  did you mean 'every'?"
    )


def test_unknown_key_far_from_all_lists_them(tmp_path):
    with pytest.raises(UsageError) as caught:
        load(tmp_path, {"zzzz": 1})
    assert caught.value.next_step == "known settings: " + ", ".join(sorted(SETTING_KEYS))


def test_unknown_environment_variable_is_an_error(tmp_path):
    with pytest.raises(UsageError) as caught:
        load(tmp_path, CLEW_BUGDET="3%")
    assert caught.value.what == "unknown setting 'CLEW_BUGDET'"
    assert caught.value.where == "environment"
    assert caught.value.next_step == "did you mean 'CLEW_BUDGET'?"


def test_broken_toml_names_the_file_and_the_line(tmp_path):
    (tmp_path / "clew.toml").write_text("every = \n")
    with pytest.raises(UsageError, match=r"not valid TOML: .*line 1") as caught:
        load(tmp_path)
    assert caught.value.where == str(tmp_path / "clew.toml")
    assert caught.value.next_step == "write lines such as every = 10"


@pytest.mark.parametrize("text", ["every = \n", "tool = 3  # clew\n"])
def test_a_broken_pyproject_without_clew_is_not_our_business(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    assert load(tmp_path) == Settings()


def test_tool_clew_must_be_a_table(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool]\nclew = 3\n")
    with pytest.raises(UsageError, match=r"\[tool.clew\] must be a table"):
        load(tmp_path)


def test_every_field_has_a_key():
    (settings,) = {Settings()}
    assert len(SETTING_KEYS) == len(dataclasses.fields(settings))
