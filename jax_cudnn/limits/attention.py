# SPDX-License-Identifier: Apache-2.0
"""The limits of attention: those that refuse graphs, and those that are written around.

Letters as in node_kinds.json.
"""

from jax_cudnn.graph import Graph, Node, SdpaAttributes
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.limits.rows import ALL_GPUS, ALL_VERSIONS, Limit, Row, always

_ATTENTION = frozenset({"sdpa", "sdpa_backward", "sdpa_cached"})
_F8_ATTENTION = frozenset({"sdpa_f8"})
# cudnn-frontend's own refusals, of all but f8, and of f8.
_SURFACE = "cudnn-frontend 1.28, `sdpa_support_surface.h`"
_F8_SURFACE = f'{_SURFACE}, "FP8 specific validation"'
_BY_XLA = "XLA runs it"


def _is_large_grid(graph: Graph, node: Node) -> bool:
    """Whether there are more entries or heads than blocks along an axis of a grid."""
    roles = roles_in(graph, node)
    queries = roles["query"] if "query" in roles else roles["output"]
    return max(queries.dims[:2]) > 65535


def _has_score_mod(_: Graph, node: Node) -> bool:
    attributes = node.attributes
    return isinstance(attributes, SdpaAttributes) and bool(attributes.score_mod)


def _is_16_bit(graph: Graph, node: Node) -> bool:
    return roles_in(graph, node)["output"].dtype in ("bf16", "f16")


