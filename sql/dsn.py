"""Reading a DSN: what the driver is given, and what a message may show.

Owns the differences between what libpq accepts and what the driver does. It never connects and never shows a
user or a password.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from sql.errors import InvalidDsn

# libpq settings that asyncpg does not know: sent as they are, the server would refuse them as parameters.
_LIBPQ_ONLY = frozenset(
    {
        "channel_binding",
        "connect_timeout",
        "fallback_application_name",
        "gssdelegation",
        "gssencmode",
        "keepalives",
        "keepalives_count",
        "keepalives_idle",
        "keepalives_interval",
        "load_balance_hosts",
        "require_auth",
        "sslcompression",
        "sslsni",
        "tcp_user_timeout",
    }
)


def known_to_driver(dsn: str) -> tuple[str, bool]:
    """The DSN without libpq-only settings, and whether it names several hosts."""
    try:
        parts = urlsplit(dsn)
        query = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError as exc:
        raise InvalidDsn(f"the DSN cannot be parsed: {exc}") from None
    if parts.scheme not in ("postgresql", "postgres"):
        raise InvalidDsn("the DSN must start with postgresql://")
    _check_ports(parts, dict(query))
    kept = [(key, value) for key, value in query if key not in _LIBPQ_ONLY]
    many = "," in parts.netloc.rpartition("@")[2] or any("," in v for k, v in kept if k == "host")
    if len(kept) == len(query):
        return dsn, many
    return urlunsplit(parts._replace(query=urlencode(kept))), many


def _check_ports(parts: SplitResult, query: Mapping[str, str]) -> None:
    """Refuse what is no port: the driver's own words do not say so, and it takes 70000 for 4464."""
    _, at, hosts = parts.netloc.rpartition("@")
    ports = [host.rpartition("]")[2].partition(":")[2] for host in hosts.split(",")]
    for port in (*ports, *query.get("port", "").split(",")):
        if port and not (port.isascii() and port.isdecimal()):
            if not at and "@" in parts.path + parts.query + parts.fragment:
                # What looks like a port may be the beginning of a password.
                raise InvalidDsn(
                    "in the DSN's user and password, / ? and # must be written as %2F, %3F and %23"
                )
            raise InvalidDsn(f"the DSN's port must be a number, not {port!r}")
        if port and not 1 <= int(port[:6]) <= 65_535:
            raise InvalidDsn(f"the DSN's port must be a number from 1 to 65535, not {port}")


def tls_mode(dsn: str) -> str | None:
    """TLS as the DSN says; else none towards this machine, and opportunistic towards others.

    Always explicit for a local server, because a cancellation opens a second connection, and one torn down in
    the middle of a needless TLS negotiation leaves stray errors behind.
    """
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query))
    if "sslmode" in query:
        return query["sslmode"]
    hosts = {
        host.partition(":")[0] for host in (query.get("host") or parts.netloc.rpartition("@")[2]).split(",")
    }
    if all(host.startswith("/") or host in ("", "localhost", "127.0.0.1") for host in hosts):
        return "disable" if hosts != {""} else None
    return None  # the driver's own default, or PGSSLMODE


def address(dsn: str) -> str:
    """Host and port (or socket folder) of a DSN, without user or password, for messages."""
    try:
        parts = urlsplit(dsn)
        query = dict(parse_qsl(parts.query))
    except ValueError:
        return "(unreadable DSN)"
    host = query.get("host") or parts.netloc.rpartition("@")[2] or "local socket"
    if ":" not in host and not host.startswith("/") and host != "local socket":
        host += f":{query.get('port', '5432')}"
    elif host.startswith("/") and "port" in query:
        host += f" port {query['port']}"
    return host
