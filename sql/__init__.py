"""The kernel: every table, transition and query of runlane.

Owns all SQL and the only door to the database. It never decides when something happens: callers in
``actors`` do. Nothing in here imports from ``actors`` or ``runtime``.
"""

__runlane__ = "0.1.0"
