# SPDX-License-Identifier: Apache-2.0
"""Lays out Llama's arrays over a mesh of devices."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from language.names import is_matrix, name_of

from jax_cudnn import checkpoint_policies, parallel
from llama.settings import LlamaSettings

Axis = Literal["data", "fsdp", "tensor", "sequence"]
Method = Literal["ring", "all_gather", "all_to_all"]
Remat = Literal["none", "full", "attention", "dots", "f8", "offload"]

# What jax.checkpoint saves of a layer; with "none" there is no jax.checkpoint.
POLICIES = {
    "full": checkpoint_policies.nothing_saveable,
    "attention": checkpoint_policies.attention_saveable,
    "dots": checkpoint_policies.dots_and_attention_saveable,
    "f8": checkpoint_policies.f8_saveable,
    "offload": checkpoint_policies.offload_dots_and_attention("device", "pinned_host"),
}


def _attention_of_jax(primitive: Any, *_: Any, **__: Any) -> bool:
    """Save cuDNN's attention as plain JAX has it, for the baseline."""
    return primitive.name.startswith("dot_product_attention_fwd")


# How each matrix of a layer, or outside of the layers, is kept. First products of a
# pair are split by columns over "tensor" and second ones by rows, so that a layer needs
# one sum over devices for attention and one for the perceptron. The norms' scales are
# whole on each device.
KEPT = {
    "tokens.embedding": P("tensor", "fsdp"),  # vocabulary, width
    "query.kernel": P("fsdp", "tensor", None),  # width, heads, head size
    "key.kernel": P("fsdp", "tensor", None),  # width, key heads, head size
    "value.kernel": P("fsdp", "tensor", None),
    "out.kernel": P("tensor", None, "fsdp"),  # heads, head size, width
    "gate.kernel": P("fsdp", "tensor"),  # width, hidden
    "up.kernel": P("fsdp", "tensor"),
    "down.kernel": P("tensor", "fsdp"),  # hidden, width
    "head.kernel": P("fsdp", "tensor"),  # width, vocabulary
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The devices as a mesh, and how the work of a step is laid out over them.

    The batch is split over "data" and "fsdp", matrices are split over "fsdp" and
    gathered for use, heads and hidden features are split over "tensor", and tokens of a
    row over "sequence", where attention goes by ``method``. ``packed`` says whether a
    row has several documents. ``parts`` of the batch follow one another. ``remat`` says
    what a layer saves for the backward pass, and ``unroll`` how many layers one turn of
    the loop over layers has.
    """

    mesh: jax.sharding.Mesh
    key_heads: int
    method: Method = "ring"
    packed: bool = False
    parts: int = 1
    remat: Remat = "dots"
    unroll: int = 1

    @property
    def rows(self) -> P:
        """Return how the arrays of a batch are split."""
        return P(("data", "fsdp"), "sequence")

    @property
    def activations(self) -> NamedSharding:
        """Return how (batch, length, width) is split."""
        return NamedSharding(self.mesh, P(*self.rows, None))

    @property
    def sequence(self) -> int:
        """Return over how many devices the tokens of a row are split."""
        return self.mesh.shape["sequence"]

    @property
    def order(self) -> Literal["contiguous", "zigzag", "striped"]:
        """Return in which order the tokens of a row lie, for causal work in balance."""
        if self.sequence == 1 or self.method == "all_to_all":
            return "contiguous"
        return "striped" if self.packed and self.method == "ring" else "zigzag"

    def positions(self, length: int) -> np.ndarray:
        """Return the positions of a row's tokens in the order in which they lie."""
        positions = np.arange(length)
        if self.order == "contiguous":
            return positions
        put = parallel.to_zigzag if self.order == "zigzag" else parallel.to_striped
        with jax.ensure_compile_time_eval():
            return np.asarray(put(positions, self.sequence, axis=0))

    def in_sequence(self, x: jax.Array) -> jax.Array:
        """Return rows (batch, length) with their tokens as they follow one another."""
        if self.order == "contiguous":
            return x
        back = parallel.from_zigzag if self.order == "zigzag" else parallel.from_striped
        return back(x, self.sequence)

    def of_state(self, state: Any) -> Any:
        """Return where each array of parameters or of the optimizer is kept."""

        def place(path: tuple[Any, ...], _: Any) -> NamedSharding:
            return NamedSharding(self.mesh, self.kept(name_of(path)))

        return jax.tree_util.tree_map_with_path(place, state)

    def kept(self, name: str) -> P:
        """Return how a parameter is kept, or the optimizer's moment of it."""
        endings = (spec for ending, spec in KEPT.items() if name.endswith(ending))
        spec = next(endings, None)
        if spec is None:
            return P()
        if name.endswith(("key.kernel", "value.kernel")) and self._is_shared:
            spec = P("fsdp", None, None)
        # Those of all layers are one array, whose first axis is that of the layers.
        return P(None, *spec) if ".blocks." in f".{name}" else spec

    @property
    def _is_shared(self) -> bool:
        """Whether devices along "tensor" share key heads, which each has then."""
        return self.key_heads % self.mesh.shape["tensor"] != 0

    def used(self, name: str) -> NamedSharding:
        """Return how a matrix of one layer is split when it is used."""
        spec = (None if axis == "fsdp" else axis for axis in self.kept(name))
        return NamedSharding(self.mesh, P(*spec))

    def gathered(self, params: nnx.State, dtype: str, *, f8: bool = False) -> nnx.State:
        """Return the parameters of a layer, or of the rest, as they are used.

        Matrices are converted before they are gathered: half of the bytes. Products in
        f8 gather their own copies of them.
        """

        def one(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            name = name_of(path)
            if f8 or not is_matrix(path) or name.startswith("blocks."):
                return x
            kept = NamedSharding(self.mesh, self.kept(name))
            return _gathered(x.astype(dtype), kept, self.used(name))

        return jax.tree_util.tree_map_with_path(one, params)

    def checkpointed(self, layer: Any) -> Any:
        """Return a layer that saves what ``remat`` says."""
        if self.remat == "none":
            return layer
        policy = POLICIES[self.remat]
        if self.remat in ("attention", "dots"):
            policy = checkpoint_policies.save_from_both_policies(
                policy, _attention_of_jax
            )
        return jax.checkpoint(layer, policy=policy)


def _gathered(x: jax.Array, kept: NamedSharding, used: NamedSharding) -> jax.Array:
    """Return x in another sharding; its gradient is scattered into the first one."""

    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, used)

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return gather(x), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (jax.lax.with_sharding_constraint(gradient, kept),)

    gather.defvjp(forward, backward)
    return gather(x)


def choose_layout(
    shape: str | None,
    settings: LlamaSettings,
    *,
    method: Method = "ring",
    parts: int = 1,
    remat: Remat = "dots",
    unroll: int = 1,
    devices: list[Any] | None = None,
) -> Layout:
    """Return the mesh that was asked for, such as data=2,fsdp=4, or all along fsdp."""
    devices = jax.devices() if devices is None else devices
    sizes = _sizes(shape, len(devices))
    count = math.prod(sizes.values())
    mesh = "the mesh " + ",".join(f"{name}={size}" for name, size in sizes.items())
    if count > len(devices):
        raise ValueError(f"{mesh} needs {count} devices; there are {len(devices)} here")
    _check_sizes(mesh, sizes, settings, parts, method)
    if remat == "offload":
        _check_offloading(devices[0])
    if remat == "f8" and not settings.f8:
        raise ValueError(
            "--remat f8 saves copies in f8, and there are none without --f8. Pass "
            "--f8, or another --remat"
        )
    return Layout(
        mesh=jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            axis_types=(AxisType.Auto,) * len(sizes),
            devices=devices[:count],
        ),
        key_heads=settings.key_heads,
        method=method,
        packed=settings.packed,
        parts=parts,
        remat=remat,
        unroll=unroll,
    )


