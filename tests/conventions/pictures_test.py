#!/usr/bin/env python3
"""Tests of the figure files on the pages: in light and dark mode each text has sufficient contrast with its background, and
each pass of a pipeline has its letter.

usage: pictures_test.py DIR
"""
import pathlib
import re
import sys
import xml.etree.ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def contrast(*colours):
    """The WCAG 2 contrast ratio of two colours."""
    low, high = sorted(sum(share * (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4)
                           for x, share in zip((c / 255 for c in colour), (0.2126, 0.7152, 0.0722))) for colour in colours)
    return (high + 0.05) / (low + 0.05)


def fills(style):
    """Fill colour and opacity by class."""
    found = re.findall(r"^(?:text)?\.?([\w-]+)? \{ .*?(fill(?:-opacity)?): ([^;]+);", style, re.M)
    return {(name or "text", what): value for name, what, value in found}


def elements(node, x=0, y=0):
    """Boxes and texts (at mid-height) in document order: left, top, right, bottom, classes, text."""
    for at in node:
        left, top = x + float(at.get("x", 0)), y + float(at.get("y", 0)) - 4 * (at.tag == SVG + "text")
        if at.tag in (SVG + "rect", SVG + "text"):
            yield (left, top, left + float(at.get("width", 0)), top + float(at.get("height", 0)), at.get("class", "").split(),
                   at.text if at.tag == SVG + "text" else None)
        moved = re.match(r"translate\(([0-9.-]+) ([0-9.-]+)\)", at.get("transform", "")) or (0, 0, 0)
        yield from elements(at, x + float(moved[1]), y + float(moved[2]))


def wrong_in(path):
    root = xml.etree.ElementTree.parse(path).getroot()
    day, night = root.find(SVG + "style").text.split("@media")
    shapes = list(elements(root))
    for rules in (fills(day), fills(day) | fills(night)):
        def value(classes, what, other):
            return next((rules[c, what] for c in classes if (c, what) in rules), other)

        def colour(classes):
            return [int(value(classes, "fill", rules["text", "fill"])[i:i + 2], 16) for i in (1, 3, 5)]

        for i, (x, y, _, _, classes, label) in enumerate(shapes):
            background = [255, 255, 255]
            for left, top, right, bottom, box, _ in shapes[:i] if label else ():
                if left <= x <= right and top <= y <= bottom:
                    over = float(value(box, "fill-opacity", 1))
                    background = [over * a + (1 - over) * b for a, b in zip(colour(box), background)]
            if label and contrast(colour(classes), background) < 4.5:
                yield f"{label}: contrast {contrast(colour(classes), background):.2f}"
    if path.stem in ("schedules", "v-shapes", "zero-bubble"):
        if "paler: a rank's later stages" not in [label for *_, label in shapes]:
            yield "paler boxes are not in the legend"
        for i, (left, top, right, bottom, classes, _) in enumerate(shapes):
            inside = "".join(e[5] for e in shapes[i + 1:i + 3] if e[5] and left < e[0] < right and top < e[1] < bottom)
            if "pass" in classes and not re.fullmatch(classes[0][-1] + "[0-9]+", inside):
                yield f"{inside or 'nothing'} stands in {classes}"


FIGURES = sorted(pathlib.Path(sys.argv[1]).glob("*.svg"))
wrong = [f"{path.name}: {line}" for path in FIGURES for line in wrong_in(path)]
print(*wrong, f"{len(FIGURES)} figures, {len(wrong)} things wrong", sep="\n")
sys.exit(len(wrong) > 0 or len(FIGURES) < 10)
