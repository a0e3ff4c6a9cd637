# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README.md and docs/, from the benchmarks' data and the masks.

It also writes the sentence between the marks `gain` of README.md and docs/index.md.

Run from the repository's root: `python -m scripts.pictures`. It needs matplotlib and no
GPU. Each picture carries a digest of what it shows, so a test sees when one is old.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks"
FOLDER = ROOT / "docs" / "pictures"

_COLOURS = {
    "jax_cudnn": "#2a7d2e",
    "untuned": "#9ccc9e",
    "torch cudnn": "#d9791e",
    "torch": "#d9791e",
    "torch flash": "#f0b47a",
    "jax.nn xla": "#7a8794",
}
_BACKGROUND, _INK, _GRID = "white", "#222222", "#dddddd"


class Dot(NamedTuple):
    """A ratio of times with its lowest and highest of all rounds."""

    median: float
    low: float
    high: float


# A row of a panel: what was run, and the ratio of each contender.
Row = tuple[str, dict[str, Dot]]


class Panel(NamedTuple):
    """Rows of dots beside one another, all relative to the same contender."""

    title: str
    axis: str
    rows: list[Row]
    largest: float  # ratios beyond are written beside the panel


# --- data -----------------------------------------------------------------------------


def _read(name: str) -> Any:
    return json.loads((BENCHMARKS / f"{name}.json").read_text(encoding="utf-8"))


def _dot(entry: Mapping[str, float]) -> Dot:
    median, low, high = (entry[key] for key in ("ratio", "ratio_low", "ratio_high"))
    return Dot(round(median, 3), round(low, 3), round(high, 3))


def attention(ending: str) -> list[Row]:
    """Return the 16-bit cells of attention whose name has that ending."""
    rows: dict[str, dict[str, Dot]] = {}
    for entry in _read("sdpa")["rows"]:
        cell, contender = entry["cell"], entry["contender"]
        if cell.startswith("(") and cell.endswith(ending) and contender in _COLOURS:
            rows.setdefault(cell.removesuffix(ending), {})[contender] = _dot(entry)
    return list(rows.items())


def fusion(groups: Iterable[str], direction: str) -> list[Row]:
    """Return these groups of convolutions and matmuls, in one direction."""
    rows = []
    for cell in _read("fusion")["cells"]:
        if cell["group"] in groups and direction in cell["results"]:
            times = cell["results"][direction]["contenders"]
            found = {"jax_cudnn": "tuned", "untuned": "untuned", "torch": "torch"}
            dots = {a: _dot(times[b]) for a, b in found.items() if times.get(b)}
            rows.append((cell["name"], dots))
    return rows


def models() -> list[Row]:
    """Return the whole models, relative to plain JAX."""
    found = {"tuned": "jax_cudnn", "untuned": "untuned", "torch compiled": "torch"}
    rows: dict[str, dict[str, Dot]] = {}
    for entry in _read("models")["rows"]:
        if (contender := found.get(entry["contender"])) is not None:
            name = f"{entry['model']}, {entry['what']}"
            rows.setdefault(name, {})[contender] = _dot(entry)
    return list(rows.items())


def gain() -> str:
    """Return in a sentence what a user gains, as the data say it."""
    pairs = [
        [row["jax_cudnn"].median for _, row in attention(e)]
        for e in (" fwd", " fwd+bwd")
    ]
    ours = [ratio for pair in pairs for ratio in pair]
    silu = [
        row["jax_cudnn"].median
        for name, row in fusion(["conv"], "fwd")
        if name.endswith("+bias+silu")
    ]
    steps = {
        name.removesuffix(", train"): row["jax_cudnn"].median
        for name, row in models()
        if name.endswith(", train")
    }
    return (
        f"On an H200, attention takes {min(ours):.2f} to {max(ours):.2f} of the time "
        "of `jax.nn` with cuDNN. After `plans.autotune`, a convolution with bias and "
        f"SiLU takes {min(silu):.2f} to {max(silu):.2f} of XLA's time. Training steps "
        f"of {len(steps)} whole models take {min(steps.values()):.2f} to "
        f"{max(steps.values()):.2f} of plain JAX's, on H100s for most, and that of "
        f"GPT-2 small {steps['GPT-2 small']:.2f}."
    )


def with_gain(text: str) -> str:
    """Return the text of a page with the sentence between its marks."""
    first, second = "<!-- gain -->", "<!-- /gain -->"
    before, _, rest = text.partition(first)
    return f"{before}{first}\n{gain()}\n{second}{rest.partition(second)[2]}"


def panels() -> dict[str, list[Panel]]:
    """Return the panels of each picture of ratios."""
    to_jax, to_xla = "time / jax.nn with cuDNN", "time / XLA"
    both = {"fwd": "forward", "fwd+bwd": "forward and gradients"}
    found = {
        "speed": [
            Panel("Attention, forward and gradients", to_jax, attention(" fwd+bwd"), 2),
            Panel(
                "Convolutions and matmuls, forward",
                to_xla,
                [
                    (
                        name,
                        {
                            key: dots[key]
                            for key in ("jax_cudnn", "torch")
                            if key in dots
                        },
                    )
                    for name, dots in fusion(["conv", "matmul"], "fwd")
                ],
                2,
            ),
        ],
        "models": [Panel("Whole models", "time / plain JAX", models(), 1.2)],
        "attention": [
            Panel(f"Attention, {word}", to_jax, attention(f" {key}"), 2)
            for key, word in both.items()
        ],
    }
    for name, groups in {
        "products": ["conv", "matmul", "mlp"],
        "networks": ["resnet50", "convnext"],
    }.items():
        found[name] = [
            Panel(word.capitalize(), to_xla, fusion(groups, key), 2.6)
            for key, word in both.items()
        ]
    return found


