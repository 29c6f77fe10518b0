"""Payloads that only hosts and clients with the key can read: ``pip install cryptography``.

    codec = SealedCodec(FernetSeal([key]))   # key = Fernet.generate_key(), from your secret store
    async with Runtime.open(config, plays=[…], codec=codec) as rt: …

Every runtime and client that touches the runs needs the codec: hosts to run plays, clients to submit and to read
results. What was stored before stays readable. To change the key put the new one in front; drop the old one when no
run that was written with it is needed any more.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken, MultiFernet


class FernetSeal:
    """AES-128 in CBC mode with HMAC-SHA256 (Fernet). The first of ``keys`` writes, each of them reads."""

    name = "fernet"

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._fernet = MultiFernet([Fernet(key) for key in keys])
        # A key of its own for telling equal payloads, so that the digests say nothing about the other one.
        self._digest_key = hmac.digest(keys[0], b"runlane: equal payloads", "sha256")

    def seal(self, text: bytes) -> str:
        """JSON text, encrypted."""
        return self._fernet.encrypt(text).decode()

    def unseal(self, sealed: str) -> bytes:
        """The JSON text again."""
        try:
            return self._fernet.decrypt(sealed)
        except InvalidToken:
            raise ValueError("none of the keys fits") from None

    def same(self, text: bytes) -> str:
        """Equal for equal texts under one key: a submit is repeated safely until the key changes."""
        return hmac.new(self._digest_key, text, hashlib.sha256).hexdigest()
