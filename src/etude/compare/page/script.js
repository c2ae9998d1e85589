"use strict";
// Draws the charts of the page from the numbers in it. Text goes in as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg", COLORS = data.colors;
const options = { log: false, time: false };

function make(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}
function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const rough = (high - low) / most, size = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * size).find((s) => s >= rough * 0.999999), found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return +(value / 1e9).toPrecision(4) + "G";
  if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
  return size && size < 1e-3 ? value.toExponential(1) : "" + +value.toPrecision(4);
}
function exact(value, share) {
  if (share) return (100 * value).toFixed(1) + "%";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : "" + +value.toPrecision(4);
}
function xs(series) { return options.time && series.t ? series.t : series.x; }

function decades(low, high) {
  const found = [], parts = high - low > 2.2 ? [1] : high - low > 1 ? [1, 3] : [1, 2, 5];
  for (let k = Math.floor(low); k <= high; k++)
    for (const part of parts) if (k + Math.log10(part) >= low && k + Math.log10(part) <= high) found.push(k + Math.log10(part));
  return found;
}
function scatter(figure, chart, caption) {
  const width = Math.max(figure.clientWidth - 20, 160), height = 240;
  const old = figure.querySelector("svg");
  if (old) old.remove();
  const svg = make(figure, "svg", { viewBox: `0 0 ${width} ${height}`, height: height, role: "img" });
  make(svg, "title", {}, chart.name);
  const left = 52, right = width - 14, top = 10, bottom = height - 24, count = chart.choices.length;
  const turn = chart.log ? Math.log10 : (v) => v;
  const xs = chart.points.map((p) => turn(p.x)), ys = chart.points.map((p) => p.y);
  let first = count ? -0.5 : Math.min(...xs), last = count ? count - 0.5 : Math.max(...xs);
  let low = Math.min(...ys), high = Math.max(...ys);
  if (chart.share) { low = 0; high = 1; }
  const aside = count ? 0 : 0.05 * (last - first || Math.abs(last) || 1), room = 0.06 * (high - low || Math.abs(high) || 1);
  first -= aside; last += aside; low -= room; high += room;
  const across = (x) => left + (right - left) * (x - first) / (last - first);
  const up = (y) => bottom - (bottom - top) * (y - low) / (high - low);
  for (const tick of ticks(low, high, 5)) {
    make(svg, "line", { x1: left, x2: right, y1: up(tick), y2: up(tick), stroke: "var(--line)" });
    make(svg, "text", { x: left - 6, y: up(tick) + 4, "text-anchor": "end" }, chart.share ? Math.round(100 * tick) + "%" : short(tick));
  }
  const most = Math.max(2, Math.floor(width / 90)), marks = count ? chart.choices.map((name, k) => [k, name]) :
    (chart.log ? decades(first, last) : ticks(first, last, most)).map((t) => [t, short(chart.log ? +Math.pow(10, t).toPrecision(3) : t)]);
  for (const [at, name] of marks) make(svg, "text", { x: across(at), y: bottom + 16, "text-anchor": across(at) > right - 20 ? "end" : "middle" }, name);
  make(svg, "line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: "var(--faint)" });
  const beside = {};
  for (const point of [...chart.points].sort((a, b) => a.color - b.color)) {
    // Trials with one value and one score lie side by side.
    const place = count + ":" + point.x + ":" + Math.round(up(point.y) / 6), before = (beside[place] = (beside[place] || 0) + 1) - 1;
    const aside = count ? (before % 2 ? -1 : 1) * Math.ceil(before / 2) * 9 : 0;
    const dot = make(svg, "circle", { cx: across(turn(point.x)) + aside, cy: up(point.y), r: 5, fill: COLORS[point.color], "fill-opacity": 0.85, stroke: "var(--panel)" });
    const said = `${point.label}: ${exact(point.y, chart.share)}`;
    make(dot, "title", {}, said);
    dot.addEventListener("pointerenter", () => { caption.textContent = said; });
    dot.addEventListener("pointerleave", () => { caption.textContent = ""; });
  }
}

function draw(figure) {
  const chart = data.charts[+figure.dataset.chart], caption = figure.querySelector(".value");
  if (chart.points) return scatter(figure, chart, caption);
  const width = Math.max(figure.clientWidth - 20, 160), height = figure.dataset.large ? 340 : 170;
  const old = figure.querySelector("svg");
  if (old) old.remove();
  const svg = make(figure, "svg", { viewBox: `0 0 ${width} ${height}`, height: height, role: "img" });
  make(svg, "title", {}, chart.name);
  const left = 46, right = width - 8, top = 8, bottom = height - 22;
  let values = [], ends = [];
  for (const s of chart.series) {
    values = values.concat(s.y, s.low || [], s.high || []);
    ends = ends.concat(xs(s));
  }
  const positive = values.filter((v) => v > 0), log = options.log && positive.length > 0;
  const turn = log ? (v) => Math.log10(v) : (v) => v;
  const usable = log ? positive : values;
  let low = turn(usable.reduce((a, b) => Math.min(a, b))), high = turn(usable.reduce((a, b) => Math.max(a, b)));
  if (chart.share && !log) { low = 0; high = 1; }
  const room = 0.05 * (high - low || Math.abs(high) || 1);
  low -= room; high += room;
  const first = Math.min(0, ...ends.slice(0, 1)), last = ends.reduce((a, b) => Math.max(a, b), 1);
  const place = (x, y) => [left + (right - left) * (x - first) / (last - first || 1),
    bottom - (bottom - top) * (turn(y) - low) / (high - low)];
  for (const tick of ticks(low, high, figure.dataset.large ? 6 : 4)) {
    const y = bottom - (bottom - top) * (tick - low) / (high - low);
    make(svg, "line", { x1: left, x2: right, y1: y, y2: y, stroke: "var(--line)" });
    const shown = log ? Math.pow(10, tick) : tick;
    make(svg, "text", { x: left - 6, y: y + 4, "text-anchor": "end" },
      chart.share && !log ? Math.round(100 * shown) + "%" : short(shown));
  }
  for (const tick of ticks(first, last, Math.max(2, Math.floor(width / 110)))) {
    const x = place(tick, high)[0];
    make(svg, "text", { x: x, y: bottom + 15, "text-anchor": x > right - 20 ? "end" : "middle" }, short(tick));
  }
  make(svg, "line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: "var(--faint)" });
  const drawn = (v) => !log || v > 0;
  for (const s of [...chart.series].reverse()) {
    const x = xs(s), color = COLORS[s.color % COLORS.length];
    if (s.low) {
      const there = x.map((v, i) => place(v, drawn(s.high[i]) ? s.high[i] : positive[0]));
      const back = x.map((v, i) => place(v, drawn(s.low[i]) ? s.low[i] : positive[0])).reverse();
      make(svg, "polygon", { points: there.concat(back).join(" "), fill: color, "fill-opacity": 0.18 });
    }
    const points = x.map((v, i) => [v, s.y[i]]).filter((p) => drawn(p[1])).map((p) => place(p[0], p[1]));
    if (points.length === 1) make(svg, "circle", { cx: points[0][0], cy: points[0][1], r: 3, fill: color });
    make(svg, "polyline", { points: points.join(" "), fill: "none", stroke: color,
      "stroke-width": s.low ? 2.2 : 1.5, "stroke-opacity": chart.series.length > 6 ? 0.7 : 1, "stroke-linejoin": "round" });
  }
  const cursor = make(svg, "line", { y1: top, y2: bottom, stroke: "var(--faint)", visibility: "hidden" });
  const dots = chart.series.map((s) => make(svg, "circle", { r: 3.5, visibility: "hidden", fill: COLORS[s.color % COLORS.length] }));
  const rest = () => {
    cursor.setAttribute("visibility", "hidden");
    dots.forEach((dot) => dot.setAttribute("visibility", "hidden"));
    caption.textContent = chart.series.length === 1 ? exact(chart.series[0].y[chart.series[0].y.length - 1], chart.share) : "";
  };
  const look = (event) => {
    const box = svg.getBoundingClientRect(), at = first + ((event.clientX - box.left) * width / box.width - left) / (right - left) * (last - first);
    const found = [];
    let where = at;
    chart.series.forEach((s, k) => {
      const x = xs(s);
      let best = 0;
      for (let i = 1; i < x.length; i++) if (Math.abs(x[i] - at) < Math.abs(x[best] - at)) best = i;
      if (!k) where = x[best];
      if (!drawn(s.y[best])) return;
      const point = place(x[best], s.y[best]);
      dots[k].setAttribute("cx", point[0]); dots[k].setAttribute("cy", point[1]); dots[k].setAttribute("visibility", "visible");
      const band = s.low ? ` (${exact(s.low[best], chart.share)} to ${exact(s.high[best], chart.share)})` : "";
      found.push((chart.series.length > 1 ? s.label + " " : "") + exact(s.y[best], chart.share) + band);
    });
    const line = place(where, 1)[0];
    cursor.setAttribute("x1", line); cursor.setAttribute("x2", line); cursor.setAttribute("visibility", "visible");
    const seconds = options.time && chart.series[0].t;
    caption.textContent = `${short(where)} ${seconds ? "s" : data.unit}: ` + found.slice(0, 12).join(", ");
  };
  svg.addEventListener("pointermove", look);
  svg.addEventListener("pointerleave", rest);
  rest();
}
function all() { for (const figure of document.querySelectorAll("figure.chart")) if (figure.clientWidth) draw(figure); }
for (const name in options) {
  const box = document.getElementById(name);
  if (box) box.addEventListener("change", () => { options[name] = box.checked; all(); });
}
let waiting = 0;
window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(all, 100); });
document.addEventListener("toggle", all, true);
all();
document.documentElement.dataset.drawn = document.querySelectorAll("figure.chart svg").length;
