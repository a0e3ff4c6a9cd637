# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README.md and docs/, from the benchmarks' data and the masks.

It also writes what stands between the marks `gain` of README.md and docs/index.md.

Run from the repository's root: `python -m scripts.pictures`. It needs matplotlib and no
GPU. Each picture carries a digest of what it shows, so a test sees when one is old.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scripts.panels import CONTENDERS, Dot, Panel, Row

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks"
MEASURED = ROOT / "docs" / "internals" / "measured"
FOLDER = ROOT / "docs" / "pictures"

# No axis begins below it.
_LEAST = 0.1


def _whole(title: str, axis: str, rows: list[Row], **more: bool) -> Panel:
    """Return a panel of whole models, as wide as the lowest ratio asks for."""
    lows = [dot.low for _, row in rows for dots in row.values() for dot in dots]
    lowest = min(low for low in lows if low >= _LEAST)
    smallest = max(x for x in (_LEAST, 0.2, 0.3, 0.4, 0.5) if x <= lowest)
    return Panel(title, axis, rows, smallest, 1.5, **more)


# --- data -----------------------------------------------------------------------------


def _read(name: str) -> Any:
    folder = next(x for x in (BENCHMARKS, MEASURED) if (x / f"{name}.json").exists())
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def _dot(entry: Mapping[str, float]) -> Dot:
    median, low, high = (entry[key] for key in ("ratio", "ratio_low", "ratio_high"))
    return Dot(round(median, 3), round(low, 3), round(high, 3))


def attention(ending: str) -> list[Row]:
    """Return the 16-bit cells of attention whose name has that ending."""
    rows: dict[str, dict[str, list[Dot]]] = {}
    for entry in _read("sdpa")["rows"]:
        cell, contender = entry["cell"], entry["contender"]
        if cell.startswith("(") and cell.endswith(ending) and contender in CONTENDERS:
            row = rows.setdefault(cell.removesuffix(ending), {})
            row.setdefault(contender, []).append(_dot(entry))
    return list(rows.items())


def fusion(groups: Iterable[str], direction: str) -> list[Row]:
    """Return these groups of convolutions and matmuls, in one direction."""
    rows = []
    found = {"jax_cudnn": "tuned", "untuned": "untuned", "torch": "torch"}
    for cell in _read("fusion")["cells"]:
        if cell["group"] in groups and direction in cell["results"]:
            times = cell["results"][direction]["contenders"]
            dots = {a: [_dot(times[b])] for a, b in found.items() if times.get(b)}
            rows.append((cell["name"], dots))
    return rows


def models(what: str) -> list[Row]:
    """Return training or inference of the whole models, relative to plain JAX."""
    found = {"tuned": "jax_cudnn", "untuned": "untuned", "torch compiled": "torch"}
    rows: dict[str, dict[str, list[Dot]]] = {}
    for entry in _read("models")["rows"]:
        contender = found.get(entry["contender"])
        if contender is not None and entry["what"] == what:
            name = (
                "Llama-like, decoding" if entry["model"] == "decode" else entry["model"]
            )
            rows.setdefault(name, {})[contender] = [_dot(entry)]
    return list(rows.items())


def llama() -> list[Row]:
    """Return the steps of Llama-2 on several GPUs, relative to plain JAX."""
    rows: list[Row] = []
    for entry in _read("llama")["rows"]:
        who, _, how = entry["contender"].partition(", ")
        if who == "jax_cudnn":
            dtype = "f8" if "f8" in how else "bf16"
            kind = "jax_cudnn" if "tuned" in how else "untuned"
            name = f"{entry['size']}, {entry['mesh']}, {dtype}"
            rows.append((name, {kind: [_dot(entry)]}))
    return rows


# --- rows that can be read ------------------------------------------------------------

_NAMES = {"relu": "ReLU", "silu": "SiLU", "gelu": "GELU"}


def _sizes(cell: str) -> str:
    """Return in words which attention a cell is: (8,2048,16h,64) causal."""
    batch, tokens, heads, size, rest = re.fullmatch(
        r"\((\d+),(\d+),(\d+h|\d+h:\d+),(\d+)\)(.*)", cell
    ).groups()  # type: ignore[union-attr]
    queries, _, keys = heads.partition("h:")
    heads = f"{queries} heads ({keys} for keys)" if keys else f"{queries[:-1]} heads"
    rest = "causal" if rest == " causal" else "with a bias"
    tokens = f"{batch} \N{MULTIPLICATION SIGN} {int(tokens):,} tokens"
    return f"{tokens}, {heads} of {size}, {rest}"


