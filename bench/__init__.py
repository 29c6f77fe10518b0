"""The benchmark harness: how fast the whole lifecycle is, beside the bare kernel."""

__runlane__ = "0.1.0"
