"""Sandboxes: where detached plays work.

Owns the providers. Which sandbox is needed, who pays for it and when it has to go is the kernel's.
"""

from __future__ import annotations

from runtime.sandboxes.base import (
    Created,
    Inspection,
    SandboxProvider,
    SandboxRef,
    SandboxSpec,
)
from runtime.sandboxes.daytona import DaytonaProvider
from runtime.sandboxes.local import LocalProvider
from runtime.sandboxes.modal import ModalProvider
from runtime.sandboxes.ray_jobs import RayProvider

__all__ = [
    "Created",
    "DaytonaProvider",
    "Inspection",
    "LocalProvider",
    "ModalProvider",
    "RayProvider",
    "SandboxProvider",
    "SandboxRef",
    "SandboxSpec",
]
