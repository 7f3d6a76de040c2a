"""Addresses without their keys.

An address may hold a key: ``s3://KEY:SECRET@bucket/in``, ``http://USER:PASSWORD@host``, or a signed
URL. Whatever is stored or shown of an address has gone through here: the journal, errors, status,
report and metrics.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from urllib.parse import unquote_plus

from jitney.errors import JitneyError

_ADDRESS = re.compile(r"""\b([A-Za-z][A-Za-z0-9+.-]*)://([^\s'"<>`]+)""")
_NAME_OF_A_KEY = re.compile(
    r"key|secret|token|sig$|signature|cred|pass|pwd|auth|sas|jwt|bearer|session", re.IGNORECASE
)
"""Parameters of an address that hold a key: ``access_key``, ``X-Amz-Signature``, ``sig`` and so on.
A harmless parameter that is taken for one is left out, too."""
_NAMES_NO_KEY = ("s3", "s3a", "s3n", "http", "https", "grpc", "grpcs")
"""Schemes in which a word before ``@`` is a key, or belongs to one. In others it may be part of the
name: ``abfss://container@account/…``, ``hdfs://user@host/…``, ``gs://anonymous@bucket/…``."""


def without_keys(address: str) -> str:
    """The address, or the path, without what it holds of keys. It still opens the same place, if
    the keys come from elsewhere."""
    match = _ADDRESS.match(address)
    if match is None:
        return address
    # What a blank or a quote ends in running text belongs to an address that stands alone.
    return f"{match[1]}://{_rest_without_keys(match[1], address[match.start(2) :])}"


def text_without_keys(text: str) -> str:
    """A text, such as an error's, in which every address is without its keys."""
    if "://" not in text:
        return text
    return _ADDRESS.sub(lambda match: f"{match[1]}://{_rest_without_keys(*match.groups())}", text)


def name_of_output(output: str) -> str:
    """The last word of a path or address, without its parameters."""
    if "://" in output:
        output = without_keys(output).partition("?")[0]
    return PurePosixPath(output).name


@contextmanager
def errors_without_keys() -> Iterator[None]:
    """Around what raises errors that a user sees: their texts are without keys."""
    try:
        yield
    except JitneyError as error:
        error.args = tuple(
            text_without_keys(part) if isinstance(part, str) else part for part in error.args
        )
        raise


def _rest_without_keys(scheme: str, rest: str) -> str:
    """``rest``: what stands behind ``://``."""
    place, question_mark, query = rest.partition("?")
    place = _place_without_keys(scheme.lower(), place)
    if not question_mark:
        return place
    query, hash_mark, fragment = query.partition("#")
    kept = "&".join(item for item in query.split("&") if not _holds_key(item))
    return f"{place}{'?' if kept else ''}{kept}{hash_mark}{fragment}"


def _holds_key(item: str) -> bool:
    """Whether ``name=value`` is a key."""
    return _NAME_OF_A_KEY.search(unquote_plus(item.partition("=")[0])) is not None


def _place_without_keys(scheme: str, place: str) -> str:
    authority = place.partition("/")[0]
    before, at, host = authority.rpartition("@")
    if not at:
        # A secret may have a slash that is not written as %2F. Arrow refuses such an address, and
        # its error shows it. What follows a host's colon is a number.
        name, colon, port = authority.partition(":")
        is_key = colon and not port.isdecimal() and "@" in place and not name.startswith("[")
        return place.rpartition("@")[2] if is_key else place
    rest = place[len(authority) :]
    user, colon, _ = before.partition(":")
    if scheme in _NAMES_NO_KEY or not user:
        return f"{host}{rest}"
    # Without a colon there is no password; `user` is then all that stands before the sign.
    return f"{user}@{host}{rest}"
