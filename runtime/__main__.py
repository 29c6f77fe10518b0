"""``python -m runtime``: the command line."""

from __future__ import annotations

from runtime.cli import main

if __name__ == "__main__":
    main()
