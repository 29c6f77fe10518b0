"""Who acts, on which message, under which budget: one module per concern.

Owns the loops of a host. It never writes SQL and never composes itself: `runtime` does. An actor never imports
another actor; what they share is in `actors.core`.
"""

__runlane__ = "0.1.0"
