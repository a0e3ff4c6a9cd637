# SPDX-License-Identifier: Apache-2.0
"""Attention as cuDNN takes it; axis letters and roles as in graph/sdpa.py.

What cuDNN's attention lacks is added around it:

* head sizes are padded with zeros to multiples of 8;
* a boolean mask becomes an additive bias;
* rows that see no key are given keys to see, so that the kernel meets no 0/0, and
  their result is set to 0 (log-sum-exp -inf, gradients 0) afterwards;
* the cotangent of the log-sum-exp rides in spare value columns (see
  ``_carry_grad_stats``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Node, Target, Tensor
from jax_cudnn.graph.kinds import roles_of
from jax_cudnn.graph.sdpa import SdpaAttributes
from jax_cudnn.legalize.rules import Legal, Legalization
from jax_cudnn.reference import evaluate
from jax_cudnn.reference.interpreter import jax_dtype

# Added to a hidden score: exp(it - any maximum) is 0, and it is finite in its dtype,
# so that no inf - inf arises inside the kernel.
_HIDDEN = {"bf16": -1e30, "f16": -6e4, "f32": -1e30}
# Stands for the log-sum-exp of a row that sees no key: exp(score - it) is 0.
_DEAD_STATS = 1e30
# cuDNN takes head sizes in multiples of 8 for 16-bit types (cudnn-frontend 1.28,
# scaled_dot_product_flash_attention.h, "hidden_dim should be multiple of 8").
_HEAD_MULTIPLE = 8

_Env = dict[str, jax.Array]


@dataclass(slots=True)
class _Rewrite:
    """A graph's tensors by role while they are being rewritten.

    ``before`` steps edit the operands in order; ``after`` steps edit the results, the
    last added first, and see the original operands too.
    """

    node: Node
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    before: list[Callable[[_Env], None]] = field(default_factory=lambda: [])
    after: list[Callable[[_Env, _Env], None]] = field(default_factory=lambda: [])
    notes: list[str] = field(default_factory=lambda: [])

    @property
    def roles(self) -> dict[str, Tensor]:
        return {**self.inputs, **self.outputs}

    def resize(self, role: str, axis: int, size: int) -> None:
        """Change one dimension of the tensor in that role, if it is there."""
        for table in (self.inputs, self.outputs):
            if role in table:
                dims = list(table[role].dims)
                dims[axis] = size
                table[role] = replace(table[role], dims=tuple(dims))


def legalize_forward(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a forward attention graph."""
    rewrite = _start(graph)
    if refusal := _refuse(rewrite, target):
        return refusal
    _keep_layout(rewrite)
    _hide_dead_rows(rewrite)
    _complete_lengths(rewrite, target)
    _mask_to_bias(rewrite)
    _pad_head(rewrite, ("query", "key"), 0)
    _pad_head(rewrite, ("value", "output"), 0)
    return Legalization(candidates=(_finish(graph, rewrite),))