def _check_offloading(device: Any) -> None:
    """Raise ValueError if activations cannot be kept in the host's memory here."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise ValueError(
            f"--remat offload needs the memory pinned_host, and {device} has "
            f"{', '.join(kinds)}. Choose another --remat, such as dots"
        )
    if jax.__version_info__ < (0, 10, 2):
        raise ValueError(
            "--remat offload needs JAX 0.10.2 or newer, and this is "
            f"{jax.__version__}, whose XLA cannot place what is offloaded in a program "
            "for a mesh. Choose another --remat, such as dots"
        )


def _sizes(shape: str | None, count: int) -> dict[str, int]:
    """Return the devices along each axis; those that are not named have one."""
    names = get_args(Axis)
    given = {"fsdp": count}
    if shape is not None:
        pairs = re.findall(r"(\w+)=([1-9]\d*)(?:,|$)", shape)
        given = {name: int(size) for name, size in pairs}
        written = ",".join(f"{name}={size}" for name, size in pairs)
        if written != shape or len(given) != len(pairs) or not given.keys() <= {*names}:
            raise ValueError(
                f"--mesh {shape}: write it as data=2,fsdp=4, with each of "
                f"{', '.join(names)} at most once"
            )
    return {name: given.get(name, 1) for name in names}


def _check_sizes(
    mesh: str, sizes: dict[str, int], settings: LlamaSettings, parts: int, method: str
) -> None:
    """Raise ValueError if what is to be split cannot be."""
    rows, tensor, sequence = (
        sizes["data"] * sizes["fsdp"],
        sizes["tensor"],
        sizes["sequence"],
    )
    is_zigzag = method == "all_gather" or (method == "ring" and not settings.packed)
    chunks = 2 * sequence if is_zigzag else sequence
    columns = {
        "heads": settings.heads,
        "hidden": settings.hidden,
        "vocabulary": settings.vocabulary,
    }
    if sequence > 1 and settings.baseline:
        raise ValueError(
            f"{mesh}: plain JAX has no attention over a split sequence. Leave out "
            "--baseline, or sequence"
        )
    for name, size, divisor, why in (
        ("batch", settings.batch, rows * parts, "data * fsdp * accumulate"),
        ("width", settings.width, sizes["fsdp"], "fsdp"),
        *((name, size, tensor, "tensor") for name, size in columns.items()),
        (
            "context",
            settings.context,
            chunks if sequence > 1 else 1,
            "sequence * 2" if is_zigzag else "sequence",
        ),
    ):
        if size % divisor:
            raise ValueError(
                f"{mesh}: --{name} {size} is not a multiple of {why} = {divisor}"
            )
    keys = settings.key_heads
    if keys % tensor and (tensor % keys or sequence > 1):
        raise ValueError(
            f"{mesh}: --key-heads {keys} is not a multiple of tensor = {tensor}"
            + (", which sequence needs" if tensor % keys == 0 else ", or a divisor")
        )
    if sequence > 1 and method == "all_to_all":
        per = settings.heads // tensor
        if per % sequence:
            raise ValueError(
                f"{mesh}: each part of the heads along tensor has {per}, which is no "
                f"multiple of sequence = {sequence}, as --method all_to_all needs. "
                "Choose --method ring"
            )
