# SPDX-License-Identifier: Apache-2.0
"""Makes a public dataclass a pytree that exported programs take and return."""

import ast
import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

import jax
from jax import export

_Class = TypeVar("_Class", bound=type[Any])


def as_pytree(cls: _Class, module: str, static: Collection[str] = ()) -> _Class:
    """Make a dataclass a pytree, with a name in files that `jax.export` writes.

    Args:
      cls: the dataclass.
      module: the public module that has it, as ``"jax_cudnn.moe"``.
      static: the fields that are no arrays, but numbers, strings, None or tuples.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    jax.tree_util.register_dataclass(
        cls,
        data_fields=[name for name in names if name not in static],
        meta_fields=[name for name in names if name in static],
    )
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"{module}.{cls.__name__}",
        serialize_auxdata=lambda values: repr(values).encode(),
        deserialize_auxdata=lambda data: ast.literal_eval(data.decode()),
    )
    return cls
