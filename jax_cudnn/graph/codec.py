# SPDX-License-Identifier: Apache-2.0
"""The canonical JSON of a graph: equal graphs give equal bytes, here and in C++.

Keys are sorted, there is no white space, strings are ASCII, floats are printed with
"%.17g" (which Python and C agree on and which reads back to the same double). An
attribute that has its default is left out, so that a new attribute changes no text.
The reader takes nothing but what the writer writes: an unknown, missing, duplicate or
ill-typed field raises ``GraphError`` with the path of the field.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.kinds import NodeKind, kind_named
from jax_cudnn.graph.spec import (
    DTYPE_NAMES,
    SCHEMA,
    Attributes,
    AttributeValue,
    Graph,
    Node,
    Tensor,
)

# A parsed JSON value of any type; narrowed field by field below.
_Json = Any


def to_json(graph: Graph) -> str:
    """Return the canonical JSON text of the graph."""
    return _write(
        {
            "inputs": list(graph.inputs),
            "nodes": [_node_fields(node) for node in graph.nodes],
            "outputs": list(graph.outputs),
            "schema": SCHEMA,
            "tensors": [
                {
                    "dims": list(tensor.dims),
                    "dtype": tensor.dtype,
                    "name": tensor.name,
                    "order": list(tensor.order),
                }
                for tensor in graph.tensors
            ],
        }
    )


def from_json(text: str) -> Graph:
    """Return the graph that the text describes, or raise GraphError."""
    try:
        data = json.loads(
            text, object_pairs_hook=_unique_fields, parse_constant=_refuse_constant
        )
    except GraphError:
        raise
    except (ValueError, RecursionError) as error:  # more digits than int() takes, too
        raise GraphError(f"graph: not JSON: {error}") from None
    fields = _fields(data, "graph", "inputs", "nodes", "outputs", "schema", "tensors")
    schema = _integer(fields["schema"], "graph.schema")
    if schema != SCHEMA:
        raise GraphError(f"graph.schema: {schema} is not {SCHEMA}, the one known here")
    graph = Graph(
        tensors=tuple(
            _read_tensor(item, f"graph.tensors[{i}]")
            for i, item in enumerate(_list(fields["tensors"], "graph.tensors"))
        ),
        nodes=tuple(
            _read_node(item, f"graph.nodes[{i}]")
            for i, item in enumerate(_list(fields["nodes"], "graph.nodes"))
        ),
        inputs=_names(fields["inputs"], "graph.inputs"),
        outputs=_names(fields["outputs"], "graph.outputs"),
    )
    if to_json(graph) != text:
        raise GraphError("graph: the text is valid but not in canonical form")
    return graph


def _write(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _write_float(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=True)
    if isinstance(value, list | tuple):
        items = cast("list[object] | tuple[object, ...]", value)
        return f"[{','.join(_write(item) for item in items)}]"
    if isinstance(value, dict):
        pairs = sorted(cast("dict[str, object]", value).items())
        return f"{{{','.join(f'{_write(k)}:{_write(v)}' for k, v in pairs)}}}"
    raise TypeError(f"cannot write {type(value).__name__}")


def _write_float(value: float) -> str:
    if not math.isfinite(value):
        raise GraphError(f"attribute value {value} is not finite")
    return f"{value + 0.0:.17g}"  # -0.0 equals 0.0, so it is written alike


def _node_fields(node: Node) -> dict[str, object]:
    row = kind_named(node.kind).row
    values = {name: getattr(node.attributes, name) for name in row.attributes}
    attributes = {
        name: value
        for name, value in values.items()
        if value != row.attributes[name].default
    }
    return {
        "attributes": attributes,
        "inputs": dict(node.inputs),
        "kind": node.kind,
        "outputs": dict(node.outputs),
    }


def _unique_fields(pairs: list[tuple[str, _Json]]) -> dict[str, _Json]:
    result: dict[str, _Json] = {}
    for key, value in pairs:
        if key in result:
            raise GraphError(f"graph: field {key!r} appears twice in one object")
        result[key] = value
    return result


def _refuse_constant(text: str) -> None:
    raise GraphError(f"graph: {text} is not a finite number")


def _fields(data: _Json, path: str, *names: str) -> Mapping[str, _Json]:
    fields = _object(data, path)
    for name in fields:
        if name not in names:
            raise GraphError(f"{path}.{name}: unknown field")
    for name in names:
        if name not in fields:
            raise GraphError(f"{path}.{name}: missing field")
    return fields


def _object(data: _Json, path: str) -> dict[str, _Json]:
    if not isinstance(data, dict):
        raise GraphError(f"{path}: expected an object, got {_type_name(data)}")
    return cast("dict[str, _Json]", data)


def _list(data: _Json, path: str) -> list[_Json]:
    if not isinstance(data, list):
        raise GraphError(f"{path}: expected a list, got {_type_name(data)}")
    return cast("list[_Json]", data)


def _string(data: _Json, path: str) -> str:
    if not isinstance(data, str):
        raise GraphError(f"{path}: expected a string, got {_type_name(data)}")
    return data


def _integer(data: _Json, path: str) -> int:
    if isinstance(data, bool) or not isinstance(data, int):
        raise GraphError(f"{path}: expected an integer, got {_type_name(data)}")
    if not -(2**63) <= data < 2**63:
        raise GraphError(f"{path}: {data} does not fit in 64 bits")
    return data


def _names(data: _Json, path: str) -> tuple[str, ...]:
    return tuple(_string(x, f"{path}[{i}]") for i, x in enumerate(_list(data, path)))


def _integers(data: _Json, path: str) -> tuple[int, ...]:
    return tuple(_integer(x, f"{path}[{i}]") for i, x in enumerate(_list(data, path)))


def _type_name(data: _Json) -> str:
    if data is None:
        return "null"
    names: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names[type(data)]


def _read_tensor(data: _Json, path: str) -> Tensor:
    fields = _fields(data, path, "dims", "dtype", "name", "order")
    dtype = _string(fields["dtype"], f"{path}.dtype")
    if dtype not in DTYPE_NAMES:
        raise GraphError(f"{path}.dtype: {dtype!r} is not a known dtype")
    return Tensor(
        name=_string(fields["name"], f"{path}.name"),
        dtype=dtype,
        dims=_integers(fields["dims"], f"{path}.dims"),
        order=_integers(fields["order"], f"{path}.order"),
    )


def _read_node(data: _Json, path: str) -> Node:
    fields = _fields(data, path, "attributes", "inputs", "kind", "outputs")
    kind = kind_named(_string(fields["kind"], f"{path}.kind"))
    return Node(
        kind=kind.name,
        inputs=_read_roles(fields["inputs"], f"{path}.inputs"),
        outputs=_read_roles(fields["outputs"], f"{path}.outputs"),
        attributes=_read_attributes(fields["attributes"], kind, f"{path}.attributes"),
    )


def _read_roles(data: _Json, path: str) -> tuple[tuple[str, str], ...]:
    items = sorted(_object(data, path).items())
    return tuple((role, _string(name, f"{path}.{role}")) for role, name in items)


def _read_attributes(data: _Json, kind: NodeKind, path: str) -> Attributes:
    declared = kind.row.attributes
    given = _object(data, path)
    left_out = {
        name: field.default
        for name, field in declared.items()
        if field.default is not None and name not in given
    }
    fields = _fields(data, path, *(name for name in declared if name not in left_out))
    values = {
        name: _read_attribute(value, declared[name].type, f"{path}.{name}")
        for name, value in fields.items()
    }
    return kind.attributes(**values, **left_out)


def _read_attribute(data: _Json, declared: str, path: str) -> AttributeValue:
    if declared == "bool":
        if not isinstance(data, bool):
            raise GraphError(f"{path}: expected a boolean, got {_type_name(data)}")
        return data
    if declared == "integer":
        return _integer(data, path)
    if declared == "number":
        if isinstance(data, bool) or not isinstance(data, int | float):
            raise GraphError(f"{path}: expected a number, got {_type_name(data)}")
        # No float is written with so many digits and no exponent as to pass 64 bits.
        return data if isinstance(data, float) else float(_integer(data, path))
    if declared == "string":
        return _string(data, path)
    if declared == "strings":
        return _names(data, path)
    return _integers(data, path)
