#!/usr/bin/env python3
"""Tests of the page of `tessera explore` in a headless browser: keyboard, links, light and dark mode. Skipped with a message
and status 77 if there is no browser.

usage: page_test.py TESSERA
"""
import itertools
import math
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import browser  # noqa: E402
from served import Served  # noqa: E402

BINARY = ""
BARS = "document.querySelectorAll('#memory text.end').length - 1"  # labels of the bars and of the limit
STATE = "Object.fromEntries(new URLSearchParams(location.hash.slice(1)))"
IDLE = "document.readyState === 'complete' && document.getElementById('pp') && !document.querySelector('[aria-busy=true]')"
# The minimum WCAG 2 contrast of any text with its background, and that text.
CONTRAST = """(() => {
  const numbers = (css) => css.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((x) => x / 255).map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (at) => {
    for (; at; at = at.parentElement) {
      const color = numbers(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  let least = [99, ""];
  for (const at of document.querySelectorAll("body *")) {
    const text = [...at.childNodes].filter((x) => x.nodeType === 3).map((x) => x.data.trim()).join("");
    if (!text || !at.getClientRects().length || ["SCRIPT", "STYLE", "OPTION", "title"].includes(at.tagName)) continue;
    if (at.closest(".skip")) continue;
    const svg = at.tagName === "text";
    let box = (at.classList.contains("on") || at.classList.contains("over")) && at;
    while (box && box.tagName === "text") box = box.previousElementSibling;
    const front = light(numbers(getComputedStyle(at)[svg ? "fill" : "color"]));
    const over = box && Number(getComputedStyle(box).fillOpacity), fill = box && numbers(getComputedStyle(box).fill);
    const back = light(ground(at).slice(0, 3).map((x, i) => box ? over * fill[i] + (1 - over) * x : x));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (ratio < least[0]) least = [ratio, text];
  }
  return least;
})()"""

