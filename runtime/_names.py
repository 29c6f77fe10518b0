"""Makes sure that `sql`, `actors` and `runtime` are runlane's own and not a folder of the user's.

Owns that check alone. The names are short and common, and Python looks in the working directory first: a
stray `sql/` there would otherwise end in an error that nobody understands.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

_PACKAGES = ("sql", "actors", "runtime")


def check() -> None:
    """Raise a one-line ImportError if a package of that name shadows ours or is another version's."""
    ours = importlib.import_module("runtime").__runlane__
    for name in _PACKAGES:
        module = importlib.import_module(name)
        theirs = getattr(module, "__runlane__", None)
        if theirs != ours:
            problem = "shadows it" if theirs is None else f"belongs to runlane {theirs}"
            message = f"runlane {ours} needs its own package {name!r}, but {_place(module)} {problem}"
            raise ImportError(f"{message}: rename that or start from another folder", name=name)


def _place(module: ModuleType) -> str:
    """The folder of a package, or the file of a plain module."""
    if module.__file__ is None:  # a folder without __init__.py
        return next(iter(module.__path__))
    file = Path(module.__file__)
    return str(file.parent if file.name == "__init__.py" else file)
