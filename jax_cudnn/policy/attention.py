# SPDX-License-Identifier: Apache-2.0
"""The properties of attention that the tables' rows name."""

import functools
from collections.abc import Mapping

from jax_cudnn.graph import Graph, SdpaAttributes, Tensor
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.policy.nearest import Kernel

# Operands and results of attention with nothing but causality.
_PLAIN = frozenset({"query", "key", "value", "output", "stats"})
_GRADIENTS = frozenset(
    {"grad_output", "grad_stats", "grad_query", "grad_key", "grad_value"}
)


class Attention:
    """Attention of one node, as it is once packing and windows are written out."""

    def __init__(self, part: Graph, rewrite: Rewrite) -> None:
        graph = rewrite.problem or part
        node = graph.sole_node()
        assert node is not None
        self._kind = node.kind
        self._roles: Mapping[str, Tensor] = roles_in(graph, node)
        self._attributes = node.attributes
        # XLA has to divide such an array first.
        self.is_in_one_array = "qkv" in roles_in(part, part.nodes[0])

    @property
    def dtype(self) -> str:
        """The dtype of the output."""
        return self._roles["output"].dtype

    @property
    def is_plain(self) -> bool:
        """Whether nothing hides keys or moves scores, but for causality."""
        attributes = self._attributes
        if not isinstance(attributes, SdpaAttributes):
            return False
        plain = SdpaAttributes(scale=attributes.scale, is_causal=attributes.is_causal)
        return attributes == plain and self._roles.keys() <= _PLAIN | _GRADIENTS

    @functools.cached_property
    def _query(self) -> Tensor:
        return self._roles["query"]

    @property
    def is_self_attention(self) -> bool:
        """Whether keys and values have the query's shape and order."""
        query = self._query
        others = (self._roles[role] for role in ("key", "value"))
        return all((x.dims, x.order) == (query.dims, query.order) for x in others)

    @property
    def layout(self) -> str:
        """The layout of the query, such as "bshd"."""
        return "".join("bhsd"[axis] for axis in self._query.order)

    @property
    def tokens(self) -> int:
        """The queries of a sequence."""
        return self._query.dims[2]

    @property
    def head_size(self) -> int:
        """The size of a query."""
        return self._query.dims[3]

    @property
    def has_one_head_or_sequence(self) -> bool:
        """Whether XLA need not transpose the operands."""
        return min(self._query.dims[:2]) == 1

    @property
    def scores(self) -> int:
        """The scores of all heads and sequences."""
        batch, heads, tokens, _ = self._query.dims
        return batch * heads * tokens * self.keys

    @property
    def keys(self) -> int:
        """The keys of a sequence."""
        return self._roles["key"].dims[2]

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added to the scores."""
        return "bias" in self._roles

    @property
    def gives_bias_gradient(self) -> bool:
        """Whether the bias is trained, and this is the gradient."""
        return "grad_bias" in self._roles

    @property
    def gives_stats(self) -> bool:
        """Whether the log-sum-exp, which gradients need, is read or written."""
        return "stats" in self._roles

    @property
    def point(self) -> Kernel | None:
        """What it is measured as."""
        attributes, roles = self._attributes, self._roles
        if not isinstance(attributes, SdpaAttributes) or self.is_in_one_array:
            return None
        plain = SdpaAttributes(scale=attributes.scale, is_causal=attributes.is_causal)
        bits = "16 bits" if self.dtype in ("bf16", "f16") else self.dtype
        words = [self._kind, bits]
        words += ["causal"] if attributes.is_causal else []
        words += ["gives stats"] if self.gives_stats else []
        words += [f"with {x}" for x in sorted(roles.keys() - _PLAIN - _GRADIENTS)]
        words += ["with more"] if attributes != plain else []
        # XLA transposes nothing then: it is another code.
        words += ["with one head or sequence"] if self.has_one_head_or_sequence else []
        batch, heads, tokens, size = self._query.dims
        return Kernel(
            name=", ".join(words),
            rows=batch * heads * tokens,
            columns=roles["key"].dims[2],
            depth=size,
        )