# Colours as perceived without each kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHT = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red cones": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green cones": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue cones": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def perceived(colour, sight):
    """CIE Lab of #rrggbb."""
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5))]
    red, green, blue = (min(1, max(0, sum(a * b for a, b in zip(row, linear)))) for row in SIGHT[sight])
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047, 0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.server = Served(BINARY, cls.directory.name)
        cls.browser = browser.Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.server.end()
        cls.directory.cleanup()

    def setUp(self):
        self.browser.complaints.clear()
        self.browser.scheme("light")
        self.browser.size(1600, 1000)
        self.open("")

    def tearDown(self):  # the browser logs rejected requests itself
        self.assertEqual([c for c in self.browser.complaints if "status of 400" not in c], [])

    def open(self, link):
        self.browser.open(f"{self.server.url}#ranks=4&batch=16&{link}")
        self.browser.wait(IDLE)

    def value(self, script):
        return self.browser.value(script)

    def press(self, id, *keys):
        self.value(f"document.getElementById('{id}').focus()")
        for key, code in keys:
            self.browser.key(key, code)
        self.browser.wait(IDLE)

    def figures(self):
        return self.value("['memory', 'pipeline', 'time', 'bytes'].map((id) => document.querySelector(`#${id} svg`).outerHTML)")

    def test_shows_prediction_and_ranking(self):
        self.assertEqual(self.value(BARS), 4)
        self.assertEqual(self.value("document.querySelectorAll('#pipeline rect.k-F').length"), 4 * 16 + 1)  # including the legend
        self.assertGreater(self.value("document.querySelectorAll('#memory rect.m2').length"), 4)
        self.assertGreater(self.value("document.querySelectorAll('#time rect').length"), 1)
        self.assertGreater(self.value("document.querySelectorAll('#bytes rect').length"), 0)
        self.assertGreater(self.value("document.querySelectorAll('#ranking tbody tr').length"), 2)
        self.assertIn("step time", self.value("document.getElementById('verdict-line').textContent"))
        self.assertTrue(self.value("document.querySelector('#advice code').textContent").startswith("tessera train "))

    def test_sliders_respond_to_keyboard(self):
        before = self.figures()
        self.press("pp-slider", ("ArrowLeft", 37))
        self.assertEqual((self.value(BARS), self.value(STATE)["pp"], self.value("document.getElementById('pp').value")), (2, "2", "2"))
        after = self.figures()
        for one, other in zip(before, after):
            self.assertNotEqual(one, other)
        self.press("pp-slider", ("ArrowRight", 39))
        self.assertEqual(self.figures(), before)
        self.press("sp", (" ", 32))
        self.press("schedule", ("ArrowDown", 40))
        self.assertEqual((self.value(STATE)["sp"], self.value(STATE)["schedule"]), ("true", "interleaved"))
        self.assertEqual(self.value("document.querySelectorAll('#pipeline rect.c1').length > 0"), True)

    def test_link_reproduces_view(self):
        self.open("pp=2")
        for _ in range(2):
            self.press("batch-slider", ("ArrowRight", 39))
        self.press("tp-slider", ("ArrowRight", 39))
        link, before = self.value("location.hash.slice(1)"), self.figures()
        self.assertIn("tp=2", link)
        self.open(link)
        self.assertEqual(self.figures(), before)
        self.value("location.hash = location.hash.replace('tp=2', 'tp=1')")
        self.browser.wait("document.getElementById('tp').value === '1'")
        self.browser.wait(IDLE)
        self.assertNotEqual(self.figures(), before)

    def test_rejects_invalid_values_in_link(self):
        self.open("model=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E&pp=-1&__proto__=1&constructor=2&zero=7&tp=2")
        self.assertEqual(self.value("document.querySelectorAll('img').length"), 0)
        self.assertEqual(self.value(STATE)["tp"], "2")
        message = self.value("document.getElementById('copied').textContent")
        for word in ("model=<img", "pp=-1", "__proto__=1", "constructor=2", "zero=7"):
            self.assertIn(word, message)

    def test_shows_errors_at_controls(self):
        error = "document.getElementById('{0}-error').textContent + document.getElementById('{0}').getAttribute('aria-invalid')"
        self.open("pp=3")
        self.assertEqual(self.value(error.format("pp")), "4 ranks are not divisible by pp 3 x tp 1 x cp 1 = 3.true")
        self.open("batch=31&pp=2")
        self.assertIn("31 is not divisible", self.value(error.format("batch")))
        self.open("ranks=64&pp=64&batch=64")  # rejected by the planner, because there are 32 layers
        self.assertTrue(self.value(error.format("pp")).endswith("true"))
        self.assertNotIn("`", self.value(error.format("pp")))
        self.assertEqual(self.value("document.getElementById('verdict-line').textContent"), "Invalid plan.")
        self.press("pp-slider", ("ArrowLeft", 37))
        self.assertEqual(self.value(error.format("pp")), "null")
        self.assertEqual(self.value("document.querySelectorAll('.stale').length"), 0)

    def test_reports_plans_beyond_memory(self):
        self.open("model=llama3-70b&pp=1")
        self.assertIn("The plan does not fit: a rank needs", self.value("document.getElementById('verdict-line').textContent"))
        self.assertIn("Largest category:", self.value("document.getElementById('verdict-why').textContent"))

    def test_selects_plan_from_ranking(self):
        self.value("document.querySelectorAll('#ranking td button')[1].focus()")
        self.browser.key("Enter", 13)
        self.browser.wait(IDLE)
        self.assertEqual(self.value("[...document.querySelectorAll('#ranking tbody tr')].findIndex((r) => r.hasAttribute('aria-current'))"), 1)
        self.assertEqual(self.value("document.querySelector('#ranking tr[aria-current] .n').textContent"),
                         self.value("document.querySelector('#figures dd').textContent"))

    def test_saved_figures_are_self_contained(self):
        for id in ("memory", "pipeline", "time", "bytes"):
            text = self.value(f"svgText('{id}')")
            root = xml.etree.ElementTree.fromstring(text)
            self.assertEqual(root.tag, "{http://www.w3.org/2000/svg}svg")
            self.assertNotIn("var(", text)
            self.assertGreater(len(root.findall(".//{http://www.w3.org/2000/svg}text")), 1)
        self.assertEqual(self.value("document.querySelectorAll('figure button').length"), 4)

    def test_is_readable_in_all_colour_schemes_and_widths(self):
        means = []
        for scheme in ("light", "dark"):
            for width in (1600, 800):
                self.browser.scheme(scheme)
                self.browser.size(width, 1000)
                self.open("schedule=zb-v&chunks=2")
                self.assertLessEqual(self.value("document.scrollingElement.scrollWidth"), width)
                worst, text = self.value(CONTRAST)
                self.assertGreaterEqual(worst, 4.5, f"{scheme}: {text}")
                rows = browser.pixels(self.browser.picture(0.1))
                colours = {pixel for row in rows for pixel in row}
                self.assertGreater(len(colours), 100)
                means.append(sum(map(sum, (pixel for row in rows for pixel in row))) / (3 * len(rows) * len(rows[0])))
        self.assertGreater(min(means[:2]), 170)  # of 255
        self.assertLess(max(means[2:]), 80)

    def test_figures_fit_laptop_widths(self):
        longest = "Math.max(...[...document.querySelectorAll('#{0} rect')].map((x) => x.getBoundingClientRect().width))"
        for width in (1280, 1366, 1600):
            self.browser.size(width, 900)
            self.open("ranks=8&batch=32")
            for picture in ("time", "bytes"):
                self.assertGreater(self.value(longest.format(picture)), 100, f"{picture} at {width}")
        self.assertNotIn("world", self.value("document.querySelector('#bytes svg').textContent"))
        for text in ("bubble, all ranks", "matmuls", "ZeRO", "Recomputation"):
            self.assertIn(text, self.value("document.body.innerText"))

    def test_report_shows_tooltips_and_fits_narrow_screens(self):
        for args in ("train --pp 2 --microbatches 2 --layers 2 --heads 2 --channels 32 --context 16 --batch 4 --steps 2 "
                      "--threads-per-rank 1 --no-eval --no-save --trace --quiet --out run",
                      "report run"):
            subprocess.run([BINARY, *args.split()], cwd=self.directory.name, check=True, stdout=subprocess.DEVNULL)
        self.browser.size(390, 800)
        self.open("")
        with open(os.path.join(self.directory.name, "run/report.html"), encoding="utf-8") as page:
            frame = self.browser.call("Page.getFrameTree")["frameTree"]["frame"]["id"]
            self.browser.call("Page.setDocumentContent", frameId=frame, html=page.read())
        self.assertLess(self.value("Math.max(...[...document.querySelectorAll('tr')].map((x) => x.clientHeight))"), 120)
        self.assertGreater(self.value("document.querySelector('#pipeline > svg').clientWidth"), 900)
        self.assertLessEqual(self.value("document.scrollingElement.scrollWidth"), 390)
        self.value("for (const event of ['mousemove', 'mouseover'])"
                   "  document.querySelector('#pipeline [data-mb]').dispatchEvent(new MouseEvent(event, { bubbles: true }))")
        self.assertTrue(self.value("document.getElementById('tip').textContent").startswith("0F0\n"))
        alike = self.value("document.querySelectorAll('.same').length")  # F and B on both stages, in each picture
        self.assertEqual(alike, 4 * self.value("document.querySelectorAll('#pipeline > svg').length"))

    def test_audit_page_is_readable_in_all_colour_schemes_and_widths(self):
        recordings = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "audit", "recordings")
        path = os.path.join(self.directory.name, "audit.html")
        subprocess.run([BINARY, "audit", os.path.join(recordings, "fsdp2_dp2_tp2"), os.path.join(recordings, "reference"), "--html", path],
                       check=True, stdout=subprocess.DEVNULL)
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                self.browser.scheme(scheme)
                self.browser.size(width, 900)
                self.browser.open("file://" + path)
                self.browser.wait("document.readyState === 'complete' && document.getElementById('audit') !== null")
                self.assertLessEqual(self.value("document.scrollingElement.scrollWidth"), width)
                worst, text = self.value(CONTRAST)
                self.assertGreaterEqual(worst, 4.5, f"{scheme}: {text}")
                self.assertGreater(self.value("document.querySelector('.pair rect').getBoundingClientRect().width"), 30)
        self.assertEqual(self.value("[...document.querySelectorAll('.pair svg')].filter((x) => !/: 0 of [0-9]+ wrong$/.test(x.ariaLabel)).length"), 0)
        self.value("document.querySelector('.pair rect').dispatchEvent(new MouseEvent('mousemove', { bubbles: true }))")
        self.assertIn("\ntolerance ", self.value("document.getElementById('tip').textContent"))

    def test_colours_differ_for_all_types_of_colour_vision(self):
        for scheme in ("light", "dark"):
            self.browser.scheme(scheme)
            for names in ("parameters gradients optimizer activations communication workspace", "F B W idle", "F I W idle",
                          "F waiting sending"):
                colours = {name: self.value(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
                           for name in names.split()}
                for one, other in itertools.combinations(colours, 2):
                    for sight in SIGHT:
                        distance = math.dist(perceived(colours[one], sight), perceived(colours[other], sight))
                        self.assertGreater(distance, 14, f"{scheme}: {one} and {other} with {sight}")

    def test_supports_keyboard_and_screen_reader(self):
        named = self.browser.call("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "slider", "spinbutton", "combobox", "checkbox", "image", "img", "form", "complementary", "link"}
        found = [(n["role"]["value"], n.get("name", {}).get("value")) for n in named if n.get("role", {}).get("value") in roles]
        self.assertGreater(len(found), 30)
        self.assertEqual([role for role, name in found if not name], [])
        self.value("document.activeElement.blur()")
        order = []
        for _ in range(6):
            self.browser.key("Tab", 9)
            order.append(self.value("document.activeElement.id || document.activeElement.className || document.activeElement.tagName"))
        self.assertEqual(order[:3], ["skip", "copy-link", "model"])
        self.assertNotEqual(self.value("getComputedStyle(document.activeElement).outlineStyle"), "none")


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    if not browser.found():
        print("SKIPPED: no browser found; install the package chromium-headless-shell to test the page")
        sys.exit(77)
    unittest.main(verbosity=2)