def _kind(name: str) -> str:
    """Return in words which operation it is, of whatever size."""
    if name.startswith("("):
        return "Causal" if name.endswith(" causal") else "With a bias"
    operation, then = re.fullmatch(r"(.*?) \(.*?\)(.*)", name).groups()  # type: ignore[union-attr]
    if then == " bf16 x i8":
        return "Matmul of bf16 and int8"
    word = "Matmul" if operation == "matmul" else "Convolution"
    if "depthwise" in operation:
        word = "Depthwise convolution"
    elif "groups" in operation:
        word += f" in {operation.split()[-1]} groups"
    return " + ".join([word, *(_NAMES.get(x, x) for x in then.split("+")[1:])])


def _by_kind(rows: Iterable[Row]) -> list[Row]:
    """Return a row for each operation, with the dots of all its sizes."""
    found: dict[str, dict[str, list[Dot]]] = {}
    for name, dots in rows:
        row = found.setdefault(_kind(name), {})
        for contender, each in dots.items():
            row.setdefault(contender, []).extend(each)
    return [
        (f"{name} ({n} sizes)" if (n := len(row["jax_cudnn"])) > 1 else name, row)
        for name, row in found.items()
    ]


def _without(rows: Iterable[Row], *contenders: str) -> list[Row]:
    return [
        (name, {key: dots for key, dots in row.items() if key not in contenders})
        for name, row in rows
    ]


# --- what whole models gain -----------------------------------------------------------


class Step(NamedTuple):
    """An untuned training step: its time and its memory, relative to plain JAX's."""

    name: str
    gpu: str
    time: Dot
    memory: Dot


def steps() -> list[Step]:
    """Return the training steps of the whole models, those that gain most first.

    Of two plain programs, the faster one is what they are compared with.
    """
    data = _read("models")
    trained = [row for row in data["rows"] if row["what"] == "train"]
    plain = {
        row["model"]: row
        for row in sorted(trained, key=lambda row: -row["ms"])
        if row["contender"].startswith("plain JAX")
    }
    found = []
    for row in trained:
        if row["contender"] == "untuned":
            memory = round(row["mib"] / plain[row["model"]]["mib"], 3)
            dots = _dot(row), Dot(memory, memory, memory)
            found.append(Step(row["model"], row["GPU"].split()[1], *dots))
    return sorted(found, key=lambda step: step.time.median)


def panels_of_steps() -> list[Panel]:
    """Return the panel of time and memory of the training steps."""
    rows: list[Row] = [
        (step.name, {"time": [step.time], "memory": [step.memory]}) for step in steps()
    ]
    title, axis = "Untuned training steps", "jax_cudnn / plain JAX"
    return [_whole(title, axis, rows, is_one_lane=True)]


def _compared(ratio: float, what: str) -> str:
    percent = round(100 * (ratio - 1))
    if 45 <= percent + 100 <= 55:
        return f"half of the {what}"
    if not percent:
        return f"the same {what}"
    return f"{abs(percent)} % {'more' if percent > 0 else 'less'} {what}"


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]][len(parts) == 1 :])


def gain() -> str:
    """Return what users gain in whole models, as the data say it."""
    found = steps()
    gpus = " and ".join(f"{gpu}s" for gpu in sorted({step.gpu for step in found}))
    faster = [step for step in found if round(step.time.median, 2) <= 0.95]
    smaller = [step for step in found if round(step.memory.median, 2) <= 0.95]
    losses = [
        f"{step.name} {verb} {_compared(ratio, what)}"
        for what, verb in (("time", "takes"), ("memory", "needs"))
        for step in found
        if round(ratio := getattr(step, what).median, 2) > 1
    ]
    lines = [
        "Training steps with jax_cudnn, untuned, compared with plain JAX and its own "
        f"cuDNN attention, on {gpus}:",
        "",
    ]
    lines += [
        f"- {step.name}: {_compared(step.time.median, 'time')} and "
        f"{_compared(step.memory.median, 'memory')}"
        for step in faster[:5]
    ]
    takes = "takes" if len(faster) == 1 else "take"
    needs = "needs" if len(smaller) == 1 else "need"
    counted = (
        f"Of {len(found)} models, {len(faster)} {takes} at least 5 % less time, and "
        f"{len(smaller)} {needs} at least 5 % less memory."
    )
    if losses:
        counted += f" But {_listed(losses)}."
    return "\n".join([*lines, "", counted])


def with_gain(text: str) -> str:
    """Return the text of a page with what is gained between its marks."""
    first, second = "<!-- gain -->", "<!-- /gain -->"
    before, _, rest = text.partition(first)
    return f"{before}{first}\n{gain()}\n{second}{rest.partition(second)[2]}"


