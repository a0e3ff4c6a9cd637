# SPDX-License-Identifier: Apache-2.0
"""Rewrites a score_mod for cuDNN, with causality, lengths and windows as steps.

Each step edits attention by role; letters as in graph/attention/sdpa.py.
legalize/attention/passes.py says which steps a graph takes.

cudnn-frontend refuses causality, lengths and a window beside a score_mod (1.28 and
1.32, sdpa_support_surface.h, "other subgraphs are disabled"). They become more steps,
which select -inf by the positions of query and key.
"""

from dataclasses import replace

import jax.numpy as jnp

from jax_cudnn.graph import Tensor
from jax_cudnn.graph.attention.score_mod import (
    OPERANDS,
    Steps,
    gradient_steps,
    number_text,
    operands_of,
    read_step,
    result_index,
)
from jax_cudnn.legalize.attention.padding import pad_keys
from jax_cudnn.legalize.attention.passes import (
    attention_pass,
    attributes_of,
    has,
    has_score_mod,
)
from jax_cudnn.legalize.common.editor import Env, GraphEditor
from jax_cudnn.legalize.common.layout import rounded_up
from jax_cudnn.reference.interpreter import to_logical

# A multiple of the tiles of cuDNN's gradient kernels.
_TILE = 128
# What has a number for each score.
_FULL = ("score", "grad", "query", "key")


def why_not_score_mod(editor: GraphEditor) -> list[str]:
    """Return the limits that a score_mod breaks."""
    steps = attributes_of(editor).score_mod
    if not steps:
        return []
    reasons: list[str] = []
    if "dropout_seed" in editor.tensors:
        reasons.append(
            "dropout with a score_mod that runs in the kernel; what cuDNN drops "
            "there was not compared"
        )
    if "key_lengths" in editor.tensors and _free_role(editor) is None:
        reasons.append(
            f"score_mod reads {len(OPERANDS)} arrays in addition to the key lengths; a "
            "kernel "
            f"takes {len(OPERANDS)}, the lengths included"
        )
    query = editor.tensors["query"].dtype
    reasons += [
        f"score_mod reads {role}, which is {editor.tensors[role].dtype}; cuDNN takes "
        f"{query} or f32 here"
        for role in operands_of(steps)
        if editor.tensors[role].dtype not in (query, "f32")
    ]
    return reasons


@attention_pass(when=has_score_mod)
def take_lengths(editor: GraphEditor) -> None:
    """Hide keys past their length by a step.

    What queries past theirs give is replaced afterwards (hide_dead_rows), and their
    probabilities are 0 in the gradient.
    """
    for role in ("query_lengths", "key_lengths"):
        if role in editor.tensors:
            tensor = editor.drop(role)
            if role == "key_lengths":
                _add_length_step(editor, tensor)


def _add_length_step(editor: GraphEditor, lengths: Tensor) -> None:
    role = _free_role(editor)
    assert role is not None
    b, h, s, _ = editor.tensors["query"].dims
    operand = Tensor(name=role, dtype="f32", dims=(b, h, s, 1), order=(0, 1, 2, 3))
    _set_steps(editor, (*attributes_of(editor).score_mod, *_hide(editor, "lt", role)))
    editor.put_operand(operand)

    def before(env: Env) -> None:
        # A row sees a key at least, so that no 0/0 arises.
        count = jnp.maximum(to_logical(lengths, env["key_lengths"]), 1)
        env[role] = jnp.broadcast_to(count.astype(jnp.float32), operand.dims)

    editor.before.append(before)


def _free_role(editor: GraphEditor) -> str | None:
    free = (role for role in OPERANDS if role not in editor.tensors)
    return next(free, None)


