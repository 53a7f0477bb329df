"""The command line sets torch's allocator to expandable segments, unless the user has set it."""

import importlib

import pytest

from lightning_dilated._device import NAMES, expandable_segments


@pytest.mark.parametrize("name", NAMES)
def test_the_users_own_settings_stay(name):
    env = {name: "max_split_size_mb:512"}
    expandable_segments(env)
    assert env == {name: "max_split_size_mb:512"}


def test_segments_grow():
    env = {}
    expandable_segments(env)
    assert env == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_commands_ask_for_them(monkeypatch):
    """The variable is set before a command builds anything, so the workers that it starts inherit the setting."""
    env, module = {}, importlib.import_module("lightning_dilated.cli.main")
    monkeypatch.setattr(module.os, "environ", env)
    monkeypatch.setattr(module, "with_recipes", lambda argv: (_ for _ in ()).throw(KeyError(dict(env))))
    with pytest.raises(KeyError, match="expandable_segments:True"):
        module.main(["fit"])
