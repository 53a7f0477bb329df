"""The command line requests growing segments from torch, and respects the user's setting."""

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
    """Before anything is built, also for the workers that the commands start."""
    env, module = {}, importlib.import_module("lightning_dilated.cli.main")
    monkeypatch.setattr(module.os, "environ", env)
    monkeypatch.setattr(module, "with_recipes", lambda argv: (_ for _ in ()).throw(KeyError(dict(env))))
    with pytest.raises(KeyError, match="expandable_segments:True"):
        module.main(["fit"])