def _parallel() -> list[tuple[str, list[tuple[str, float]]]]:
    passes: dict[str, list[tuple[str, float]]] = {}
    for row in _read("parallel")["rows"]:
        if row["contender"] != "one GPU":
            entry = row["contender"], round(row["efficiency"], 3)
            passes.setdefault(row["pass"], []).append(entry)
    return list(passes.items())


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


# --- drawing --------------------------------------------------------------------------


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


def _draw_panels(figure: Any, shown: Sequence[Panel]) -> None:
    heights = [len(panel.rows) for panel in shown]
    figure.set_size_inches(8, 0.27 * sum(heights) + 0.9 * len(shown))
    axes = figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, panel in zip(axes, shown, strict=True):
        axis.axvline(1, color=_INK, linewidth=1)
        for place, (_, dots) in enumerate(panel.rows):
            for contender, dot in reversed(dots.items()):
                _draw_dot(axis, place, contender, dot, panel.largest)
        axis.set_yticks(range(len(panel.rows)), [name for name, _ in panel.rows])
        axis.set_ylim(len(panel.rows) - 0.5, -0.5)
        axis.set_xlim(0, panel.largest)
        axis.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
        axis.set_xlabel(f"{panel.axis} (lower is faster)")
        axis.grid(axis="x", color=_GRID, zorder=0)
    names = dict.fromkeys(
        name for panel in shown for _, dots in panel.rows for name in dots
    )
    handles = [
        axes[0].plot([], [], "o", color=_COLOURS[name], label=name)[0] for name in names
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)


def _draw_dot(axis: Any, place: int, contender: str, dot: Dot, largest: float) -> None:
    colour = _COLOURS[contender]
    if dot.median > largest:
        axis.text(
            1.01,
            place,
            f"{contender} {dot.median:.1f}",
            transform=axis.get_yaxis_transform(),
            va="center",
            color=colour,
            fontsize=7,
        )
        return
    axis.plot(
        [dot.low, dot.high], [place, place], color=colour, linewidth=1.5, zorder=2
    )
    size = 7 if contender == "jax_cudnn" else 5
    axis.plot([dot.median], [place], "o", color=colour, markersize=size, zorder=3)


def _draw_parallel(figure: Any, shown: Any) -> None:
    figure.set_size_inches(8, 2.6)
    for axis, (title, rows) in zip(
        figure.subplots(1, 2, sharey=True), shown, strict=True
    ):
        names, values = zip(*rows, strict=True)
        bars = axis.barh(names, [100 * x for x in values], color=_COLOURS["jax_cudnn"])
        axis.bar_label(bars, fmt="%.0f %%", padding=-28, color="white")
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlim(0, 100)
        axis.set_title(title.capitalize(), loc="left", fontsize=10, fontweight="bold")
        axis.set_xlabel("efficiency of 2 GPUs, %")


def _draw_losses(figure: Any, shown: Mapping[str, Sequence[float]]) -> None:
    figure.set_size_inches(5, 2.6)
    axis = figure.subplots()
    styles = {
        "jax_cudnn": {"color": _COLOURS["jax_cudnn"], "linewidth": 4, "alpha": 0.6}
    }
    for name, losses in shown.items():
        style = styles.get(name, {"color": _INK, "linestyle": "--"})
        axis.plot(range(1, len(losses) + 1), losses, label=name, **style)
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats a byte")
    axis.grid(color=_GRID)
    axis.legend(frameon=False)


def _draw_losses_in_f8(figure: Any, shown: Sequence[Mapping[str, Any]]) -> None:
    figure.set_size_inches(5, 2.8)
    axis = figure.subplots()
    for line in shown:
        is_f8 = line["is_f8"]
        axis.plot(
            line["steps"],
            line["losses"],
            label=line["name"],
            color=_COLOURS["jax_cudnn"] if is_f8 else _INK,
            linestyle="-" if line["seed"] == 0 else ":",
            linewidth=3 if is_f8 else 1.2,
            alpha=0.6 if is_f8 else 1,
        )
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats a byte")
    axis.grid(color=_GRID)
    axis.legend(frameon=False)


def _draw_masks(figure: Any, shown: Sequence[tuple[str, Sequence[str]]]) -> None:
    figure.set_size_inches(8, 3.4)
    for axis, (title, rows) in zip(
        figure.subplots(2, len(shown) // 2).flat, shown, strict=True
    ):
        seen = [[letter == "x" for letter in row] for row in rows]
        axis.imshow(seen, cmap="Greens", vmin=-0.1, vmax=1.4, interpolation="nearest")
        axis.set_title(title, fontsize=9, family="monospace")
        axis.set_xlabel("key", fontsize=8)
        axis.set_ylabel("query", fontsize=8)
        axis.set(xticks=(), yticks=())


_DRAWERS = {
    "parallel": _draw_parallel,
    "losses": _draw_losses,
    "f8_losses": _draw_losses_in_f8,
    "masks": _draw_masks,
}


def files() -> Iterator[Path]:
    """Write all pictures, and yield their files."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "jax_cudnn",
            "font.family": ["sans-serif"],
            "font.size": 8,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    FOLDER.mkdir(exist_ok=True)
    for name, shown in contents().items():
        figure = Figure(layout="constrained", facecolor=_BACKGROUND)
        _DRAWERS.get(name, _draw_panels)(figure, shown)
        path = FOLDER / f"{name}.svg"
        # Without a date, so that drawing again changes nothing.
        about = {"Date": None, "Description": digest(shown), "Creator": None}
        figure.savefig(path, metadata=about)
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n", "utf-8")
        yield path


PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_gain(page.read_text("utf-8")), "utf-8")
    for file in files():
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")
