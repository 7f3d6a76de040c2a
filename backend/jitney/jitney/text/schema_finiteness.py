"""Finds JSON schemas that no finite JSON fits, because their references lead in circles.

Called by ``json_schema``, after its check: every reference of the schema points into it.
"""

from typing import Any

from jitney.text.schema_references import References

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def has_finite_instance(schema: Any, references: References) -> bool:
    """Whether some finite instance may fit. False if references lead in circles, or to the schema
    ``false``; other reasons why nothing fits are not looked for."""
    return _Search(references).is_finite(schema, frozenset())


class _Search:
    """Looks at one root schema. What is found to be finite is not looked at again."""

    def __init__(self, references: References) -> None:
        self._references = references
        # Schemas that are known to be finite, by id(): they are dictionaries, which no set can
        # hold, and the root keeps all of them alive.
        self._finite: set[int] = set()

    def is_finite(self, schema: Any, passed: frozenset[int]) -> bool:
        """``passed`` has the targets of the references that led from the root to here, by id(). A
        reference to one of these closes a circle, so no finite instance comes of it."""
        if not isinstance(schema, dict):
            return schema is not False
        if id(schema) in self._finite:
            return True
        finite = (
            self._target_is_finite(schema, passed)
            and self._branches_are_finite(schema, passed)
            and self._some_type_is_finite(schema, passed)
        )
        if finite:
            self._finite.add(id(schema))
        return finite

    def _target_is_finite(self, schema: dict[str, Any], passed: frozenset[int]) -> bool:
        reference = schema.get("$ref")
        if reference is None:
            return True
        target = self._references.find(schema, reference)
        if id(target) in passed:
            return False
        return self.is_finite(target, passed | {id(target)})

    def _branches_are_finite(self, schema: dict[str, Any], passed: frozenset[int]) -> bool:
        """Whether all branches of ``allOf`` are finite, and one of ``anyOf`` and of ``oneOf``."""
        if not all(self.is_finite(branch, passed) for branch in schema.get("allOf", ())):
            return False
        for name in ("anyOf", "oneOf"):
            if name not in schema:
                continue
            if not any(self.is_finite(branch, passed) for branch in schema[name]):
                return False
        return True

    def _some_type_is_finite(self, schema: dict[str, Any], passed: frozenset[int]) -> bool:
        """Whether one of the schema's types has a finite instance."""
        types = schema.get("type", _TYPES)
        if isinstance(types, str):
            types = [types]
        return any(self._type_is_finite(kind, schema, passed) for kind in types)

    def _type_is_finite(self, kind: str, schema: dict[str, Any], passed: frozenset[int]) -> bool:
        """Whether a type has a finite instance. Only objects and arrays may have none."""
        if kind == "object":
            return self._object_is_finite(schema, passed)
        if kind == "array":
            return self._array_is_finite(schema, passed)
        return True

    def _object_is_finite(self, schema: dict[str, Any], passed: frozenset[int]) -> bool:
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
            if not self.is_finite(named.get(name, of_unnamed), passed):
                return False
        if schema.get("minProperties", 0) <= len(required):
            return True
        # The object needs further properties. It counts as finite if some of these may be.
        others = [part for name, part in named.items() if name not in required]
        others += [*patterns.values(), additional]
        return any(self.is_finite(part, passed) for part in others)

    def _array_is_finite(self, schema: dict[str, Any], passed: frozenset[int]) -> bool:
        """Whether the items that an array must have are finite."""
        first = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if isinstance(rest, list):  # as prefixItems was called before 2020-12
            first = rest
            rest = schema.get("additionalItems", True)
        least = schema.get("minItems", 0)
        needed = first[:least]
        if least > len(first):
            needed = [*needed, rest]
        return all(self.is_finite(part, passed) for part in needed)