def _head_sizes(graph: Graph, node: Node) -> tuple[int, int]:
    """Return d and e as f8 kernels have them, in multiples of 16."""
    roles = roles_in(graph, node)
    d, e = (-(-roles[role].dims[3] // 16) * 16 for role in ("query", "value"))
    return d, e


def _is_above_256(graph: Graph, node: Node) -> bool:
    return max(_head_sizes(graph, node)) > 256


def _is_192_with_128(graph: Graph, node: Node) -> bool:
    return _head_sizes(graph, node) == (192, 128)


def _is_above_128(graph: Graph, node: Node) -> bool:
    return max(_head_sizes(graph, node)) > 128 and not _is_192_with_128(graph, node)


_HEAD_SIZES = "head sizes d={query.dims[3]}, e={value.dims[3]}"
_HEADS_OF_BLACKWELL = (
    f"{_HEAD_SIZES}; on sm_{{target.sm_version}}, cuDNN's f8 attention takes at most "
    "128, and d=192 with e=128 from 9.19 on"
)

LIMITS = (
    Limit(
        kinds=_ATTENTION,
        holds=_has_score_mod,
        lacking=True,
        versions=range(91900),
        what="a `score_mod` was not run",
        words="score_mod is run with cuDNN 9.19 and newer; use such a version",
        done=_BY_XLA,
        source="9.19 is the oldest that was tried: planned for sm_90, run on an H200",
    ),
    Limit(
        kinds=_ATTENTION,
        holds=always,
        lacking=True,
        gpus=range(80),
        what="there is no attention",
        words="{target.name} is sm_{target.sm_version}; cuDNN's attention needs sm_80 "
        "(Ampere) or newer",
        done=_BY_XLA,
        source=_SURFACE,
    ),
    Limit(
        kinds=frozenset({"sdpa_cached"}),
        holds=lambda _, node: "page_table" in dict(node.inputs),
        lacking=True,
        versions=range(90500),
        what="there is no attention over pages of a cache",
        words="cuDNN {target.cudnn_version} has no pages; they came with 90500",
        done=_BY_XLA,
        source=_SURFACE,
    ),
    Limit(
        kinds=_F8_ATTENTION,
        holds=always,
        lacking=True,
        gpus=range(90),
        what="there is no f8 attention",
        words="{target.name} is sm_{target.sm_version}; cuDNN's f8 attention needs "
        "sm_90 (Hopper) or newer",
        done=_BY_XLA,
        source=_F8_SURFACE,
    ),
    Limit(
        kinds=_F8_ATTENTION,
        holds=_is_16_bit,
        lacking=True,
        versions=ALL_VERSIONS[91300:],
        gpus=ALL_GPUS[100:],
        elsewhere=True,
        what="f8 attention gives no results in bf16 or f16",
        words="the result is {output.dtype}; cuDNN gives 16-bit results of f8 operands "
        "on sm_100 (Blackwell) and newer, from 9.13 on. Ask for f8 and dequantize",
        done=_BY_XLA,
        source=_F8_SURFACE,
    ),
    Limit(
        kinds=_F8_ATTENTION,
        holds=_is_above_256,
        lacking=True,
        gpus=range(100),
        what="f8 attention takes head sizes of at most 256",
        words=f"{_HEAD_SIZES}; cuDNN's f8 attention takes at most 256",
        done=_BY_XLA,
        source=_F8_SURFACE,
    ),
    Limit(
        kinds=_F8_ATTENTION,
        holds=_is_above_128,
        lacking=True,
        gpus=ALL_GPUS[100:],
        what="f8 attention takes head sizes of at most 128, and 192 for queries and "
        "keys with 128 for values",
        words=_HEADS_OF_BLACKWELL,
        done=_BY_XLA,
        source=_F8_SURFACE,
    ),
    Limit(
        kinds=_F8_ATTENTION,
        holds=_is_192_with_128,
        lacking=True,
        versions=range(91900),
        gpus=ALL_GPUS[100:],
        what="f8 attention takes no head size of 192, not with 128 for values either",
        words=_HEADS_OF_BLACKWELL,
        done=_BY_XLA,
        source=_F8_SURFACE,
    ),
    Limit(
        kinds=_ATTENTION | _F8_ATTENTION,
        holds=_is_large_grid,
        what="cuDNN's attention takes at most 65535 batch entries and 65535 heads",
        done=_BY_XLA,
        # They are dimensions y and z of a launch grid.
        source="CUDA C++ Programming Guide, technical specifications",
    ),
    Limit(
        kinds=_ATTENTION,
        holds=always,
        versions=range(91000, 91002),
        what="attention is wrong in some cases",
        done=_BY_XLA,
        source='cudnn-frontend refuses it ("known bugs")',
    ),
    Limit(
        kinds=_F8_ATTENTION,
        holds=always,
        versions=range(91000, 91001),
        what="there is no f8 attention",
        done=_BY_XLA,
        source="cudnn-frontend refuses it",
    ),
)

# --- what is written in another way ---------------------------------------------------

LENGTHS_ARE_COPIED = Row(
    versions=range(91501),
    what="without lengths, and with t % 128 not 0, lengths are copied from the host in "
    "each launch of attention, which a command buffer must not do",
    done="lengths are given as an operand",
    source="cudnn-frontend, `scaled_dot_product_flash_attention.h`, "
    '"workaround padding mask"',
)
NO_PACKED_STATS = Row(
    gpus=range(90, 110),
    elsewhere=True,
    what="there is no log-sum-exp of packed sequences",
    words="sm_{target.sm_version} has no packed log-sum-exp in cuDNN",
    done="the sequences of a row are a mask, whose memory grows with s*t",
    source='cudnn-frontend 1.28 refuses it for sm_8x and sm_12x ("Packed/ragged LSE is '
    'not supported")',
)
F8_NEEDS_TWO_QUERIES = Row(
    gpus=range(100),
    is_of_unknown=True,
    what="f8 attention has no plan for a single query",
    done="the query is there twice; with causality or a window, XLA runs it",
    source="seen: planned with 9.19 and 9.27 for sm_90",
)
DROPOUT_NOT_COMPARED = Row(
    versions=range(91900, 91901),
    gpus=range(90, 91),
    elsewhere=True,
    is_of_unknown=True,
    what="which probabilities a kernel's own dropout keeps was not compared with the "
    "reference",
    done="XLA writes a mask of them, whose memory grows with s*t",
    source="9.19.0 was compared bit by bit on an H200",
)
UNSEEN_KEYS_HAVE_GRADIENTS = Row(
    versions=range(91900),
    is_of_unknown=True,
    what="keys of a batch entry whose length of queries is 0 have gradients",
    done="those of its keys and values are replaced by 0",
    source="seen: 9.14.0 on an H100; 9.19.0 and 9.28.1 give 0, none between was run",
)
LARGE_PACKED_HEADS = Row(
    versions=range(91900),
    what="gradients of packed sequences are wrong where a head size is over 128",
    words="cuDNN {cudnn} computes wrong gradients of packed sequences with head sizes "
    "over 128; 9.19 does not",
    done="the sequences of a row are a mask, whose memory grows with s*t",
    source="seen: 9.14.0 on an H100, errors of 0.3 to 0.9; 9.19.0 is right, none "
    "between was run",
)
WORKAROUNDS = (
    LENGTHS_ARE_COPIED,
    UNSEEN_KEYS_HAVE_GRADIENTS,
    NO_PACKED_STATS,
    LARGE_PACKED_HEADS,
    F8_NEEDS_TWO_QUERIES,
    DROPOUT_NOT_COMPARED,
)
