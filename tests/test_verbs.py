"""The faces of the verbs: whoever adds a verb adds it to each."""

from __future__ import annotations

import inspect

import pytest

from runtime.api import Verbs
from runtime.sync import SyncVerbs
from runtime.thread import AsyncioVerbs


@pytest.mark.parametrize("face", [SyncVerbs, AsyncioVerbs])
def test_no_verb_is_missing(face: type) -> None:
    verbs = {
        name for name, verb in vars(Verbs).items() if inspect.iscoroutinefunction(verb) and name[0] != "_"
    }
    assert verbs - set(vars(face)) == set(), f"add them to {face.__module__}.{face.__qualname__}"
