"""Finds the parts of a JSON schema that no finite JSON fits, because their references lead in
circles, and takes out those that need not be there: a model that begins one could not end it.

Called by ``json_schema`` after its check, and by the gateway for grammars that it makes itself.
"""

from collections.abc import Iterator
from typing import Any

from jitney.text.schema_references import References, inner_schemas

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_BOUNDS = {
    "object": ("minProperties", "maxProperties"),
    "array": ("minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "number": ("minimum", "maximum"),
    "integer": ("minimum", "maximum"),
}
"""Type -> its lower and its upper bound."""
_MAY_BE_ABSENT = ("additionalProperties", "patternProperties", "items", "additionalItems")
"""Keywords whose schemas are about what need not be there: such a schema may become ``false``."""


def leave_out_infinite(schema: Any, references: References) -> bool:
    """Put ``false`` in the place of each schema inside ``schema`` that no finite instance fits and
    that need not be fit: of an optional property, of items, of a branch. That means the same, for
    no JSON is infinite.

    Returns whether some finite instance may fit ``schema``. It may not if references lead in
    circles, or to the schema ``false``; for other reasons why nothing fits True is returned.
    """
    search = _Search(references, with_bounds=True)
    search.look_at(schema)
    if not search.is_finite(schema):
        # The grammar's compiler says which bounds contradict each other.
        search = _Search(references, with_bounds=False)
        search.look_at(schema)
        return search.is_finite(schema)
    for each in search.schemas:
        if search.is_finite(each):
            _leave_out_in(each, search)
    return True


class _Search:
    """Looks at one root schema. ``with_bounds``: a schema whose bounds contradict each other, or
    whose list of values is empty, is not finite either."""

    def __init__(self, references: References, *, with_bounds: bool) -> None:
        self._references = references
        self._with_bounds = with_bounds
        self.schemas: list[dict[str, Any]] = []
        """The root, and all that it leads to."""
        # Schemas that are known to be finite, by id(): they are dictionaries, which no set can
        # hold, and the root keeps all of them alive.
        self._finite: set[int] = set()
        self._looked_at: set[int] = set()

    def look_at(self, root: Any) -> None:
        """Find all finite schemas. A schema in a circle counts as infinite until it is found to be
        finite without itself; so all are looked at until no more are found."""
        self.schemas = list(self._reachable(root))
        num_before = -1
        while len(self._finite) > num_before:
            num_before = len(self._finite)
            self._looked_at = set()
            for schema in self.schemas:
                self._look(schema)

    def is_finite(self, schema: Any) -> bool:
        """Whether some finite instance may fit a schema that was looked at."""
        return id(schema) in self._finite if isinstance(schema, dict) else schema is not False

    def _reachable(self, root: Any) -> Iterator[dict[str, Any]]:
        left = [root]
        found: set[int] = set()
        while left:
            schema = left.pop()
            if not isinstance(schema, dict) or id(schema) in found:
                continue
            found.add(id(schema))
            yield schema
            left += [inner.schema for inner in inner_schemas(schema)]
            if "$ref" in schema:
                left.append(self._references.find(schema, schema["$ref"]))

    def _look(self, schema: Any) -> bool:
        """Whether a schema is finite, as far as is known in this round."""
        if not isinstance(schema, dict) or id(schema) in self._finite:
            return schema is not False
        if id(schema) in self._looked_at:
            return False
        self._looked_at.add(id(schema))
        finite = (
            ("$ref" not in schema or self._look(self._references.find(schema, schema["$ref"])))
            and self._branches_are_finite(schema)
            and self._some_type_is_finite(schema)
        )
        if finite:
            self._finite.add(id(schema))
        return finite

    def _branches_are_finite(self, schema: dict[str, Any]) -> bool:
        """Whether all branches of ``allOf`` are finite, and one of ``anyOf`` and of ``oneOf``."""
        if not all(self._look(branch) for branch in schema.get("allOf", ())):
            return False
        for name in ("anyOf", "oneOf"):
            if name in schema and not any(self._look(branch) for branch in schema[name]):
                return False
        return True

    def _some_type_is_finite(self, schema: dict[str, Any]) -> bool:
        """Whether one of the schema's types has a finite instance."""
        if self._with_bounds and schema.get("enum") == []:
            return False
        types = schema.get("type", _TYPES)
        if isinstance(types, str):
            types = [types]
        return any(self._type_is_finite(kind, schema) for kind in types)

    def _type_is_finite(self, kind: str, schema: dict[str, Any]) -> bool:
        """Whether a type has a finite instance."""
        if self._with_bounds and kind in _BOUNDS:
            least, most = (schema.get(name) for name in _BOUNDS[kind])
            if least is not None and most is not None and least > most:
                return False
        if kind == "object":
            return self._object_is_finite(schema)
        if kind == "array":
            return all(self._look(part) for part in _needed_items(schema))
        return True

    def _object_is_finite(self, schema: dict[str, Any]) -> bool:
        """Whether the properties that an object must have are finite."""
        required = schema.get("required", ())
        named = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        additional = schema.get("additionalProperties", True)
        # The schema of required properties that "properties" does not name. If there are patterns,
        # such a property may match one of them. Nobody looks whether it does: it counts as finite,
        # so its schema is ``True``.
        of_unnamed = True if patterns else additional
        for name in required:
            if not self._look(named.get(name, of_unnamed)):
                return False
        if schema.get("minProperties", 0) <= len(required):
            return True
        # The object needs further properties. It counts as finite if some of these may be.
        others = [part for name, part in named.items() if name not in required]
        others += [*patterns.values(), additional]
        return any(self._look(part) for part in others)


def _needed_items(schema: dict[str, Any]) -> list[Any]:
    """The schemas of the items that an array must have."""
    first = schema.get("prefixItems", [])
    rest = schema.get("items", True)
    if isinstance(rest, list):  # as prefixItems was called before 2020-12
        first = rest
        rest = schema.get("additionalItems", True)
    least = schema.get("minItems", 0)
    needed = list(first[:least])
    return [*needed, rest] if least > len(first) else needed


def _leave_out_in(schema: dict[str, Any], search: _Search) -> None:
    """Put ``false`` in the place of the infinite schemas that are directly inside a finite one."""
    required = schema.get("required", ())
    named = schema.get("properties", {})
    for name, part in named.items():
        if name not in required and not search.is_finite(part):
            named[name] = False
    for keyword in _MAY_BE_ABSENT:
        part = schema.get(keyword)
        if keyword == "patternProperties" and part is not None:
            for pattern, inner in part.items():
                if not search.is_finite(inner):
                    part[pattern] = False
        elif isinstance(part, dict) and not search.is_finite(part):
            schema[keyword] = False
    for keyword in ("anyOf", "oneOf", "prefixItems", "items"):
        parts = schema.get(keyword)
        if isinstance(parts, list):
            parts[:] = [part if search.is_finite(part) else False for part in parts]
