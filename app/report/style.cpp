// How the page looks, in light and in dark.
#include "app/report/parts.h"

namespace tessera::report {

const char* const kStyle = R"css(
:root { color-scheme: light dark; --ground: #fbfbfa; --card: #ffffff; --ink: #1d2129; --soft: #626a76; --line: #dfe2e6;
  --idle: #eef0f2; --on: #ffffff; --F: #3a78c2; --B: #cf6a2b; --I: #b98a12; --W: #3c8f5c; --opt: #7d5bb3; --fin: #8b93a0;
  --msg: #5b6b7d; --pp: #2f4b7c; --dp: #1f8a8a; --tp: #b8487d; --cp: #8a6a3a; --world: #9aa1ab;
  --m0: #3a78c2; --m1: #cf6a2b; --m2: #7d5bb3; --m3: #3c8f5c; --m4: #c2a02e; --m5: #9aa1ab; --warn: #fdf1dc; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171c; --card: #1b1f26; --ink: #e3e6ea; --soft: #98a1ad; --line: #323842; --idle: #252a33;
    --on: #0e1115; --F: #6ea8ea; --B: #ee9257; --I: #dcb548; --W: #6cc08c; --opt: #ae90e2; --fin: #79828f; --msg: #8d9db0;
    --pp: #b9c8ec; --dp: #4fbdbd; --tp: #e07aab; --cp: #c09d68; --world: #6f7885; --m0: #6ea8ea; --m1: #ee9257;
    --m2: #ae90e2; --m3: #6cc08c; --m4: #dcb548; --m5: #79828f; --warn: #3a2f17; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1268px; margin: 0 auto; padding: 20px 16px 60px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 28px 20px; margin: 0 0 18px; }
h1 { font-size: 24px; margin: 6px 0 2px; } h2 { font-size: 19px; margin: 4px 0 6px; } h3 { font-size: 14px; margin: 16px 0 4px; font-weight: 600; }
p { max-width: 900px; margin: 4px 0 10px; } .model { color: var(--soft); } .note { color: var(--soft); font-size: 13px; }
.warn { background: var(--warn); border-radius: 6px; padding: 8px 12px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(225px, 1fr)); gap: 8px 24px; margin: 12px 0 0; }
dt { color: var(--soft); font-size: 12px; } dd { margin: 0; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 11.5px; fill: var(--soft); } svg text.end { text-anchor: end; } svg text.mid { text-anchor: middle; }
svg text.on { fill: var(--on); text-anchor: middle; pointer-events: none; }
.grid { stroke: var(--line); stroke-width: 1; } .loss { fill: none; stroke: var(--F); stroke-width: 1.8; }
.loss-key { fill: var(--F); } .val { fill: var(--B); }
.idle { fill: var(--idle); } .wait { fill: var(--world); } .glass { fill: transparent; } .glass:hover { fill: var(--ink); fill-opacity: .08; }
.k-F { fill: var(--F); } .k-B { fill: var(--B); } .k-I { fill: var(--I); } .k-W { fill: var(--W); }
.k-opt { fill: var(--opt); } .k-fin { fill: var(--fin); } .k-msg { fill: var(--msg); }
.a-pp { fill: var(--pp); } .a-dp { fill: var(--dp); } .a-tp { fill: var(--tp); } .a-cp { fill: var(--cp); } .a-world { fill: var(--world); }
.m0 { fill: var(--m0); } .m1 { fill: var(--m1); } .m2 { fill: var(--m2); } .m3 { fill: var(--m3); } .m4 { fill: var(--m4); } .m5 { fill: var(--m5); }
rect[data-mb] { stroke: var(--card); stroke-width: 1; } .c1 { fill-opacity: .78; } .c2 { fill-opacity: .58; }
svg.dim rect[data-mb] { opacity: .3; } svg.dim rect.same { opacity: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; max-width: none; }
.legend span { display: inline-flex; align-items: center; gap: 6px; } svg.key { width: 12px; height: 12px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 10px 20px; }
figure { margin: 0; max-width: 720px; } figcaption { font-size: 14px; font-weight: 600; margin: 8px 0 4px; }
table { border-collapse: collapse; margin: 14px 0 6px; font-size: 14px; } th { text-align: left; font-weight: 600; font-size: 13px; color: var(--soft); }
th, td { padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line); vertical-align: middle; } td:first-child, .n { white-space: nowrap; } .n { text-align: right; font-variant-numeric: tabular-nums; }
tr.sum td { font-weight: 600; border-bottom: 0; } svg.bar { width: 420px; height: 14px; }
#tip { position: fixed; display: none; pointer-events: none; z-index: 9; background: var(--ink); color: var(--ground);
  padding: 6px 10px; border-radius: 6px; font-size: 12.5px; line-height: 1.4; white-space: pre; }
@media (max-width: 700px) { section { overflow-x: auto; padding: 12px; } section > svg { min-width: 640px; } }
@media print { section { break-inside: avoid; } }
)css";

}  // namespace tessera::report
