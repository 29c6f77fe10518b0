"""The log format of a hosting process.

Owns one formatter and its installation on the root logger. It never chooses what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class KeyValueFormatter(logging.Formatter):
    """One line per event: ``time=… level=… logger=…``, then the message, which is key=value pairs itself.

    A message that is not, from another library, becomes ``message="…"``; a traceback becomes one quoted field.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of one record."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = record.getMessage()
        if not record.name.startswith("runlane") or "\n" in text:
            text = f"message={json.dumps(text, ensure_ascii=False)}"
        line = f"time={moment} level={record.levelname.lower()} logger={record.name} {text}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += f" traceback={json.dumps(trace, ensure_ascii=False)}"
        return line


def configure(level: str) -> None:
    """Send everything from ``level`` up to stderr, in place of what was configured before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
