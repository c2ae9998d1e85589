"""JSON files that show whether they were changed: a document and the SHA-256 of it."""

from __future__ import annotations

import hashlib
import json

from etude.core.trees import Tree

SEAL = "seal"


def sealed(document: Tree) -> bytes:
    """A document as JSON text that any changed byte shows in."""
    return _encode({**document, SEAL: _hash(document)})


def unsealed(data: bytes, must: bool = False) -> Tree:
    """The document in `data`; raises `ValueError` with the end of the sentence "<file> ...".

    One that never had a seal is taken as it is, since files had none before; with `must` it is
    refused: a seal shows that the file is Etude's.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not valid JSON") from error
    if not isinstance(document, dict):
        raise ValueError("is not a JSON object")
    if not must and SEAL not in document and not any(map(_is_seal, document.items())):
        return document
    seal = document.pop(SEAL, None)
    # The hash is that of the text without the line of the seal, which needs no slow encoding.
    if hashlib.sha256(data.replace(f' "{SEAL}": "{seal}",\n'.encode(), b"", 1)).hexdigest() == seal:
        return document
    if seal != _hash(document) or data != _encode({**document, SEAL: seal}):
        raise ValueError("was changed after it was written")
    return document


def _is_seal(entry: tuple[str, object]) -> bool:
    """Whether this is a seal, also one whose name was changed."""
    name, value = entry
    return len(name) == len(SEAL) and isinstance(value, str) and len(value) == 64


def _encode(document: Tree) -> bytes:
    return (json.dumps(document, sort_keys=True, indent=1, default=repr) + "\n").encode()


def _hash(document: Tree) -> str:
    return hashlib.sha256(_encode(document)).hexdigest()
