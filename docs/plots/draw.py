"""Draws the plots of docs/benchmarks.md and its pages from figures.json, an SVG for each: `make plots`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
OWN, OTHER, FLOOR = "#1f6feb", "#9aa3ad", "#b3261e"
# The same bytes on every machine; texts stay texts, which a reader can search.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "overwire", "font.family": ["sans-serif"], "font.size": 9.5}


def describe(plot: dict[str, Any]) -> str:
    """The whole plot in words, for those who do not see it."""
    limit = [f"Dashed line: {plot['limit']['name']}"] if "limit" in plot else []
    bars = [f"{panel['title']}: " * ("panels" in plot) + f"{bar['name']}: {label_of(bar)}" for panel in panels_of(plot) for bar in panel["bars"]]
    return ". ".join([plot["about"].rstrip(". "), *limit, *bars]) + "."


def label_of(bar: dict[str, Any]) -> str:
    """The figure behind a bar, as the page writes it."""
    first = f"({bar['first']})" if "first" in bar else ""
    return "  ".join(filter(None, [bar["value"], first, bar.get("note", "")]))


def panels_of(plot: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels of a plot: its own, or the plot itself."""
    return plot.get("panels", [plot])


def style_axes(axes: Axes, names: list[str]) -> None:
    """Name the bars, and leave of the frame only the line on which they stand."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("#c8c8c8")


def draw_panels(plot: dict[str, Any]) -> None:
    """Write a plot of panels in two columns, each with a scale of its own."""
    panels = plot["panels"]
    figure = Figure(figsize=(7.9, 0.55 + 1.35 * -(-len(panels) // 2)), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.87), hspace=0.08, wspace=0.05)  # type: ignore[union-attr, call-arg]
    for axes, panel in zip(figure.subplots(-(-len(panels) // 2), 2).flat, panels, strict=True):
        values = [float(bar["value"]) for bar in panel["bars"]]
        axes.barh(range(len(values)), values, height=0.6, color=[OTHER if bar.get("other") else OWN for bar in panel["bars"]])
        for place, bar in enumerate(panel["bars"]):
            axes.annotate(bar["value"], (values[place], place), xytext=(5, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, max(values) * 1.3)
        axes.set_ylim(-0.5, max(len(each["bars"]) for each in panels) - 0.5)  # bars of one height
        style_axes(axes, [bar["name"] for bar in panel["bars"]])
        axes.set_title(panel["title"], loc="left", fontsize=9.5, fontweight="bold")
    figure.text(0.012, 0.975, plot["title"], va="top", fontweight="bold", fontsize=11)
    figure.text(0.012, 0.91, plot["about"], va="top", color="#5c5c5c", fontsize=8.5)
    save_figure(figure, plot)


def save_figure(figure: Figure, plot: dict[str, Any]) -> None:
    meta = {"Title": plot["title"], "Description": describe(plot), "Date": None, "Creator": None}
    figure.savefig(FOLDER / plot["file"], metadata=meta)


def draw_plot(plot: dict[str, Any]) -> None:
    """Write one plot: a horizontal bar for each figure, its floor as a mark, the limit of all as a dashed line."""
    bars, about = plot["bars"], textwrap.wrap(plot["about"], 105)
    height = 0.75 + 0.17 * len(about) + 0.33 * len(bars) + (0.25 if "limit" in plot else 0)
    figure = Figure(figsize=(7.9, height), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(bars))
    values = [float(bar["value"]) for bar in bars]
    axes.barh(places, values, height=0.6, color=[OTHER if bar.get("other") else OWN for bar in bars])
    right = max(values)
    for place, bar in zip(places, bars, strict=True):
        floor = float(bar.get("floor", 0))
        if floor:
            axes.plot([floor, floor], [place - 0.42, place + 0.42], color=FLOOR, linewidth=2)
        end = max(float(bar["value"]), floor)
        limit = float(plot["limit"]["value"]) if "limit" in plot else 0
        right = max(right, limit)
        if end < limit < end + 0.2 * right:  # the text would cross the line
            end = limit
        axes.annotate(label_of(bar), (end, place), xytext=(6, 0), textcoords="offset points", va="center")
    if "limit" in plot:
        axes.axvline(limit, color=FLOOR, linestyle=(0, (5, 4)), linewidth=1.3)
        axes.annotate(
            plot["limit"]["name"], (limit, 1), xycoords=("data", "axes fraction"), xytext=(0, 4), textcoords="offset points",
            ha="right" if limit > right / 2 else "left", va="bottom", color="#5c5c5c",
        )  # fmt: skip
    axes.set_xlim(0, right * 1.3)
    style_axes(axes, [bar["name"] for bar in bars])
    figure.suptitle(f"{plot['title']}\n", x=0.01, ha="left", fontweight="bold", fontsize=11)
    figure.text(0.012, 1 - 0.3 / height, "\n".join(about), va="top", color="#5c5c5c", fontsize=8.5)
    axes.set_title("\n" * len(about) + ("\n" if "limit" in plot else ""), fontsize=8)
    save_figure(figure, plot)


def main() -> None:
    with mpl.rc_context(STYLE):
        for plot in json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))["plots"]:
            (draw_panels if "panels" in plot else draw_plot)(plot)


if __name__ == "__main__":
    main()
