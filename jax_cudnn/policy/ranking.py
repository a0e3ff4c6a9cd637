# SPDX-License-Identifier: Apache-2.0
"""Ranks the rewrites of a part: their order, and whether "auto" takes each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax_cudnn.graph import NORMALISED, Graph, Target
from jax_cudnn.legalize import Rewrite, legalize
from jax_cudnn.native import cublaslt_preference
from jax_cudnn.policy import evidence, products
from jax_cudnn.policy.attention import Attention
from jax_cudnn.policy.nearest import Kernel
from jax_cudnn.policy.norms import Norm
from jax_cudnn.policy.products import kernels
from jax_cudnn.policy.tables import Row, Table, Tables, tables_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """A rewrite of a part, and whether "auto" takes it.

    ``slower``, where not empty, says why "auto" leaves the part to XLA all the same. It
    does so too where one of ``slow_engines`` has cuDNN's first plan, and, where there
    are ``fast_engines``, where none of these has it. ``preference``, where not empty,
    is the request by which a plan is tried before that one.

    ``by_cublaslt`` has the knobs of plans of cuBLASLt's: the first that can be had runs
    the part, whatever cuDNN's plans do. ``cublaslt_by`` says what decided so.

    ``by`` says what was measured that decided so, such as "8 kernels calibrated on this
    GPU"; it is "" where nothing was that is like the part. ``engines_by`` does so for
    the engines.
    """

    rewrite: Rewrite
    slower: str = ""
    slow_engines: tuple[int, ...] = ()
    fast_engines: tuple[int, ...] = ()
    preference: str = ""
    by_cublaslt: tuple[Mapping[str, int], ...] = ()
    cublaslt_by: str = ""
    by: str = ""
    engines_by: str = ""

    @property
    def asked(self) -> str:
        """The request that lists the plan first that runs untuned; "" for cuDNN's."""
        if self.by_cublaslt:
            return cublaslt_preference(self.by_cublaslt)
        return self.preference

    def is_slow_by(self, engine: int) -> bool:
        """Whether "auto" leaves the part to XLA if this engine has the first plan."""
        if self.fast_engines:
            return engine not in self.fast_engines
        return engine in self.slow_engines


def rank(
    part: Graph, rewrites: Sequence[Rewrite], target: Target | None
) -> tuple[Ranked, ...]:
    """Return the rewrites of a part in the order in which they are tried.

    A rewrite that was never worth trying is left out. A target of None stands for a GPU
    that is not known.
    """
    tables = tables_for(target)
    ordered = products.in_order(part, rewrites, tables)
    found = (_ranked(part, rewrite, rewrites, target, tables) for rewrite in ordered)
    return tuple(_with_cublaslt(each, target, tables) for each in found)


def ranked(part: Graph, target: Target | None) -> tuple[Ranked, ...]:
    """Return all rewrites of a part for cuDNN, ranked; none where it has none."""
    return rank(part, legalize(part, target).candidates, target)


def _ranked(
    part: Graph,
    rewrite: Rewrite,
    rewrites: Sequence[Rewrite],
    target: Target | None,
    tables: Tables,
) -> Ranked:
    of, properties = _properties(part, rewrite, rewrites, target, tables)
    table = tables.about(of)
    point = _point(part, rewrite, properties)
    found = _by_kernels(point, rewrite, target, tables, table)
    # Kernels of its own family were measured with the engines that come first.
    is_known = found is not None
    if found is None:
        row = table.row(of, properties)
        by = f"the rules {table.source(target)}" if table.says(of) else ""
        found = Ranked(rewrite=rewrite, by=by)
        found = found if row is None else _by_row(row, rewrite, target, table)
    contraction = products.contraction_of(part, rewrite)
    if contraction is None:
        row = table.row(of, properties) if is_known else None
        if row is None or not row.slow_engines:
            return found
        # Kernels are judged by their first plans, which engines that take any size
        # had nowhere. Elsewhere a number may be another engine's; XLA is safe there.
        by = f"a rule {table.source(target)}"
        return replace(found, slow_engines=row.slow_engines, engines_by=by)
    graph, judged = contraction.graph, None
    if not found.slower:
        like = contraction.point(tables)
        judged = _by_kernels(like, rewrite, target, tables, last=None)
        if judged is None and like is not None:
            judged = _by_structure(of, properties, rewrite, target, tables)
        point = like if judged is not None else point
    slow_engines = found.slow_engines
    if not is_known and not slow_engines:
        slow_engines = kernels.slow_engines(graph, target, tables)
    engines_by = found.engines_by
    if not is_known and not engines_by:
        engines_by = kernels.engines_source(graph, target, tables)
    if point is not None and not found.fast_engines:
        own = kernels.own_engines(graph, tables)
        by_kernels = {*evidence.slow_engines(point, tables)}.difference(own)
        slow_engines = tuple(sorted(by_kernels.union(slow_engines)))
        if by_kernels:
            known_by = found.by if judged is None else judged.by
            engines_by = ", ".join(filter(None, (engines_by, known_by)))
    return replace(
        found,
        slower=found.slower if judged is None else judged.slower,
        slow_engines=slow_engines,
        preference=kernels.preference(graph, target, tables) or found.preference,
        by=found.by if judged is None else judged.by,
        engines_by=engines_by,
    )


