# SPDX-License-Identifier: Apache-2.0
"""Reads and writes weights in Hugging Face's layout of Llama.

A folder has config.json and weights in *.safetensors: one file, or several with an
index. There a matrix is (outputs, inputs) and heads are merged; here it is
(inputs, outputs) with an axis for heads, and an axis of layers in front.

safetensors is imported where weights are asked for, so that all else runs without it.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from language import processes
from language.names import name_of
from language.task import Task

from llama.settings import LlamaSettings

_CONFIG, _SINGLE = "config.json", "model.safetensors"
_INDEX = f"{_SINGLE}.index.json"

# Hugging Face's names of the settings, and ours.
_SETTINGS = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key_heads",
    "intermediate_size": "hidden",
    "vocab_size": "vocabulary",
    "rms_norm_eps": "epsilon",
    "rope_theta": "rotary_base",
}
# What a model of the example is, besides.
_KIND = {
    "model_type": "llama",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_LAYER = "model.layers.{layer}."
# Hugging Face's names of the weights, by ours.
_WEIGHTS = {
    "tokens.embedding": "model.embed_tokens.weight",
    "blocks.attention_norm.scale": f"{_LAYER}input_layernorm.weight",
    "blocks.query.kernel": f"{_LAYER}self_attn.q_proj.weight",
    "blocks.key.kernel": f"{_LAYER}self_attn.k_proj.weight",
    "blocks.value.kernel": f"{_LAYER}self_attn.v_proj.weight",
    "blocks.out.kernel": f"{_LAYER}self_attn.o_proj.weight",
    "blocks.mlp_norm.scale": f"{_LAYER}post_attention_layernorm.weight",
    "blocks.gate.kernel": f"{_LAYER}mlp.gate_proj.weight",
    "blocks.up.kernel": f"{_LAYER}mlp.up_proj.weight",
    "blocks.down.kernel": f"{_LAYER}mlp.down_proj.weight",
    "norm.scale": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings that a folder's config.json says.

    Raises:
      OSError: there is no such file.
      ValueError: it is of a model that the example does not have.
    """
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    # Newer files have the rotary embedding's settings in a table of their own.
    config |= config.get("rope_parameters") or {}
    expected = _KIND | {
        "rope_scaling": None,
        "rope_type": "default",
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
    }
    for name, value in expected.items():
        if (given := config.get(name, value)) not in (value, None):
            raise ValueError(
                f"{folder / _CONFIG} has {name} {given!r}; this example has models "
                f"with {value!r} only"
            )
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    return {
        ours: config[theirs] for theirs, ours in _SETTINGS.items() if theirs in config
    }


def load_weights(folder: Path, task: Task) -> nnx.State:
    """Return the parameters, placed as the task's layout says.

    Our arrays are read one after another, so that the host's memory has to hold only
    the largest.
    """
    shapes = jax.eval_shape(task.initial)
    with contextlib.ExitStack() as files:
        read = _reader(folder, files)

        def load(path: tuple[Any, ...], shape: Any, place: Any) -> jax.Array:
            name, x = name_of(path), np.empty(shape.shape, shape.dtype)
            for layer, part in _parts(name, x):
                theirs = _WEIGHTS[name].format(layer=layer)
                part[...] = _ours(read(theirs), part.shape, name, theirs)
            return processes.placed(x, place)

        places = task.layout.of_state(shapes)
        return jax.tree_util.tree_map_with_path(load, shapes, places)


def save_weights(folder: Path, params: nnx.State, settings: LlamaSettings) -> None:
    """Write the parameters, in f32, with a file for each layer and one for the rest.

    Of several processes the first one writes what all of them gather.
    """
    from safetensors.numpy import save_file

    if processes.is_first():
        folder.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    files: dict[int | None, dict[str, jax.Array]] = {}
    for path, x in leaves:
        name = name_of(path)
        for layer, part in _parts(name, x):
            files.setdefault(layer, {})[name] = part
    index, size = {}, 0
    for number, (layer, arrays) in enumerate(files.items(), 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        written = {
            _WEIGHTS[name].format(layer=layer): _theirs(processes.whole(x), name)
            for name, x in arrays.items()
        }
        if processes.is_first():
            save_file(written, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(written, file)
        size += sum(x.nbytes for x in written.values())
    if not processes.is_first():
        return
    told = {"metadata": {"total_size": size}, "weight_map": index}
    _write_json(folder / _INDEX, told)
    sizes = {theirs: getattr(settings, ours) for theirs, ours in _SETTINGS.items()}
    kind = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    context = {"max_position_embeddings": settings.context}
    _write_json(folder / _CONFIG, kind | _KIND | sizes | context)


def _parts(name: str, x: Any) -> Iterator[tuple[int | None, Any]]:
    """Yield the arrays that Hugging Face has of one of ours, with their layers."""
    if "{layer}" not in _WEIGHTS[name]:
        yield None, x
        return
    for layer in range(x.shape[0]):
        yield layer, x[layer]


def _theirs(x: np.ndarray, name: str) -> np.ndarray:
    """Return a weight as Hugging Face has it."""
    if not name.endswith("kernel"):
        return x
    inputs = 2 if name.endswith("out.kernel") else 1  # heads and their features
    merged = x.reshape(math.prod(x.shape[:inputs]), -1)
    return np.ascontiguousarray(merged.T)


def _ours(x: np.ndarray, shape: tuple[int, ...], name: str, theirs: str) -> np.ndarray:
    """Return a weight as we have it; one of 16 bits is converted by its reader."""
    expected = _theirs(np.empty(shape, np.bool_), name).shape
    if x.shape != expected:
        raise ValueError(
            f"{theirs} is {list(x.shape)}, and {_CONFIG} says {list(expected)}"
        )
    return (x.T if name.endswith("kernel") else x).reshape(shape)


def _reader(folder: Path, files: contextlib.ExitStack) -> Callable[[str], np.ndarray]:
    """Return a function that reads the weight of a name, from one file or several."""
    from safetensors import safe_open

    if (folder / _INDEX).exists():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    else:
        index = None
    names = {_SINGLE} if index is None else {*index.values()}
    opened = {
        name: files.enter_context(safe_open(folder / name, framework="numpy"))
        for name in names
    }

    def read(name: str) -> np.ndarray:
        return opened[_SINGLE if index is None else index[name]].get_tensor(name)

    return read


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
