"""The report's looks. One set of names for colours, with values for light and for dark."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfaf7; --card: #ffffff; --ink: #1d2129; --soft: #5b6472; --faint: #e4e2db; --grid: #ebe9e3;
  --accent: #1f5fbf; --good: #1c7c48; --good-ground: #e4f3ea; --bad: #b3372c; --bad-ground: #fae7e4;
  --open: #8a6100; --open-ground: #fbf0d6; --waste: #d9d5cb; --inside: #ffffff;
  --s1: #2f6fd0; --s2: #d9622b; --s3: #2b9a74; --s4: #9a57c4; --s5: #c9971c; --s6: #c94a7c; --s7: #4aa3c4;
  --s8: #7a7f8a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14161a; --card: #1c1f25; --ink: #e6e8ec; --soft: #9aa3b2; --faint: #31353e; --grid: #2a2e36;
    --accent: #7fb0ff; --good: #6fd39b; --good-ground: #173524; --bad: #ff9a8f; --bad-ground: #40201d;
    --open: #f0c466; --open-ground: #3a2f14; --waste: #3f444e; --inside: #14161a;
    --s1: #6ea8ff; --s2: #ff9a66; --s3: #5fd0a5; --s4: #c99af0; --s5: #ecc35a; --s6: #f08bb2; --s7: #7fd0ee;
    --s8: #a9b0bd;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1160px; margin: 0 auto; padding: 40px 24px 96px; }
h1 { font-size: 34px; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.02em; }
h2 { font-size: 25px; line-height: 1.25; margin: 0 0 6px; letter-spacing: -0.01em; }
h3 { font-size: 13px; margin: 28px 0 8px; color: var(--soft); font-weight: 600; letter-spacing: 0.02em; }
p { margin: 0 0 12px; max-width: 76ch; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.lead { color: var(--soft); font-size: 17px; max-width: 84ch; }
.facts { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 18px 0 34px; padding: 0; list-style: none; }
.facts li { font-size: 14px; }
.facts b { display: block; color: var(--soft); font-weight: 500; font-size: 12px; }
.summary { width: 100%; border-collapse: collapse; background: var(--card); border: 1px solid var(--faint);
  border-radius: 12px; border-spacing: 0; overflow: hidden; border-collapse: separate; }
.summary td { padding: 12px 16px; border-top: 1px solid var(--faint); vertical-align: top; }
.summary tr:first-child td { border-top: 0; }
.summary .number { color: var(--soft); width: 1%; font-variant-numeric: tabular-nums; }
.summary .name { font-weight: 600; width: 30%; }
.summary .score { white-space: nowrap; width: 1%; text-align: right; }
section { margin-top: 72px; padding-top: 28px; border-top: 1px solid var(--faint); }
.question { font-size: 17px; color: var(--soft); margin-bottom: 20px; max-width: 84ch; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 18px; }
figure { margin: 0; padding: 16px 18px 10px; background: var(--card); border: 1px solid var(--faint);
  border-radius: 12px; min-width: 0; }
figure.wide { grid-column: 1 / -1; overflow-x: auto; }
figcaption { font-weight: 600; font-size: 15px; margin-bottom: 4px; }
figure .note { font-size: 13px; color: var(--soft); margin: 2px 0 6px; }
svg { display: block; width: 100%; height: auto; }
figure.wide svg { min-width: 720px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 4px; padding: 0; list-style: none;
  font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
svg text.label { fill: var(--soft); font-size: 12px; }
svg text.value { fill: var(--ink); font-size: 11.5px; }
svg text.inside { fill: var(--inside); font-size: 11px; font-weight: 600; pointer-events: none; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .zero { stroke: var(--soft); stroke-width: 1; opacity: 0.6; }
svg .curve { fill: none; stroke-width: 2.25; stroke-linejoin: round; stroke-linecap: round; }
svg .area { opacity: 0.16; }
svg .dot { stroke: var(--card); stroke-width: 1.5; }
svg .bar:hover, svg .dot:hover { opacity: 0.75; }
.findings { border-collapse: separate; border-spacing: 0; width: 100%; background: var(--card);
  border: 1px solid var(--faint); border-radius: 12px; overflow: hidden; }
.findings th { text-align: left; font-size: 12.5px; color: var(--soft); font-weight: 600; padding: 10px 16px 4px; }
.findings td { padding: 10px 16px; vertical-align: top; border-top: 1px solid var(--faint); font-size: 15px; }
.findings tr:nth-child(2) td { border-top: 0; }
.findings td:first-child { width: 1%; }
.findings td:nth-child(2) { width: 46%; }
.badge { display: inline-block; padding: 2px 10px; border-radius: 99px; font-size: 12.5px; font-weight: 600;
  white-space: nowrap; }
.badge.good { color: var(--good); background: var(--good-ground); }
.badge.bad { color: var(--bad); background: var(--bad-ground); }
.badge.open { color: var(--open); background: var(--open-ground); }
.scroll { overflow-x: auto; border: 1px solid var(--faint); border-radius: 12px; background: var(--card); }
table.data { border-collapse: collapse; font-size: 13.5px; width: 100%; font-variant-numeric: tabular-nums; }
table.data th { text-align: left; vertical-align: bottom; font-weight: 600; color: var(--soft); font-size: 12.5px;
  line-height: 1.3; padding: 10px 12px; border-bottom: 1px solid var(--faint); }
table.data td { padding: 7px 12px; border-top: 1px solid var(--grid); white-space: nowrap; }
table.data tr:first-child td { border-top: 0; }
table.data td.text { white-space: normal; min-width: 9em; }
table.data td.long { white-space: normal; min-width: 22em; font-size: 12.5px; }
table.data th.num, table.data td.num { text-align: right; }
.tabletitle { font-weight: 600; font-size: 15px; margin: 26px 0 8px; }
.tablenote { font-size: 13px; color: var(--soft); margin: 8px 0 0; max-width: 100ch; }
.error { background: var(--bad-ground); color: var(--bad); padding: 14px 18px; border-radius: 12px; }
.error.soft { background: var(--open-ground); color: var(--open); }
pre { font-size: 12px; overflow-x: auto; color: var(--soft); }
details summary { cursor: pointer; color: var(--soft); font-size: 14px; margin-top: 22px; }
footer { margin-top: 72px; color: var(--soft); font-size: 14px; }
code { font: 0.9em ui-monospace, SFMono-Regular, Menlo, monospace; background: var(--grid); padding: 1px 5px;
  border-radius: 4px; }
@media (max-width: 720px) {
  main { padding: 24px 14px 64px; }
  h1 { font-size: 28px; }
  .summary td, .findings td { display: block; width: auto !important; border-top: 0; padding: 2px 14px; }
  .summary tr, .findings tr { display: block; padding: 10px 0; border-top: 1px solid var(--faint); }
  .summary, .findings, .summary tbody, .findings tbody { display: block; }
  .summary .score { text-align: left; }
  .findings tr:first-child { display: none; }
}
@media print { section { break-before: page; } .scroll { overflow: visible; } }
"""
