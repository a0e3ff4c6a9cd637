# SPDX-License-Identifier: Apache-2.0
"""How scripts/pictures.py draws: for a phone of 390 pixels, by day and by night.

A picture is hardly wider than the phone's text, so its letters have 12 pixels there.
Names stand above what they name. Colours are variables of a style sheet in the picture,
which follows the colour scheme of the page or of the reader.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from scripts.panels import CONTENDERS, Dot, Panel

_WIDTH = 4.4  # inches of 72 points
_SIZE = 10.5  # points of text
_LANE = 0.14  # inches for the dots of a contender
_LABEL = 0.24  # inches for the name of a row
_GAP = 0.06  # inches below a row

# What matplotlib draws with, and what is written instead: a variable, with its colours
# on a light and on a dark page.
_COLOURS = {
    "paper": ("#ffffff", "#131416"),
    "ink": ("#222222", "#d8d8d8"),
    "grid": ("#dddddd", "#3a3d42"),
    "green": ("#157a43", "#3fcf8a"),
    "blue": ("#0a78c2", "#5db8ff"),
    "orange": ("#c95a06", "#ffa24d"),
    "purple": ("#8238ad", "#c99aff"),
    "pink": ("#c2256b", "#ff7fb4"),
    "grey": ("#69737d", "#a3adb7"),
}
_LIGHT = {name: light for name, (light, _) in _COLOURS.items()}

# Each contender has its colour and its mark, in every picture.
_STYLES = {
    "jax_cudnn": ("green", "o"),
    "untuned": ("blue", "D"),
    "torch": ("orange", "s"),
    "torch cudnn": ("purple", "^"),
    "torch flash": ("pink", "v"),
    "jax.nn xla": ("grey", "X"),
    "time": ("green", "o"),
    "memory": ("purple", "^"),
}


def draw(name: str, shown: Any, digest: str, file: Path) -> None:
    """Write the picture of that name, with a digest of what it shows."""
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "jax_cudnn",
            "font.family": ["sans-serif"],
            "font.size": _SIZE,
            "axes.titlesize": _SIZE + 1,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.facecolor": _LIGHT["paper"],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": _LIGHT["grid"],
            **{
                f"{part}color": _LIGHT["ink"]
                for part in ("text.", "axes.edge", "axes.label", "xtick.", "ytick.")
            },
        }
    )
    figure = Figure(layout="constrained", facecolor=_LIGHT["paper"])
    _DRAWERS.get(name, _draw_panels)(figure, shown)
    # Without a date, so that drawing again changes nothing.
    about = {"Date": None, "Description": digest, "Creator": None}
    figure.savefig(file, metadata=about)
    text = _with_schemes(file.read_text(encoding="utf-8"))
    lines = [line.rstrip() for line in text.splitlines()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _with_schemes(svg: str) -> str:
    """Return a picture whose colours follow the scheme."""
    for name, light in _LIGHT.items():
        svg = svg.replace(light, f"var(--{name})")
    rules = [
        "{" + "; ".join(f"--{name}: {both[i]}" for name, both in _COLOURS.items()) + "}"
        for i in range(2)
    ]
    style = (
        f"<style>\n:root {rules[0]}\n"
        f"@media (prefers-color-scheme: dark) {{\n:root {rules[1]}\n}}\n</style>"
    )
    before, mark, after = svg.partition(" <metadata>")
    return f"{before} {style}\n{mark}{after}"


# --- ratios ---------------------------------------------------------------------------


def _draw_panels(figure: Any, shown: Sequence[Panel]) -> None:
    heights = [
        sum(
            _LABEL + _LANE * (1 if panel.is_one_lane else len(dots)) + _GAP
            for _, dots in panel.rows
        )
        for panel in shown
    ]
    used = dict.fromkeys(
        key for panel in shown for _, dots in panel.rows for key in dots
    )
    names = [name for name in _STYLES if name in used]
    columns = 2
    lines = -(-len(names) // columns)
    figure.set_size_inches(
        _WIDTH, sum(heights) + 0.85 * len(shown) + 0.22 * lines + 0.1
    )
    axes = figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, panel, height in zip(axes, shown, heights, strict=True):
        _draw_panel(axis, panel, height)
    figure.legend(
        handles=[_in_legend(axes[0], name) for name in names],
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        handletextpad=0.2,
        columnspacing=1.2,
    )


def _in_legend(axis: Any, name: str) -> Any:
    colour, mark = _STYLES[name]
    return axis.plot([], [], mark, color=_LIGHT[colour], label=CONTENDERS[name])[0]


def _draw_panel(axis: Any, panel: Panel, height: float) -> None:
    ticks = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 2.5]
    axis.set_xscale("log")
    axis.set_xlim(panel.smallest, panel.largest)
    axis.set_xticks([x for x in ticks if panel.smallest <= x <= panel.largest])
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    axis.set_ylim(height, 0)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", zorder=0)
    axis.axvline(1, color=_LIGHT["ink"], linewidth=1.2, zorder=1)
    axis.set_title(panel.title)
    axis.set_xlabel(f"{panel.axis} (lower is better)")
    place = 0.0
    for name, dots in panel.rows:
        # Over the line at 1 and the grid, which would cross the letters.
        axis.text(
            0, place + _LABEL / 2, name, transform=axis.get_yaxis_transform(),
            va="center", zorder=4,
            bbox={"facecolor": _LIGHT["paper"], "edgecolor": "none", "pad": 0.8},
        )  # fmt: skip
        place += _LABEL
        for contender in (name for name in _STYLES if name in dots):
            _draw_lane(axis, place + _LANE / 2, contender, dots[contender], panel)
            place += 0 if panel.is_one_lane else _LANE
        place += _GAP + (_LANE if panel.is_one_lane else 0)


def _draw_lane(
    axis: Any, place: float, contender: str, dots: Iterable[Dot], panel: Panel
) -> None:
    colour, mark = _STYLES[contender]
    colour = _LIGHT[colour]
    beyond = sorted(dot.median for dot in dots if dot.median > panel.largest)
    edge = panel.largest
    if beyond:  # told as numbers, with those that stand where the numbers do
        edge /= 1.2
        beyond = sorted(dot.median for dot in dots if dot.median > edge)
    below = sorted(dot.median for dot in dots if dot.median < panel.smallest)
    for dot in dots:
        if panel.smallest <= dot.median <= edge:
            axis.plot([dot.low, dot.high], [place] * 2, color=colour, linewidth=1.2)
            axis.plot([dot.median], [place], mark, color=colour, markersize=5, zorder=3)
    for at, side, told in (
        (0, "left", f"← {_listed(below, 2)}" if below else ""),
        (1, "right", f"{_listed(beyond, 1)} →" if beyond else ""),
    ):
        if told:
            axis.text(
                at, place, told, transform=axis.get_yaxis_transform(),
                ha=side, va="center", color=colour, fontsize=_SIZE - 1, zorder=4,
                bbox={"facecolor": _LIGHT["paper"], "edgecolor": "none", "pad": 0.4},
            )  # fmt: skip


def _listed(ratios: Sequence[float], digits: int) -> str:
    return ", ".join(f"{x:.{digits}f}" for x in ratios)


# --- others ---------------------------------------------------------------------------


def _draw_parallel(figure: Any, shown: Any) -> None:
    figure.set_size_inches(_WIDTH, 5)
    axes = figure.subplots(2, 2, sharex=True, sharey=True).T.flat
    for axis, (title, rows) in zip(axes, shown, strict=True):
        names, values = zip(*rows, strict=True)
        bars = axis.barh(names, [100 * x for x in values], color=_LIGHT["green"])
        axis.bar_label(bars, fmt="%.0f %%", padding=-40, color=_LIGHT["paper"])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlim(0, 100)
        axis.set_title(title)
    for axis in figure.axes[2:]:
        axis.set_xlabel("efficiency, %")


def _curves(figure: Any, height: float) -> Any:
    figure.set_size_inches(_WIDTH, height)
    axis = figure.subplots()
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats a byte")
    axis.grid()
    return axis


def _draw_losses(figure: Any, shown: Mapping[str, Sequence[float]]) -> None:
    axis = _curves(figure, 3)
    wide = {"color": _LIGHT["green"], "linewidth": 6, "alpha": 0.6}
    for name, losses in shown.items():
        thin = {"color": _LIGHT["ink"], "linestyle": "--"}
        style = wide if name == "jax_cudnn" else thin
        axis.plot(range(1, len(losses) + 1), losses, label=name, **style)
    axis.legend(frameon=False)


def _draw_losses_in_f8(figure: Any, shown: Sequence[Mapping[str, Any]]) -> None:
    axis = _curves(figure, 3.2)
    colours = {
        (True, 0): "green", (True, 1): "blue", (False, 0): "orange", (False, 1): "pink",
    }  # fmt: skip
    for line in shown:
        axis.plot(
            line["steps"],
            line["losses"],
            label=line["name"],
            color=_LIGHT[colours[line["is_f8"], line["seed"]]],
            linewidth=4 if line["is_f8"] else 1.4,
            alpha=0.6 if line["is_f8"] else 1,
        )
    axis.legend(frameon=False)


def _draw_masks(figure: Any, shown: Sequence[tuple[str, Sequence[str]]]) -> None:
    columns = 2
    figure.set_size_inches(_WIDTH, 2.4 * len(shown) / columns)
    for axis, (title, rows) in zip(
        figure.subplots(len(shown) // columns, columns).flat, shown, strict=True
    ):
        for place, row in enumerate(rows):
            runs = [(run.start(), len(run[0])) for run in re.finditer("x+", row)]
            axis.broken_barh(runs, (place, 1), facecolor=_LIGHT["green"])
        cells = range(1, len(rows))
        for lines in (axis.hlines, axis.vlines):
            lines(cells, 0, len(rows), color=_LIGHT["paper"], linewidth=1)
        axis.set(xlim=(0, len(rows)), ylim=(len(rows), 0), aspect="equal")
        axis.set_title(title, family="monospace", fontsize=_SIZE - 0.5)
        axis.set(xlabel="key", ylabel="query", xticks=(), yticks=())
        axis.spines[["top", "right"]].set_visible(True)


_DRAWERS: Mapping[str, Callable[[Any, Any], None]] = {
    "parallel": _draw_parallel,
    "losses": _draw_losses,
    "f8_losses": _draw_losses_in_f8,
    "masks": _draw_masks,
}
