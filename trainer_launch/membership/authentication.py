"""How the two ends of a connection prove that they know the job's secret, and sign what they say from then on.

Without a secret, lines are as they are. With one, the server's Challenge and the client's proof each bring random
bytes. Both ends derive two keys from these and the secret, one for each direction. From then on each line is
`SIGNATURE JSON`. The signature covers the line's number: a line that was changed, repeated or moved ends the
connection at once, one that was left out does so with the next line. Its first signature proves the server.
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from trainer_launch import __version__
from trainer_launch.model.codec import MAX_LINE_BYTES, MessageError, encode

WRONG_SECRET = "its secret differs from the job's"
NO_SECRET = "the job has a secret, and none was shown; mount the job's Secret in all pods"
_SIGNED = "signed:"  # begins the challenge of a server that signs; those before 0.2 do not
_SIGNATURE_BYTES = 16  # half of a SHA-256, written as twice as many characters
MAX_SIGNED_BYTES = MAX_LINE_BYTES + 2 * _SIGNATURE_BYTES + 1
_PROOF, _FROM_CLIENT, _FROM_SERVER = "proof", "from the client", "from the server"


class FirstMessage(Protocol):
    """A client's first message, with the proof that it knows the secret."""

    @property
    def proof(self) -> str | None:
        """The proof, as `Channel.introduced` makes it."""


_F = TypeVar("_F", bound=FirstMessage)


class SignatureError(MessageError):
    """A line is not signed as the other end would sign its next one."""


def _signature(key: bytes, number: int, line: bytes) -> bytes:
    """The signature of the line of this number in its direction."""
    digest = hmac.digest(key, number.to_bytes(8, "big") + line, "sha256")
    return digest[:_SIGNATURE_BYTES].hex().encode()


class Channel:
    """An end of a connection."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._nonce = ""
        self.has_proved_itself = False  # the other end has signed a line
        self._out = self._in = b""  # the keys of the two directions; empty: lines are not signed

    def challenge(self) -> str:
        """The server's demand of a proof; "" without a secret."""
        self._nonce = "" if self._secret is None else f"{_SIGNED}{secrets.token_hex(16)}"
        return self._nonce

    def admits(self, message: FirstMessage) -> bool:
        """Whether this message shows that the client knows the secret, if there is one; if so, lines are signed."""
        if self._secret is None:
            return True
        nonce, _, shown = (message.proof or "").partition(":")
        if not hmac.compare_digest(self._proof(nonce, message).encode(), shown.encode(errors="replace")):
            return False
        self._begin(nonce, out=_FROM_SERVER, into=_FROM_CLIENT)
        return True

    def challenged(self, nonce: str) -> str | None:
        """Take the server's challenge; why this server cannot prove that it knows the secret, if there is one."""
        self._nonce = nonce
        if self._secret is None or nonce.startswith(_SIGNED):
            return None
        if nonce:
            why = f"has trainer-launch 0.1, which signs no messages, and this node has {__version__}"
            return f"{why}; install the same version in all pods"
        return "has no secret, and this node has one; mount the job's Secret in all pods"

    def introduced(self, message: _F) -> _F:
        """The client's first message of who it is, with its proof; the lines after it are signed."""
        if self._secret is None:
            return message
        nonce = secrets.token_hex(16)
        proof = f"{nonce}:{self._proof(nonce, message)}"
        self._begin(nonce, out=_FROM_CLIENT, into=_FROM_SERVER)
        return replace(message, proof=proof)  # type: ignore[type-var]

    def sign(self, line: bytes) -> bytes:
        """A line with its newline, as it goes out."""
        if not self._out:
            return line
        self._n_out += 1
        return _signature(self._out, self._n_out, line) + b" " + line

    def check(self, line: bytes) -> bytes:
        """A line that has come, without its signature.

        Raises:
            SignatureError: the other end did not send it as its next one.
        """
        if not self._in:
            return line
        shown, _, text = line.partition(b" ")
        self._n_in += 1
        if not hmac.compare_digest(_signature(self._in, self._n_in, text.rstrip(b"\n") + b"\n"), shown):
            raise SignatureError("a message was changed, repeated or lost on the way: its signature is wrong")
        self.has_proved_itself = True
        return text

    def _proof(self, nonce: str, message: FirstMessage) -> str:
        """The proof of a message, over all of its content."""
        text = encode(replace(message, proof=None)).decode()  # type: ignore[type-var]
        return self._derived(_PROOF, nonce, type(message).__name__, text).hex()

    def _begin(self, nonce: str, *, out: str, into: str) -> None:
        self._out, self._in = self._derived(out, nonce), self._derived(into, nonce)
        self._n_out = self._n_in = 0  # signed lines so far

    def _derived(self, *parts: Any) -> bytes:
        text = json.dumps([self._nonce, *parts])  # without doubt where a part ends; ASCII, whatever strangers send
        return hmac.digest(self._secret or b"", text.encode(), "sha256")
