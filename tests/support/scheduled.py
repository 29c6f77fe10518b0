"""A play and its schedules, for hosts that tests start as processes of their own."""

from __future__ import annotations

from typing import Any

from runtime import Context, Schedule, play


@play("tick")
async def tick(ctx: Context, data: Any) -> Any:
    """Gives its input back."""
    return data


secondly = Schedule("secondly", tick, 7, every_s=1)
new_year = Schedule("new-year", tick, cron="0 0 1 1 *", timezone="Europe/Berlin")
