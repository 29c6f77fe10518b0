"""``python -m runtime``: the command line."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:] == ["runner"]:
        # What every sandbox starts: without the rest of the command line it is there sooner.
        from runtime.runner import main
    else:
        from runtime.cli import main
    main()