def legalize_backward(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run an attention gradient graph, with fallbacks for dbias."""
    if refusal := _refuse(_start(graph), target):
        return refusal
    candidates: list[Legal] = []
    roles = _start(graph).roles
    if "grad_bias" not in roles or roles["bias"].dtype == roles["query"].dtype:
        candidates.append(_backward_candidate(graph, target))
    if "grad_bias" in roles:
        candidates.append(_bias_gradient_by_reference(graph, target))
    return Legalization(candidates=tuple(candidates))


def _backward_candidate(graph: Graph, target: Target | None) -> Legal:
    rewrite = _start(graph)
    _keep_layout(rewrite)
    _hide_dead_rows(rewrite)
    _complete_lengths(rewrite, target)
    _mask_to_bias(rewrite)
    _pad_single_query(rewrite)
    _pad_head(rewrite, ("query", "key"), 0)
    if "grad_stats" in rewrite.inputs:
        _carry_grad_stats(rewrite)
    else:
        _pad_head(rewrite, _VALUE_LIKE, 0)
    return _finish(graph, rewrite)


def _bias_gradient_by_reference(graph: Graph, target: Target | None) -> Legal:
    """Run the gradient without dbias in cuDNN and compute dbias by the reference."""
    index = graph.outputs.index(_name_of(graph, "grad_bias"))
    (node,) = graph.nodes
    reduced = Graph(
        tensors=tuple(t for t in graph.tensors if t.name != graph.outputs[index]),
        nodes=(
            Node.make(
                node.kind,
                dict(node.inputs),
                {r: n for r, n in node.outputs if r != "grad_bias"},
                node.attributes,
            ),
        ),
        inputs=graph.inputs,
        outputs=tuple(n for i, n in enumerate(graph.outputs) if i != index),
    )
    legal = _backward_candidate(reduced, target)
    bias = graph.tensor(_name_of(graph, "bias"))

    def after(
        operands: Sequence[jax.Array], results: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        gradients = list(legal.after(operands, results))
        # XLA removes the parts of the reference that only the other gradients need.
        gradients.insert(index, evaluate(graph, operands)[index])
        return tuple(gradients)

    note = (
        f"the gradient of bias {bias.dtype}{list(bias.dims)} is computed by XLA: cuDNN "
        f"has no plan for it; its memory grows with s*t"
    )
    return replace(legal, after=after, notes=(*legal.notes, note))


_VALUE_LIKE = ("value", "output", "grad_output", "grad_value")


# --- start and finish -----------------------------------------------------------------


def _start(graph: Graph) -> _Rewrite:
    (node,) = graph.nodes
    table = {tensor.name: tensor for tensor in graph.tensors}
    roles = roles_of(node, table)
    return _Rewrite(
        node=node,
        inputs={r: replace(roles[r], name=r) for r, _ in node.inputs},
        outputs={r: replace(roles[r], name=r) for r, _ in node.outputs},
    )


def _finish(graph: Graph, rewrite: _Rewrite) -> Legal:
    input_roles = {name: role for role, name in rewrite.node.inputs}
    output_roles = {name: role for role, name in rewrite.node.outputs}
    inputs, outputs = tuple(rewrite.inputs), tuple(rewrite.outputs)
    legal_graph = Graph(
        tensors=(*rewrite.inputs.values(), *rewrite.outputs.values()),
        nodes=(
            Node.make(
                rewrite.node.kind,
                {r: r for r in inputs},
                {r: r for r in outputs},
                rewrite.node.attributes,
            ),
        ),
        inputs=inputs,
        outputs=outputs,
    )

    def environment(operands: Sequence[jax.Array]) -> _Env:
        names = zip(graph.inputs, operands, strict=True)
        return {input_roles[name]: x for name, x in names}

    def before(operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        env = environment(operands)
        for step in rewrite.before:
            step(env)
        return tuple(env[role] for role in inputs)

    def after(
        operands: Sequence[jax.Array], results: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        env = environment(operands)
        by_role = dict(zip(outputs, results, strict=True))
        for step in reversed(rewrite.after):
            step(env, by_role)
        return tuple(by_role[output_roles[name]] for name in graph.outputs)

    return Legal(
        graph=legal_graph, before=before, after=after, notes=tuple(rewrite.notes)
    )


def _name_of(graph: Graph, role: str) -> str:
    (node,) = graph.nodes
    return dict((*node.inputs, *node.outputs))[role]


# --- refusals -------------------------------------------------------------------------


def _refuse(rewrite: _Rewrite, target: Target | None) -> Legalization | None:
    """Return the documented limits that the graph breaks, all of them."""
    reasons: list[str] = []
    roles = rewrite.roles
    query, value = roles["query"], roles["value"]
    if query.dtype not in ("bf16", "f16"):
        # Asked of cuDNN 9.19, 9.27 and 9.28 for sm_80, sm_90 and sm_100: f32 has no
        # backward plan in any, and no forward plan from 9.27 on.
        reasons.append(f"query is {query.dtype}; cuDNN's attention takes bf16 and f16")
    if "bias" in roles and roles["bias"].dtype not in (query.dtype, "f32"):
        reasons.append(
            f"bias is {roles['bias'].dtype}; cuDNN takes {query.dtype} or f32 here"
        )
    b, h, _, _ = query.dims
    # They are dimensions y and z of a launch grid (CUDA C++ Programming Guide, table
    # of technical specifications).
    if max(b, h) > 65535:
        reasons.append(f"batch {b} or heads {h} exceed 65535")
    if target is not None:
        reasons += _refuse_for(rewrite, target, query.dims[3], value.dims[3])
    if not reasons:
        return None
    return Legalization(reasons=tuple(reasons), advice=_ADVICE)


_ADVICE = (
    'Pass implementation="xla" (or "auto") to compute it with XLA, or change the '
    "operands as the reasons say."
)


def _refuse_for(rewrite: _Rewrite, target: Target, d: int, e: int) -> list[str]:
    reasons: list[str] = []
    if target.sm_version < 80:
        reasons.append(
            f"{target.name} is sm_{target.sm_version}; cuDNN's attention needs sm_80 "
            "(Ampere) or newer"
        )
    # cudnn-frontend refuses both (scaled_dot_product_flash_attention.h, "known bugs").
    if target.cudnn_version in (91000, 91001):
        reasons.append("cuDNN 9.10.0 and 9.10.1 have known attention bugs; use 9.10.2")
    if rewrite.node.kind == "sdpa_backward" and max(d, e) > 256:
        reasons.append(f"head sizes d={d}, e={e}; cuDNN's gradient takes at most 256")
    return reasons


# --- layout ---------------------------------------------------------------------------


def _keep_layout(rewrite: _Rewrite) -> None:
    """Bring the last axis to the end of storage, where cuDNN wants stride 1."""
    for table in (rewrite.inputs, rewrite.outputs):
        for role, tensor in table.items():
            if tensor.order[-1] != 3 and role not in _HANDLED_HERE:
                _restore(rewrite, table, role, tensor)


# Operands that cuDNN does not see as they are.
_HANDLED_HERE = ("mask", "query_lengths", "key_lengths")


def _restore(
    rewrite: _Rewrite, table: dict[str, Tensor], role: str, tensor: Tensor
) -> None:
    order = (*(axis for axis in tensor.order if axis != 3), 3)
    table[role] = replace(tensor, order=order)
    there = tuple(tensor.order.index(axis) for axis in order)
    back = tuple(order.index(axis) for axis in tensor.order)
    if table is rewrite.inputs:

        def before(env: _Env) -> None:
            env[role] = jnp.transpose(env[role], there)

        rewrite.before.append(before)
    else:

        def after(_: _Env, results: _Env) -> None:
            results[role] = jnp.transpose(results[role], back)

        rewrite.after.append(after)


def _stored(tensor: Tensor, logical: jax.Array) -> jax.Array:
    """Reorder an array that broadcasts to logical axes so it broadcasts to storage."""
    return jnp.transpose(logical, tensor.order)


# --- rows that see no key -------------------------------------------------------------


def _hide_dead_rows(rewrite: _Rewrite) -> None:
    """Give dead rows and hidden positions their defined result: 0, or -inf for stats.

    cuDNN leaves rows past a length as they were or as its version likes, and rows
    without keys as a mean of hidden values. Gradients must flow to neither: a huge
    log-sum-exp makes every probability of the row 0.
    """
    original = dict(rewrite.inputs)
    if not {"mask", "query_lengths", "key_lengths"} & set(original):
        return
    outputs = dict(rewrite.outputs)

    def before(env: _Env) -> None:
        for role, fill in (("stats", _DEAD_STATS), ("grad_stats", 0)):
            if role in env:
                is_live = _live_rows(rewrite, original, env)
                env[role] = _where(original[role], is_live, env[role], fill)

    def after(env: _Env, results: _Env) -> None:
        for role, fill in (("output", 0), ("stats", -jnp.inf)):
            if role in results:
                is_live = _live_rows(rewrite, original, env)
                results[role] = _where(outputs[role], is_live, results[role], fill)
        for length, sequence in (("query_lengths", "query"), ("key_lengths", "key")):
            if length not in env:
                continue
            positions = _positions(original[sequence].dims[2])
            is_inside = positions < _logical(original[length], env[length])
            for role in _GRADIENTS_ALONG[sequence]:
                if role in results:
                    results[role] = _where(outputs[role], is_inside, results[role], 0)

    rewrite.before.append(before)
    rewrite.after.append(after)


_GRADIENTS_ALONG = {"query": ("grad_query",), "key": ("grad_key", "grad_value")}


def _where(
    tensor: Tensor, condition: jax.Array, x: jax.Array, fill: float
) -> jax.Array:
    return jnp.where(_stored(tensor, condition), x, jnp.asarray(fill, x.dtype))


def _positions(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)[None, None, :, None]


def _live_rows(
    rewrite: _Rewrite, tensors: Mapping[str, Tensor], env: _Env
) -> jax.Array:
    """Return, as (b|1, h|1, s|1, 1), whether a row has a key to see and is in range."""
    _, _, s, _ = tensors["query"].dims
    t = tensors["key"].dims[2]
    is_live = jnp.ones((1, 1, 1, 1), bool)
    if "mask" in env:
        is_visible = _logical(tensors["mask"], env["mask"])
        columns = jnp.arange(t, dtype=jnp.int32)[None, None, None, :]
        if _attributes(rewrite).is_causal:
            is_visible = is_visible & (columns <= _positions(s))
        if "key_lengths" in env:
            lengths = _logical(tensors["key_lengths"], env["key_lengths"])
            is_visible = is_visible & (columns < lengths)
        is_live = jnp.any(is_visible, axis=3, keepdims=True)
    elif "key_lengths" in env:
        is_live = _logical(tensors["key_lengths"], env["key_lengths"]) > 0
    if "query_lengths" in env:
        lengths = _logical(tensors["query_lengths"], env["query_lengths"])
        is_live = is_live & (_positions(s) < lengths)
    return is_live


def _attributes(rewrite: _Rewrite) -> SdpaAttributes:
    assert isinstance(rewrite.node.attributes, SdpaAttributes)
    return rewrite.node.attributes


def _logical(tensor: Tensor, stored: jax.Array) -> jax.Array:
    inverse = tuple(tensor.order.index(axis) for axis in range(len(tensor.order)))
    return jnp.transpose(stored, inverse)


# --- masks, lengths and bias ----------------------------------------------------------


def _mask_to_bias(rewrite: _Rewrite) -> None:
    """Fold a boolean mask into the bias, whose gradient is summed back afterwards."""
    if "mask" not in rewrite.inputs:
        return
    original = dict(rewrite.inputs)
    mask = rewrite.inputs.pop("mask")
    bias = original.get("bias")
    dims = mask.dims
    dtype = original["query"].dtype
    if bias is not None:
        dims = tuple(max(x, y) for x, y in zip(mask.dims, bias.dims, strict=True))
        dtype = bias.dtype
    rewrite.inputs["bias"] = Tensor(
        name="bias", dtype=dtype, dims=dims, order=(0, 1, 2, 3)
    )

    def before(env: _Env) -> None:
        is_visible = _logical(mask, env.pop("mask"))
        hidden = jnp.asarray(_HIDDEN[dtype], jax_dtype(dtype))
        base = jnp.zeros((), hidden.dtype)
        if bias is not None:
            base = _logical(bias, env["bias"])
        env["bias"] = jnp.broadcast_to(jnp.where(is_visible, base, hidden), dims)

    rewrite.before.append(before)
    if "grad_bias" in rewrite.outputs:
        assert bias is not None
        _sum_bias_gradient(rewrite, bias, dims)


def _sum_bias_gradient(
    rewrite: _Rewrite, bias: Tensor, dims: tuple[int, ...]
) -> None:
    """Have cuDNN compute dbias with larger `dims` and sum it to those of the bias."""
    axes = tuple(
        i for i, (x, y) in enumerate(zip(bias.dims, dims, strict=True)) if x != y
    )
    rewrite.outputs["grad_bias"] = Tensor(
        name="grad_bias", dtype=bias.dtype, dims=dims, order=(0, 1, 2, 3)
    )

    def after(_: _Env, results: _Env) -> None:
        total = results["grad_bias"]
        if axes:
            total = jnp.sum(total, axis=axes, keepdims=True, dtype=jnp.float32)
        results["grad_bias"] = _stored(bias, total.astype(jax_dtype(bias.dtype)))

    rewrite.after.append(after)


def _complete_lengths(rewrite: _Rewrite, target: Target | None) -> None:
    """Give cuDNN both lengths or none, at least one key, and keys it can handle."""
    query, key = rewrite.inputs["query"], rewrite.inputs["key"]
    b, s, t = query.dims[0], query.dims[2], key.dims[2]
    given = {r for r in ("query_lengths", "key_lengths") if r in rewrite.inputs}
    if not given and not _needs_lengths(t, target):
        return
    for role in ("query_lengths", "key_lengths"):
        rewrite.inputs[role] = Tensor(
            name=role, dtype="i32", dims=(b, 1, 1, 1), order=(0, 1, 2, 3)
        )

    def before(env: _Env) -> None:
        # Zero keys gave NaN before cuDNN 9.25 (cudnn-frontend issue #943).
        for role, least, full in (("query_lengths", 0, s), ("key_lengths", 1, t)):
            lengths = jnp.full((b, 1, 1, 1), full, jnp.int32)
            if role in env:
                lengths = jnp.reshape(jnp.clip(env[role], least, full), (b, 1, 1, 1))
            env[role] = lengths

    rewrite.before.append(before)


def _needs_lengths(t: int, target: Target | None) -> bool:
    """Whether the frontend would otherwise add lengths of its own.

    Up to cuDNN 9.15.0 it does so for t % 128 != 0 and copies them from host memory at
    each launch, which a captured command buffer must not do (cudnn-frontend,
    scaled_dot_product_flash_attention.h, "workaround padding mask").
    """
    return target is not None and target.cudnn_version <= 91500 and t % 128 != 0


# --- padding --------------------------------------------------------------------------


def _pad_head(rewrite: _Rewrite, roles: tuple[str, ...], extra: int) -> int:
    """Pad the last axis of the roles, gradients included, by at least `extra`.

    Returns the old size. Zero columns add nothing to products and get no gradient
    that anyone reads.
    """
    roles = tuple({*roles, *(f"grad_{role}" for role in roles)})
    present = rewrite.roles
    size = next(present[role].dims[3] for role in roles if role in present)
    padded = -(-(size + extra) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    if padded != size:
        _pad_axis(rewrite, roles, 3, size, padded)
    return size


def _pad_axis(
    rewrite: _Rewrite, roles: tuple[str, ...], axis: int, size: int, padded: int
) -> None:
    padded_inputs = {r: rewrite.inputs[r] for r in roles if r in rewrite.inputs}
    cut_outputs = {r: rewrite.outputs[r] for r in roles if r in rewrite.outputs}
    for role in roles:
        rewrite.resize(role, axis, padded)

    def before(env: _Env) -> None:
        for role, tensor in padded_inputs.items():
            widths = [(0, 0, 0)] * len(tensor.dims)
            widths[tensor.order.index(axis)] = (0, padded - size, 0)
            zero = jnp.zeros((), env[role].dtype)
            env[role] = jax.lax.pad(env[role], zero, widths)

    def after(_: _Env, results: _Env) -> None:
        for role, tensor in cut_outputs.items():
            results[role] = jax.lax.slice_in_dim(
                results[role], 0, size, axis=tensor.order.index(axis)
            )

    rewrite.before.append(before)
    rewrite.after.append(after)


def _pad_single_query(rewrite: _Rewrite) -> None:
    """Give a one-row gradient a second row of zeros, which adds nothing to any sum.

    cuDNN's gradient refuses s = t = 1, and crashes or gives NaN for s = 1 in some
    versions (cudnn-frontend issues #1071 and #1072).
    """
    if rewrite.inputs["query"].dims[2] == 1:
        rows = ("query", "output", "grad_output", "stats", "grad_stats", "grad_query")
        _pad_axis(rewrite, rows, 2, 1, 2)


# --- the cotangent of the log-sum-exp -------------------------------------------------


def _carry_grad_stats(rewrite: _Rewrite) -> None:
    """Pass the cotangent g of the log-sum-exp in three spare columns of the values.

    cuDNN computes dS = P (dO V^T - rowsum(O dO)); wanted is g added in the bracket.
    With columns O = -g, dO = 1, V = 0 the row sum becomes rowsum(O dO) - g and nothing
    else changes, apart from columns of dV that are cut off. Three columns hold g split
    into high, middle and low parts, so that rounding to 16 bits loses nothing.
    """
    stats = rewrite.inputs.pop("grad_stats")
    size = _pad_head(rewrite, ("value", "output"), 3)
    output = rewrite.inputs["output"]
    grad_output = rewrite.inputs["grad_output"]

    def before(env: _Env) -> None:
        remainder = _logical(stats, env.pop("grad_stats"))
        parts: list[jax.Array] = []
        for _ in range(3):
            part = remainder.astype(jax_dtype(output.dtype))
            parts.append(part)
            remainder = remainder - part.astype(remainder.dtype)
        env["output"] = _set_columns(
            output, env["output"], -jnp.concatenate(parts, axis=3), size
        )
        ones = jnp.ones((*grad_output.dims[:3], 3), jax_dtype(grad_output.dtype))
        env["grad_output"] = _set_columns(grad_output, env["grad_output"], ones, size)

    rewrite.before.append(before)


def _set_columns(
    tensor: Tensor, x: jax.Array, columns: jax.Array, start: int
) -> jax.Array:
    indices: list[int] = [0] * len(tensor.dims)
    indices[tensor.order.index(3)] = start
    return jax.lax.dynamic_update_slice(x, _stored(tensor, columns), indices)
