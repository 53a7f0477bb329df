"""The command line asks torch for segments that grow, and leaves what the user asked for."""

import importlib
import os

import pytest

from lightning_dilated._device import NAMES, expandable_segments
from lightning_dilated.ext.planning import find_max
from lightning_dilated.ext.planning.find_max import Trials


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
    """Before anything is built, and for the workers that they start."""
    env, module = {}, importlib.import_module("lightning_dilated.cli.main")
    monkeypatch.setattr(module.os, "environ", env)
    monkeypatch.setattr(module, "with_recipes", lambda argv: (_ for _ in ()).throw(KeyError(dict(env))))
    with pytest.raises(KeyError, match="expandable_segments:True"):
        module.main(["fit"])


def test_trials_ask_for_them(tmp_path, monkeypatch):
    seen = {}
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(find_max.subprocess, "Popen", lambda command, env, **more: seen.update(env))
    Trials([], ranks=1)._start(tmp_path, 8, 0, 1)
    assert seen["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and "PYTORCH_ALLOC_CONF" not in os.environ