@attention_pass(when=has(*OPERANDS))
def complete_operands(editor: GraphEditor) -> None:
    """Give what a score_mod reads the axes with which cuDNN reads it rightly.

    9.19 on an H200 computes these wrongly: (b, 1, 1, 1) and (b, h, 1, 1), forward and
    backward, and any with full columns but one row, backward. All others are right. The
    gradient has a plan with one array of rows without columns, not with two (9.27).
    """
    _, h, s, _ = editor.tensors["query"].dims
    t = editor.tensors["key"].dims[2]
    has_rows = False
    # The lengths come last, and stay small.
    for role in reversed(OPERANDS):
        if role not in editor.tensors:
            continue
        full = dims = editor.tensors[role].dims
        if dims[3] == 1 and dims[0] != 1:
            full = (dims[0], h, s, 1)
        if full[3] == 1 and full[2] != 1:
            full = (*full[:3], t if has_rows else 1)
            has_rows = True
        elif full[3] == 1 and full[0] != 1:
            full = (*full[:3], t)  # of a single query
        if full[3] != 1:
            full = (*full[:2], s, full[3])
        if full != dims:
            editor.expand(role, full)


@attention_pass(when=has_score_mod)
def pad_to_tiles(editor: GraphEditor) -> None:
    """Add keys up to a multiple of the kernel's tile, hidden by a step.

    cuDNN's gradient fills tiles with scores of -inf before it applies a score_mod,
    which may be NaN or +inf there (9.19 on an H200).
    """
    t = editor.tensors["key"].dims[2]
    if t % _TILE == 0:
        return
    pad_keys(editor, rounded_up(t, _TILE))
    steps = attributes_of(editor).score_mod
    _set_steps(editor, (*steps, *_hide(editor, "lt", number_text(t))))


@attention_pass(when=has_score_mod)
def finish_score_mod(editor: GraphEditor) -> None:
    """Write causality and window as steps, and the gradient of all steps."""
    attributes = attributes_of(editor)
    if attributes.is_causal:
        steps = _hide(editor, "le", "query")
        _set_steps(editor, (*attributes.score_mod, *steps))
    if attributes.window:
        left, right = attributes.window
        for mode, bound in (("ge", -left), ("le", right)):
            steps = attributes_of(editor).score_mod
            gap = f"%{len(steps)}"
            sees = f"{mode} {gap} {number_text(bound)}"
            hidden = f"select %{len(steps) - 1} -inf %{len(steps) + 1}"
            _set_steps(editor, (*steps, "sub key query", sees, hidden))
    steps = _for_a_kernel(attributes_of(editor).score_mod)
    gradient: Steps = ()
    if editor.main.kind == "sdpa_backward":
        gradient = _for_a_kernel(gradient_steps(steps), steps)
    editor.set_attributes(
        replace(
            attributes,
            is_causal=False,
            window=(),
            score_mod=steps,
            score_mod_grad=gradient,
        )
    )


def _for_a_kernel(steps: Steps, before: Steps = ()) -> Steps:
    """Return steps that cuDNN plans and computes, which mean the same.

    The first word has full scores, unless it may come second: cuDNN has no plan for
    others (9.19 and 9.27). In 9.28.1 on an H100, a forward step that has the score as
    its second or third word reads memory that is not the kernel's own, as in
    "mul score score" or "select 0 score %0"; 9.19 does not (docs/known_bugs.md). There,
    the score times 1 is read instead, and wherever a step reads one value twice.
    """
    made = [*before]
    places = [*range(len(before))]

    def emit(text: str) -> str:
        if text not in made:
            made.append(text)
        return f"%{made.index(text)}"

    for mode, words in map(read_step, steps):
        new = [
            word if (index := result_index(word)) is None else f"%{places[index]}"
            for word in words
        ]
        is_full = new[0][0] == "%" or new[0] in _FULL
        if not is_full and mode not in ("add", "mul", "max", "min"):
            new[0] = emit(f"add {emit('mul key 0')} {new[0]}")
        for i, word in enumerate(new):
            is_value = word[0] == "%" or word in (*OPERANDS, *_FULL)
            is_late_score = i > 0 and word == "score" and not before
            if is_late_score or (is_value and word in new[:i]):
                new[i] = emit(f"mul {word} 1")
        made.append(" ".join((mode, *new)))
        places.append(len(made) - 1)
    return tuple(made[len(before) :])


def _hide(editor: GraphEditor, mode: str, word: str) -> Steps:
    """Return the steps that hide keys, except those of which a comparison holds."""
    count = len(attributes_of(editor).score_mod)
    return (f"{mode} key {word}", f"select %{count - 1} -inf %{count}")


def _set_steps(editor: GraphEditor, steps: Steps) -> None:
    editor.set_attributes(replace(attributes_of(editor), score_mod=steps))