def _with_cublaslt(ranked: Ranked, target: Target | None, tables: Tables) -> Ranked:
    """Add the plan of cuBLASLt's that runs a product, where a table says so.

    It spares an array that XLA writes and reads again, on every GPU: so the nearest
    table decides for all of them.
    """
    product = products.cublaslt_product(ranked.rewrite) if target is not None else None
    if product is None:
        return ranked
    table = tables.about("cuBLASLt")
    row = table.row("cuBLASLt", product)
    if row is None or row.runs == "xla":
        return ranked
    knobs = row.knobs if table.is_of_architecture(target) else {}
    wanted = (knobs, {}) if knobs else ({},)
    by = f"a rule {table.source(target)}"
    return replace(ranked, by_cublaslt=wanted, cublaslt_by=by)


def measured_as(part: Graph, rewrite: Rewrite, target: Target | None) -> Kernel | None:
    """Return the class and the sizes by which a part is judged; None if by rows."""
    tables = tables_for(target)
    _, properties = _properties(part, rewrite, [rewrite], target, tables)
    point = _point(part, rewrite, properties)
    return point or products.measured_as(part, rewrite, tables)


def _point(part: Graph, rewrite: Rewrite, properties: object) -> Kernel | None:
    """Return what a part of which rows speak is measured as, if it is."""
    if isinstance(properties, Norm | Attention):
        return properties.point
    return products.point_of(part, rewrite)


def _by_kernels(
    point: Kernel | None,
    rewrite: Rewrite,
    target: Target | None,
    tables: Tables,
    last: Table | None,
) -> Ranked | None:
    """Return what kernels say of a rewrite, up to those of the table that has rows."""
    verdict = None if point is None else evidence.verdict_on(point, tables, last)
    if point is None or verdict is None:
        return None
    slower = "" if verdict.is_faster else evidence.described(point, verdict)
    by = evidence.source(verdict, tables, target)
    return Ranked(rewrite=rewrite, slower=slower, by=by)


def _by_structure(
    of: str, properties: object, rewrite: Rewrite, target: Target | None, tables: Tables
) -> Ranked | None:
    """Return what a row says of products that are like none that was measured."""
    table = tables.about(of + UNLIKE_ALL)
    row = table.row(of + UNLIKE_ALL, properties)
    return None if row is None else _by_row(row, rewrite, target, table)


def _by_row(row: Row, rewrite: Rewrite, target: Target | None, table: Table) -> Ranked:
    """Return what a row says of a rewrite.

    Its fast and preferred engines are others, or none, where it was not measured.
    """
    slower = row.why if row.runs == "xla" else ""
    names_engines = bool(row.fast_engines or row.preferred)
    if names_engines and not table.is_of(target):
        slower = row.why_elsewhere if row.elsewhere == "xla" else slower
        row = replace(row, fast_engines=(), preferred="")
    by = f"a rule {table.source(target)}"
    return Ranked(
        rewrite=rewrite,
        slower=slower,
        slow_engines=(row.slow_engines if table.is_of_architecture(target) else ()),
        fast_engines=row.fast_engines,
        preference=row.preferred,
        by=by,
        engines_by=by if row.slow_engines or row.fast_engines else "",
    )


def _properties(
    part: Graph,
    rewrite: Rewrite,
    rewrites: Sequence[Rewrite],
    target: Target | None,
    tables: Tables,
) -> tuple[str, object]:
    """Return what rows are about a rewrite of a part, and its properties."""
    kind = part.nodes[0].kind.removesuffix("_backward") if len(part.nodes) == 1 else ""
    if kind in _ATTENTION:
        return "attention", Attention(part, rewrite)
    if kind in NORMALISED:
        return "norms", Norm(part, rewrite, target)
    if kind in _POOLING:
        return "pooling", None
    if kind == "causal_conv1d":
        return "causal convolutions", products.CausalConvolution(part, rewrite)
    return products.properties_of(part, rewrite, rewrites, tables)


_ATTENTION = ("sdpa",)
_POOLING = ("avg_pool", "max_pool")
# After the name of a family: rows about what is like nothing that was measured.
UNLIKE_ALL = " unlike all"
# Attention over caches and over f8 operands is cuDNN's wherever it has a plan. So are
# products of blocks: XLA multiplies them in bf16.
_CUDNNS = ("block_scaled_matmul", "sdpa_cached", "sdpa_f8")
# The kinds of kernels that are told by name, beside norms and contractions.
NAMED = (*_ATTENTION, *_POOLING, *_CUDNNS, "causal_conv1d", "grouped_matmul")
