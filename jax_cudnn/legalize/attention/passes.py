# SPDX-License-Identifier: Apache-2.0
"""Orders the passes that rewrite attention for a kernel, and says what each needs.

A pass edits attention by role; letters as in graph/attention/sdpa.py. It is registered
by `attention_pass` where it is defined, with its precondition: whether a graph has what
it rewrites. ``ORDERS`` has the passes of each kind of kernel, and ``REASONS`` says why
one comes before another.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from jax_cudnn.graph import AttentionAttributes, SdpaAttributes
from jax_cudnn.legalize.common.editor import GraphEditor

# The passes of a kernel, the first one first. "dropout" is one of the ways that
# dropout.py has, of which each makes a candidate.
ORDERS: dict[str, tuple[str, ...]] = {
    "forward": (
        "dropout",
        "take_sinks",
        "keep_layout",
        "hide_dead_rows",
        "complete_lengths",
        "absorb_row_bias",
        "complete_bias",
        "pad_single_query",
        "take_lengths",
        "complete_operands",
        "make_scale_positive",
        "finish_score_mod",
        "pad_heads",
        "ask_for_sum",
    ),
    "backward": (
        "take_far_rows",
        "join_parts",
        "take_sinks",
        "dropout",
        "keep_layout",
        "hide_dead_rows",
        "complete_lengths",
        "absorb_row_bias",
        "complete_bias",
        "pad_single_query",
        "take_lengths",
        "complete_operands",
        "make_scale_positive",
        "pad_to_tiles",
        "pad_key_count",
        "finish_score_mod",
        "carry_grad_stats",
        "pad_heads",
    ),
    # Several sequences of a row, one after another: no bias, mask, dropout, score_mod.
    "ragged forward": (
        "take_sinks",
        "pack_tokens",
        "make_scale_positive",
        "pad_heads",
        "ask_for_sum",
        "put_offsets",
    ),
    "ragged backward": (
        "join_parts",
        "take_sinks",
        "pack_tokens",
        "make_scale_positive",
        "carry_grad_stats_by_16",
        "pad_heads_by_16",
        "put_offsets",
    ),
    "cached": (
        "keep_layout",
        "hide_rows_of_cache",
        "complete_integers",
        "make_scale_positive",
    ),
    "f8": (
        "keep_layout",
        "hide_dead_rows",
        "complete_lengths_of_f8",
        "make_scale_positive",
        "repeat_single_query",
        "pad_heads_by_16",
    ),
}

# Why the first pass comes before the others, wherever they are in one order. What a
# pass does to operands is done in this order too, and to results in the reverse one.
REASONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "take_far_rows",
        ("join_parts", "take_sinks", "dropout", "hide_dead_rows", "absorb_row_bias"),
        "It sees what the user gave and gets, and whether the keys are a part.",
    ),
    (
        "take_sinks",
        ("hide_dead_rows", "absorb_row_bias", "pack_tokens", "pad_heads"),
        "Its share is that of the log-sum-exp and the output as the user gets them.",
    ),
    (
        "dropout",
        ("pad_single_query", "pad_key_count", "pad_heads"),
        "What is dropped is drawn for the queries and keys that the user has.",
    ),
    (
        "hide_dead_rows",
        ("complete_lengths", "complete_lengths_of_f8", "complete_bias", "take_lengths"),
        "Mask and lengths are the user's until these change them.",
    ),
    (
        "absorb_row_bias",
        ("complete_bias",),
        "What all keys of a row share would be written for each of them.",
    ),
    (
        "complete_bias",
        ("pad_single_query", "pad_to_tiles", "pad_key_count"),
        "The mask is part of the bias by then, whose rows and columns are padded.",
    ),
    (
        "complete_lengths",
        ("pad_key_count",),
        "The lengths hide the keys that are added.",
    ),
    (
        "take_lengths",
        ("complete_operands", "finish_score_mod"),
        "The lengths become an array that a step reads.",
    ),
    (
        "complete_operands",
        ("pad_to_tiles",),
        "Which arrays have a column for each key is known by then.",
    ),
    (
        "pad_to_tiles",
        ("finish_score_mod",),
        "The keys that are added are hidden by a step, which is part of the gradient.",
    ),
    (
        "carry_grad_stats",
        ("pad_heads",),
        "The cotangent takes columns beyond the user's, with which they are padded.",
    ),
    (
        "carry_grad_stats_by_16",
        ("pad_heads_by_16",),
        "The cotangent takes columns beyond the user's, with which they are padded.",
    ),
    (
        "hide_dead_rows",
        ("ask_for_sum",),
        "The log-sum-exp is made of maximum and sum before others change it.",
    ),
    (
        "pack_tokens",
        ("ask_for_sum", "put_offsets"),
        "Its results are those that the kernel leaves undefined, as the user has them.",
    ),
    (
        "pad_heads",
        ("put_offsets",),
        "The offsets count elements, so all sizes are final by then.",
    ),
    (
        "pad_heads_by_16",
        ("put_offsets",),
        "The offsets count elements, so all sizes are final by then.",
    ),
)

Edit = Callable[[GraphEditor], None]
When = Callable[[GraphEditor], bool]


class Pass(NamedTuple):
    """A pass, and its precondition: whether a graph has what it rewrites."""

    run: Edit
    when: When


# By name; each order's names are among them.
PASSES: dict[str, Pass] = {}

_Edit = TypeVar("_Edit", bound=Edit)


def always(_: GraphEditor) -> bool:
    """Hold of every graph."""
    return True


def has(*roles: str) -> When:
    """Return the precondition that one of the roles is in the graph."""
    return lambda editor: not editor.tensors.keys().isdisjoint(roles)


def has_score_mod(editor: GraphEditor) -> bool:
    """Whether the scores go through steps."""
    return bool(attributes_of(editor).score_mod)


def attention_pass(*, when: When = always) -> Callable[[_Edit], _Edit]:
    """Register a pass by its name."""

    def registered(run: _Edit) -> _Edit:
        PASSES[run.__name__] = Pass(run, when)
        return run

    return registered


def run_passes(editor: GraphEditor, kernel: str, dropout: Edit | None = None) -> None:
    """Edit a graph by the passes of a kernel that apply to it.

    ``dropout`` is what is run in the place of "dropout".
    """
    for name in ORDERS[kernel]:
        if name != "dropout":
            run, when = PASSES[name]
            if when(editor):
                run(editor)
        elif dropout is not None:
            dropout(editor)


def attributes_of(editor: GraphEditor) -> SdpaAttributes:
    """Return the attributes of attention, except over a cache."""
    attributes = editor.main.attributes
    assert isinstance(attributes, SdpaAttributes)
    return attributes


def common_attributes_of(editor: GraphEditor) -> AttentionAttributes:
    """Return the attributes that every attention has."""
    attributes = editor.main.attributes
    assert isinstance(attributes, AttentionAttributes)
    return attributes