def panels() -> dict[str, list[Panel]]:
    """Return the panels of each picture of ratios."""
    to_jax, to_xla = "time / jax.nn with cuDNN", "time / XLA"
    both = {"fwd": "forward", "fwd+bwd": "forward and gradients"}

    def attentions(direction: str) -> list[Row]:
        return [(_sizes(name), row) for name, row in attention(f" {direction}")]

    def products(direction: str, *groups: str) -> list[Row]:
        return _by_kind(fusion(groups, direction))

    networks = {"ResNet-50": "resnet50", "ConvNeXt-T": "convnext"}
    return {
        "steps": panels_of_steps(),
        "speed": [
            Panel(
                "Attention, forward and gradients",
                to_jax,
                _without(_by_kind(attention(" fwd+bwd")), "jax.nn xla"),
                0.8,
                2,
            ),
            Panel(
                "Convolutions and matmuls, forward",
                to_xla,
                _without(products("fwd", "conv", "matmul"), "untuned"),
                0.4,
                2.5,
            ),
        ],
        "models": [
            _whole("Training", "time / plain JAX", models("train")),
            _whole("Inference", "time / plain JAX", models("infer")),
        ],
        "llama": [_whole("Training Llama-2", "time / plain JAX in bf16", llama())],
        "attention": [
            Panel(f"Attention, {word}", to_jax, attentions(key), 0.8, 2)
            for key, word in both.items()
        ],
        "products": [
            Panel(
                word.capitalize(),
                to_xla,
                products(key, "conv", "matmul", "mlp"),
                0.4,
                2.5,
            )
            for key, word in both.items()
        ],
        "networks": [
            Panel(f"{name}, {word}", to_xla, products(key, group), 0.5, 2.5)
            for name, group in networks.items()
            for key, word in both.items()
        ],
    }


def _parallel() -> list[tuple[str, list[tuple[str, float]]]]:
    panels: dict[str, list[tuple[str, float]]] = {}
    words = {"forward": "forward", "forward and backward": "with gradients"}
    for what, page in (("Sequence", "parallel"), ("Documents", "parallel_packed")):
        for row in _read(page)["rows"]:
            if row["contender"] != "one GPU":
                entry = row["contender"], round(row["efficiency"], 3)
                title = f"{what},\n{words[row['pass']]}"
                panels.setdefault(title, []).append(entry)
    return list(panels.items())


def _losses() -> dict[str, list[float]]:
    rows = [row for row in _read("train_gpt")["rows"] if row["way"] == "one GPU"]
    return {row["contender"]: row["losses"] for row in rows}


def _losses_in_f8() -> list[dict[str, Any]]:
    data = _read("f8_training")
    steps = data["steps"]
    return [
        {
            "name": f"{'f8' if row['f8'] else data['dtype']}, seed {row['seed']}",
            "is_f8": row["f8"],
            "seed": row["seed"],
            "steps": [
                round(steps * (i + 0.5) / len(row["losses"]))
                for i in range(len(row["losses"]))
            ],
            "losses": row["losses"],
        }
        for row in data["rows"]
    ]


def _masks() -> list[tuple[str, list[str]]]:
    """Return which keys each of 16 queries sees, as the package's masks say it."""
    import jax.numpy as jnp

    import jax_cudnn
    from jax_cudnn import masks

    documents = jnp.array([[0] * 5 + [1] * 7 + [2] * 4])
    shown: dict[str, Any] = {
        "Causal()": masks.Causal(),
        "Window(3, 3)": masks.Window(3, 3),
        "Causal() & Window(4, 0)": masks.Causal() & masks.Window(4, 0),
        "Prefix(6)": masks.Prefix(jnp.array([6])),
        "Segments(ids)": masks.Segments(documents),
        "Packed(...) & Causal()": masks.Packed([0, 5, 12, 16]) & masks.Causal(),
    }
    # With values of the unit matrix, an output is the attention weights themselves.
    zeros, unit = jnp.zeros((1, 16, 1, 16)), jnp.eye(16)[None, :, None, :]
    found = []
    for title, mask in shown.items():
        seen = jax_cudnn.sdpa(zeros, zeros, unit, mask=mask)[0, :, 0] > 0
        found.append((title, ["".join(".x"[int(x)] for x in row) for row in seen]))
    return found


# --- writing --------------------------------------------------------------------------


def digest(shown: Any) -> str:
    """Return a short digest of what a picture shows."""
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def contents() -> dict[str, Any]:
    """Return what each picture shows, by its name."""
    return {
        **panels(),
        "parallel": _parallel(),
        "losses": _losses(),
        "f8_losses": _losses_in_f8(),
        "masks": _masks(),
    }


PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")


def main() -> None:
    """Write all pictures, and what the pages say of them."""
    from scripts import drawing  # needs matplotlib, which a test of the data does not

    for page in PAGES:
        page.write_text(with_gain(page.read_text("utf-8")), "utf-8")
    for name, shown in contents().items():
        file = FOLDER / f"{name}.svg"
        drawing.draw(name, shown, digest(shown), file)
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
