"""Draws the plots of docs/benchmarks.md and its pages from figures.json, an SVG for each: `make plots`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
OWN, OTHER, FLOOR = "#1f6feb", "#9aa3ad", "#b3261e"
# The same bytes on every machine; texts stay texts, which a reader can search.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "overwire", "font.family": ["sans-serif"], "font.size": 9.5}


def describe(plot: dict[str, Any]) -> str:
    """The whole plot in words, for those who do not see it."""
    limit = [f"Dashed line: {plot['limit']['name']}"] if "limit" in plot else []
    bars = [f"{bar['name']}: {label_of(bar)}" for bar in plot["bars"]]
    return ". ".join([plot["about"].rstrip(". "), *limit, *bars]) + "."


def label_of(bar: dict[str, Any]) -> str:
    """The figure behind a bar, as the page writes it."""
    first = f"({bar['first']})" if "first" in bar else ""
    return "  ".join(filter(None, [bar["value"], first, bar.get("note", "")]))


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
    axes.set_yticks(list(places), [bar["name"] for bar in bars])
    axes.invert_yaxis()
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("#c8c8c8")
    figure.suptitle(f"{plot['title']}\n", x=0.01, ha="left", fontweight="bold", fontsize=11)
    figure.text(0.012, 1 - 0.3 / height, "\n".join(about), va="top", color="#5c5c5c", fontsize=8.5)
    axes.set_title("\n" * len(about) + ("\n" if "limit" in plot else ""), fontsize=8)
    meta = {"Title": plot["title"], "Description": describe(plot), "Date": None, "Creator": None}
    figure.savefig(FOLDER / plot["file"], metadata=meta)


def main() -> None:
    with mpl.rc_context(STYLE):
        for plot in json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))["plots"]:
            draw_plot(plot)


if __name__ == "__main__":
    main()
