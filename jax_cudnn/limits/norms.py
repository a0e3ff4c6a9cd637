# SPDX-License-Identifier: Apache-2.0
"""The limits of norms and their gradients."""

from jax_cudnn.graph import NORMALISED, Graph, Node
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.limits.rows import ALL_VERSIONS, Limit, always

_NORMS = frozenset(name for kind in NORMALISED for name in (kind, f"{kind}_backward"))
_BY_XLA = "XLA runs them"


def _writes_f8(graph: Graph, node: Node) -> bool:
    roles = roles_in(graph, node)
    return "scale_output" in roles and roles["output"].dtype.startswith("f8")


def _has_odd_examples(graph: Graph, node: Node) -> bool:
    """Whether x is of 16 bits, channels last, and an example has an odd size."""
    x = roles_in(graph, node)["x"]
    count, *example = x.dims
    is_odd = all(size % 2 for size in example)
    is_half = x.dtype in ("bf16", "f16")
    return is_half and x.order[-1] != 3 and count > 1 and is_odd


LIMITS = (
    Limit(
        kinds=frozenset({"group_norm_backward"}),
        holds=_has_odd_examples,
        versions=range(92000, ALL_VERSIONS.stop),
        what="the gradient of group norm with respect to 16-bit images, channels last, "
        "is wrong if an image has an odd number of elements, and differs from run to "
        "run",
        done=_BY_XLA,
        source="seen: 9.28.1 on an H200, errors of 0.02 to 700 of the largest value in "
        "several images of 7 x 121 and like them, more often in f16 than in bf16. "
        "9.19.0 is right, and so are f32 and channels first. Versions in between were "
        "not tried (tests/norms/gpu/test_norms.py)",
    ),
    Limit(
        kinds=_NORMS,
        holds=_writes_f8,
        lacking=True,
        gpus=range(89),
        what="norms write no f8",
        words="sm_{target.sm_version} writes no f8; sm_89 does",
        done=_BY_XLA,
        source='seen: "!hardware_fp8_supported" in the reasons of 9.19 and 9.27 for '
        "sm_80",
    ),
    Limit(
        kinds=_NORMS,
        holds=always,
        lacking=True,
        gpus=range(80),
        what="norms support few sizes, and not bf16",
        words="sm_{target.sm_version} ({target.name}): norms need sm_80 (Ampere) or "
        "newer",
        done=_BY_XLA,
        source="seen: planned with 9.19 and 9.27 for sm_75",
    ),
    Limit(
        kinds=_NORMS,
        holds=always,
        lacking=True,
        versions=range(90800),
        what="norms were not tried",
        words="cuDNN {cudnn} is older than 9.8",
        done=_BY_XLA,
        source="older ones were not tried",
    ),
)
