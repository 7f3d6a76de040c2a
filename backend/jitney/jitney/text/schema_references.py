"""Finds what the references of a JSON schema point to: by JSON pointer, ``$anchor`` or ``$id``.

Made by ``json_schema`` for each schema that it checks. llguidance resolves the references again
when it compiles the schema, so they must be resolved here as it does.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

# Keywords by what their value is: a schema, a list of schemas, or an object of schemas. ``items``
# may also be a list, which is what ``prefixItems`` was before 2020-12.
WITH_SCHEMA = ("items", "additionalItems", "additionalProperties")
WITH_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
WITH_OBJECT = ("properties", "patternProperties", "$defs", "definitions")
DEFINITIONS = ("$defs", "definitions")

_ALSO_WITH_SCHEMA = (
    "not", "if", "then", "else", "contains", "propertyNames", "contentSchema",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
"""These are not enforced, but a reference may point into their schemas."""
_NEWEST_DRAFT = 2020
_DIALECTS = {
    4: "http://json-schema.org/draft-04/schema",
    6: "http://json-schema.org/draft-06/schema",
    7: "http://json-schema.org/draft-07/schema",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}


class InnerSchema(NamedTuple):
    """A schema directly inside another one."""

    keyword: str
    pointer: str
    """JSON pointer from the outer schema, such as ``properties/a``."""
    schema: Any


class Dialect(NamedTuple):
    """A draft of JSON Schema."""

    draft: int
    """A number such as 7 or 2020."""
    name: str
    """The value of ``$schema`` in its schemas."""


class _Scope(NamedTuple):
    """What a schema takes over from the schemas around it."""

    base: str
    """The URI that its references are relative to; empty if there is no ``$id`` around it."""
    draft: int


class References:
    """The references of one schema, ``root``."""

    def __init__(self, root: Any) -> None:
        # By id(), because a dictionary cannot be a key.
        self._scopes: dict[int, _Scope] = {}
        # Keeps these schemas alive, even those that the check takes out of the root: else another
        # object could get the id of one that is gone.
        self._noted: list[Any] = []
        self._resources: dict[str, Any] = {"": root}  # by URI
        self._anchors: dict[tuple[str, str], Any] = {}  # by URI and name
        self._note(root, _Scope("", _NEWEST_DRAFT))

    def draft_of(self, schema: dict[str, Any]) -> int:
        """The draft that says which keywords the schema may have: a number such as 7 or 2020.
        ``schema`` is a part of the root, or was found by a reference."""
        return self._scopes[id(schema)].draft

    def knows(self, schema: dict[str, Any]) -> bool:
        """Whether ``schema`` is the root or a part of it."""
        return id(schema) in self._scopes

    def find(self, schema: dict[str, Any], reference: str) -> Any:
        """What a reference in ``schema`` points to; None if that is nothing in the root."""
        uri, fragment = self._divided(schema, reference)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((uri, fragment))
        found = self._resources.get(uri)
        for name in fragment.split("/")[1:]:
            found = _value_at(found, name.replace("~1", "/").replace("~0", "~"))
        if isinstance(found, dict) and id(found) not in self._scopes:
            # It stands in the value of a keyword that holds no schemas.
            self._note(found, _Scope(uri, self._scopes[id(schema)].draft))
        return found

    def absolute(self, schema: dict[str, Any], reference: str) -> str:
        """The same reference as an absolute one. llguidance is given no relative ones: if it
        follows a reference from schema A to schema B, it takes those in B as relative to A."""
        uri, fragment = self._divided(schema, reference)
        return f"{uri}#{fragment}"

    def _divided(self, schema: dict[str, Any], reference: str) -> tuple[str, str]:
        """The absolute URI and the fragment of a reference in ``schema``."""
        base = self._scopes[id(schema)].base
        uri, _, fragment = reference.partition("#")
        if uri:
            return _joined(base, uri), fragment
        return base, fragment

    def _note(self, schema: Any, outer: _Scope) -> None:
        """Note the scopes of a schema and of all inside it, and by which names they can be
        found."""
        if not isinstance(schema, dict):
            return
        scope = self._note_names(schema, outer)
        self._scopes[id(schema)] = scope
        self._noted.append(schema)
        for inner in inner_schemas(schema):
            self._note(inner.schema, scope)
        for keyword in _ALSO_WITH_SCHEMA:
            self._note(schema.get(keyword), scope)

    def _note_names(self, schema: dict[str, Any], outer: _Scope) -> _Scope:
        """Note by which names a schema can be found. Returns its scope."""
        draft = outer.draft
        named = find_dialect(schema.get("$schema"))
        if named is not None:
            draft = named.draft
        base = outer.base
        identifier = schema.get("$id")
        # Up to draft 7, what stands beside a reference does not count.
        does_count = draft > 7 or "$ref" not in schema
        if isinstance(identifier, str) and does_count:
            uri, _, name = identifier.partition("#")
            if uri:
                base = _joined(base, uri)
                self._resources[base] = schema
            if name:  # up to draft 7, this was an anchor
                self._anchors[base, name] = schema
        anchor = schema.get("$anchor")
        if isinstance(anchor, str):
            self._anchors[base, anchor] = schema
        return _Scope(base, draft)


def inner_schemas(schema: dict[str, Any]) -> Iterator[InnerSchema]:
    """The schemas directly inside a schema. Values that are of the wrong type have none."""
    for keyword, value in schema.items():
        is_list = keyword in WITH_LIST or keyword == "items"
        if is_list and isinstance(value, list):
            for index, part in enumerate(value):
                yield InnerSchema(keyword, f"{keyword}/{index}", part)
        elif keyword in WITH_SCHEMA:
            yield InnerSchema(keyword, keyword, value)
        elif keyword in WITH_OBJECT and isinstance(value, dict):
            for name, part in value.items():
                yield InnerSchema(keyword, f"{keyword}/{escaped(name)}", part)


def find_dialect(name: Any) -> Dialect | None:
    """What the value of ``$schema`` names; None if that is none of JSON Schema's drafts. People
    write the names with either scheme, and with ``#`` at the end or without."""
    if not isinstance(name, str):
        return None
    wanted = name.removesuffix("#").removeprefix("https").removeprefix("http")
    for draft, known in _DIALECTS.items():
        if wanted == known.removeprefix("https").removeprefix("http"):
            return Dialect(draft, known)
    return None


def escaped(name: str) -> str:
    """A name in a JSON pointer, shortened."""
    return name[:64].replace("~", "~0").replace("/", "~1")


def _joined(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:
        return uri  # no URI, such as "http://[", which llguidance refuses


def _value_at(value: Any, name: str) -> Any:
    """A value of an object by its name, or of a list by its index. None: there is none."""
    if isinstance(value, dict):
        return value.get(name)
    if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return None
