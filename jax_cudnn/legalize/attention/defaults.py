# SPDX-License-Identifier: Apache-2.0
"""When is attention left to XLA, where nothing was tuned?

Measured: docs/benchmarks/small_attention.md, by `python -m benchmarks.small_attention`.
What was measured for a graph itself goes before (choices.py).
"""

from jax_cudnn.graph import Graph, SdpaAttributes
from jax_cudnn.graph.kinds import roles_in

# Scores of all heads and sequences, up to which XLA was faster: of a forward pass
# alone, and where it gives the log-sum-exp, which gradients need.
MOST_SCORES = 2**21
MOST_TRAINED_SCORES = 3 * 2**20
# What was measured: arrays as jax.nn has them, of so many tokens, of these head sizes.
_ORDER = (0, 2, 1, 3)
_FEWEST_TOKENS = 128
_HEAD_SIZES = range(64, 257)

_PLAIN = frozenset({"query", "key", "value", "output", "stats"})
_GRADIENTS = frozenset(
    {"grad_output", "grad_stats", "grad_query", "grad_key", "grad_value"}
)
_F32_IS_SLOW = (
    "cuDNN's f32 attention takes up to twice XLA's time (9.19 on an H200, 4 x 4096 "
    'tokens) and has no gradient; implementation="cudnn" uses it, in memory that does '
    "not grow with s*t"
)
_FEW_SCORES = (
    "with one head or one sequence, and up to {} million scores, XLA's code took 0.9 "
    "of the time of cuDNN's kernels (an H100, cuDNN 9.19): plans.autotune finds the "
    "best of both"
)


def slower(graph: Graph) -> str:
    """Say why "auto" leaves attention to XLA, if it does; the graph's node computes it.

    XLA runs it as two products in a batch and a softmax. It need not transpose arrays
    where there is one head or one sequence.
    """
    node = graph.sole_node()
    assert node is not None
    roles = roles_in(graph, node)
    if roles["output"].dtype == "f32":  # There are gradients in 16 bits only.
        return _F32_IS_SLOW
    attributes = node.attributes
    assert isinstance(attributes, SdpaAttributes)
    plain = SdpaAttributes(scale=attributes.scale, is_causal=attributes.is_causal)
    if attributes != plain or not roles.keys() <= _PLAIN | _GRADIENTS:
        return ""
    query, *others = (roles[role] for role in ("query", "key", "value"))
    batch, heads, tokens, size = query.dims
    is_measured = (
        all((x.dims, x.order) == (query.dims, query.order) for x in others)
        and query.order == _ORDER
        and tokens >= _FEWEST_TOKENS
        and size in _HEAD_SIZES
    )
    most = MOST_TRAINED_SCORES if "stats" in roles else MOST_SCORES
    is_small = min(batch, heads) == 1 and batch * heads * tokens**2 <= most
    return _FEW_SCORES.format(most // 2**20) if is_measured and is_small else ""
