"""What a JSON schema objects to: of JSON Schema the part that our own schema uses."""

import re

_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def complaints(value, schema, definitions, place="it"):
    """Yield a line for everything in `value` that `schema` does not allow."""
    schema = definitions[schema["$ref"]] if "$ref" in schema else schema
    kind = schema.get("type")
    # A bool is an int to Python, and not to JSON.
    if kind and not (
        isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")
    ):
        yield f"{place} must be of type {kind}, but is {value!r}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} must be one of {schema['enum']}, but is {value!r}"
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        yield f"{place} must match {schema['pattern']}, but is {value!r}"
    if value.__class__ is int and value < schema.get("minimum", value):
        yield f"{place} must be at least {schema['minimum']}, but is {value}"
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{place} must hold something"
        for index, item in enumerate(value):
            yield from complaints(item, schema["items"], definitions, f"{place}[{index}]")
    if isinstance(value, dict):
        yield from _of_object(value, schema, definitions, place)


def _of_object(value, schema, definitions, place):
    for name in schema.get("required", []):
        if name not in value:
            yield f"{place} must have {name}"
    for name, item in value.items():
        own = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
        if own:
            yield from complaints(item, own, definitions, f"{place}.{name}")
        else:
            yield f"{place} must not have {name}"
