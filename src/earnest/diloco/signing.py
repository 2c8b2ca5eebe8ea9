"""Signed deltas: with ``sync.signers`` a delta of replica i counts only if it is signed with the key of number i.

    signature = Ed25519(private key i, sha256(meta without signature, as JSON) ‖ sha256(payload))

The meta names the round, the replica and the state that the delta starts from, so a signature cannot be used again. The
public keys are part of the run's config; each replica reads its private key from the file in $EARNEST_SIGNING_KEY, in
whose name {replica} stands for its number.

    python -m earnest.diloco.signing KEY_FILE     make a key; print its public part for sync.signers
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earnest.errors import ConfigError, MissingExtra
from earnest.store import Damaged, Object

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VARIABLE = "EARNEST_SIGNING_KEY"


@dataclass(frozen=True)
class Signatures:
    """The public keys by replica number, and this process's private key where it has one."""

    signers: tuple[str, ...]
    key: Ed25519PrivateKey | None = None

    def sign(self, payload: bytes, meta: Mapping[str, Any]) -> str:
        assert self.key is not None, "a replica reads its key before it trains"
        return self.key.sign(_message(payload, meta)).hex()

    def check(self, found: Object, replica: int) -> Object:
        """The object; ``Damaged`` if it is not signed with the key of this replica's number."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        if replica >= len(self.signers):
            raise Damaged(f"{found.key}: sync.signers has no key of replica {replica}")
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.signers[replica]))
            key.verify(bytes.fromhex(str(found.meta.get("signature", ""))), _message(found.payload, found.meta))
        except (InvalidSignature, ValueError):
            raise Damaged(f"{found.key} is not signed with the key of replica {replica}") from None
        if found.meta.get("replica") != replica:
            raise Damaged(f"{found.key} was signed as another replica's")
        return found


def signatures(signers: Sequence[str] | None, replica: int | None = None) -> Signatures | None:
    """What checks the deltas of a run, and for a replica also signs; None for a run without signers."""
    if signers is None:
        return None
    if replica is None:
        return Signatures(tuple(signers))
    place = os.environ.get(VARIABLE)
    if not place:
        raise ConfigError(f"sync.signers: deltas are signed; set ${VARIABLE} to the file with this replica's key.")
    place = place.replace("{replica}", str(replica))
    key = _read(Path(place))
    if replica >= len(signers) or public(key) != signers[replica]:
        raise ConfigError(
            f"${VARIABLE}={place}: its public key is not that of replica {replica} in sync.signers; start it with the "
            "number of its key (`earnest worker URL --replica N`), or correct sync.signers."
        )
    return Signatures(tuple(signers), key)


def public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def make_key(place: Path) -> str:
    """Write a new private key that only its owner can read; returns the public one."""
    key = _ed25519().generate()
    handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(key.private_bytes_raw().hex() + "\n")
    return public(key)


def _read(place: Path) -> Ed25519PrivateKey:
    try:
        return _ed25519().from_private_bytes(bytes.fromhex(place.read_text().strip()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"${VARIABLE}={place} is not a key ({error}); make one with `python -m earnest.diloco.signing FILE`."
        ) from None


def _ed25519() -> type[Ed25519PrivateKey]:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise MissingExtra("cryptography", "diloco", "signed deltas") from None
    return Ed25519PrivateKey


def _message(payload: bytes, meta: Mapping[str, Any]) -> bytes:
    kept = {key: value for key, value in meta.items() if key != "signature"}
    text = json.dumps(kept, sort_keys=True).encode()
    return hashlib.sha256(text).digest() + hashlib.sha256(payload).digest()


if __name__ == "__main__":
    print(make_key(Path(sys.argv[1])))
