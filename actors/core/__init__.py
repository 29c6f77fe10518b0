"""The machinery that every actor is built from.

Owns supervision, mailboxes, wake-ups, budgets and group commit. It never knows a concern: nothing in here has
heard of runs, facts or lanes.
"""

from __future__ import annotations

from actors.core.backoff import Backoff
from actors.core.batch import PASSING_FAULTS, Portion, commit_in_groups
from actors.core.budget import Budget
from actors.core.cleanup import bounded_cleanup
from actors.core.groups import hidden_by, leaves, only
from actors.core.health import ActorHealth
from actors.core.mailbox import EndOfMailbox, Mailbox, Reply
from actors.core.probes import Probe
from actors.core.shared import Together
from actors.core.supervisor import Actor, ActorEnded, ChildSpec, EscalatedActor, Life, Supervisor
from actors.core.turns import each_turn
from actors.core.wake import WakeFan, WakeFlag

__all__ = [
    "PASSING_FAULTS",
    "Actor",
    "ActorEnded",
    "ActorHealth",
    "Backoff",
    "Budget",
    "ChildSpec",
    "EndOfMailbox",
    "EscalatedActor",
    "Life",
    "Mailbox",
    "Portion",
    "Probe",
    "Reply",
    "Supervisor",
    "Together",
    "WakeFan",
    "WakeFlag",
    "bounded_cleanup",
    "commit_in_groups",
    "each_turn",
    "hidden_by",
    "leaves",
    "only",
]
