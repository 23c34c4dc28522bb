import shutil

import pytest

from ms_zero import resources
from ms_zero.errors import UserError
from ms_zero.resources import config_dir, did_you_mean, find_preset, list_presets, nearest


def test_presets_are_found_in_the_source_tree():
    assert find_preset("models", "gpt-tiny") == config_dir() / "models" / "gpt-tiny.yaml"
    assert "gpt-tiny" in list_presets("models")
    assert list(list_presets("clusters")) == sorted(list_presets("clusters"))


def test_presets_are_found_in_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "ms_zero"
    shutil.copytree(config_dir(), package / "_resources" / "configs")
    (tmp_path / "site-packages" / "configs").mkdir()  # of some other package
    monkeypatch.setattr(resources, "_PACKAGE", package)
    assert (
        find_preset("runs", "quickstart") == package / "_resources" / "configs" / "runs" / "quickstart.yaml"
    )


def test_missing_presets_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "ms_zero")
    with pytest.raises(UserError, match="install ms_zero again"):
        config_dir()


@pytest.mark.parametrize(
    "name", ["gpt-tinny", "", "../models/gpt-tiny", "gpt-tiny\n", "a/b", "x" * 5000, "\0", ".."]
)
def test_an_unknown_name_is_one_line(name):
    with pytest.raises(UserError, match="no preset") as caught:
        find_preset("models", name)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_suggestions():
    assert nearest("stpes", ["steps", "seed"]) == ["steps"]
    assert did_you_mean("stpes", ["steps", "seed"]) == "; did you mean steps?"
    assert did_you_mean("zzz", ["steps", "seed"]) == "; known: steps, seed"
    assert did_you_mean("zzz", []) == ""
