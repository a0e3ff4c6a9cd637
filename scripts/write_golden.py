# SPDX-License-Identifier: Apache-2.0
"""Writes the golden graph files that hold Python and C++ to the same JSON bytes.

Run from the repository's root, and only when the schema changes or a node is added:
`python -m scripts.write_golden`. A golden file is never changed otherwise.
"""

from pathlib import Path

from jax_cudnn.graph import Graph, to_json
from tests.attention import attention_graph, backward_graph

_FOLDER = Path(__file__).parent.parent / "tests" / "golden"
_LENGTHS = ("query_lengths", "key_lengths")


def golden_graphs() -> dict[str, Graph]:
    """Return the graphs by file name: each node at its least and at its fullest."""
    plain = attention_graph(dtype="bf16", with_stats=True)
    full = attention_graph(
        dtype="f16",
        bias="1hst",
        bias_dtype="f32",
        mask="b1s1",
        lengths=_LENGTHS,
        scale=-1e-5,
        is_causal=True,
        with_stats=True,
        order=(2, 0, 1, 3),
    )
    biased = attention_graph(
        dtype="bf16", bias="bh1t", mask="11st", lengths=_LENGTHS, with_stats=True
    )
    return {
        "sdpa_forward": attention_graph(dtype="bf16", scale=0.125),
        "sdpa_forward_full": full,
        "sdpa_backward": backward_graph(plain),
        "sdpa_backward_full": backward_graph(biased, with_grad_stats=True),
    }


def main() -> None:
    """Write every golden file, one line each."""
    for name, graph in golden_graphs().items():
        (_FOLDER / f"{name}.json").write_text(to_json(graph) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
