"use strict";
// The page of episodes. Every text from the server is written as text, never as HTML.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 100, WIDTH = 1000;
const state = { source: 0, number: null, episode: null, step: 0, rows: [], count: 0, tab: "episodes", hidden: {}, cursors: [], asked: 0 };
let about, edits = null, playing = null;
// A page of one file has all answers in it, and asks no server.
const embedded = $("embedded") && JSON.parse($("embedded").textContent);

function el(tag, fields = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

function svg(tag, fields) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(fields)) made.setAttribute(name, value);
  return made;
}

const integer = (x) => x.toLocaleString("en-US");
const short = (x, digits = 4) => (x === null || x === undefined ? "–" : Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(1) : String(Number(x.toPrecision(digits))));
const mark = { true: ["yes", "✓", "success"], false: ["no", "✗", "failure"], null: ["unknown", "?", "success unknown"] };

function fail(error) {
  $("error").textContent = error.message || String(error);
  $("error").hidden = false;
}

function address(path, query) { return `${path}?${new URLSearchParams(query)}`; }

async function get(path, query = {}) {
  if (embedded) return embedded[path === "episode" ? `episode ${query.number}` : path];
  const answer = await fetch(address(path, query));
  const found = await answer.json();
  if (found.error) throw new Error(found.error);
  $("error").hidden = true;
  return found;
}

// The address after # names what is shown, so that it can be opened again.
function remember() {
  const shown = { source: state.source, tab: state.tab };
  if (state.number !== null) Object.assign(shown, { episode: state.number, step: state.step });
  history.replaceState(null, "", `#${new URLSearchParams(shown)}`);
}

function source() { return about.sources[state.source]; }

// The list.
function conditions() {
  const filled = [...new FormData($("filter"))].filter(([, value]) => value.trim());
  return { source: state.source, ...Object.fromEntries(filled) };
}

async function list(more = false) {
  const asked = ++state.asked;
  const start = more ? state.rows.length : 0;
  const found = await get("episodes", { ...conditions(), start });
  if (asked !== state.asked) return;
  state.rows = more ? state.rows.concat(found.rows) : found.rows;
  state.count = found.count;
  const all = source().episodes, excluded = source().excluded.length;
  $("count").textContent = `${integer(found.count)} of ${integer(all)} episodes, ${integer(found.steps)} steps` + (excluded ? `; ${integer(excluded)} excluded` : "");
  $("command").hidden = !found.command;
  $("command").querySelector("pre").textContent = found.command;
  $("more").hidden = state.rows.length >= state.count;
  drawList();
}

function drawList() {
  const several = new Set(state.rows.map((row) => row.task)).size > 1;
  $("list").replaceChildren(...state.rows.map((row) => {
    const [kind, sign, word] = mark[row.success];
    const size = row.return === null ? `${integer(row.steps)} steps` : `${integer(row.steps)} steps, ${short(row.return)}`;
    const made = el("div", { class: "row", role: "option", "data-number": row.number, onclick: () => show(row.number).catch(fail) },
      el("span", { class: "number" }, integer(row.number)), el("span", { class: kind, title: word }, sign),
      el("span", {}, row.name), el("span", { class: "size", title: "steps, return" }, size));
    if (several && row.task) made.append(el("span", { class: "task" }, row.task));
    return made;
  }));
  markRows();
}

function markRows() {
  const excluded = new Set(source().excluded);
  for (const row of $("list").children) {
    const number = Number(row.dataset.number), chosen = number === state.number;
    row.classList.toggle("chosen", chosen);
    row.setAttribute("aria-selected", chosen);
    row.classList.toggle("excluded", excluded.has(number));
    if (chosen) {
      const top = row.offsetTop - $("list").offsetTop, view = $("list");
      if (top < view.scrollTop || top + row.offsetHeight > view.scrollTop + view.clientHeight) view.scrollTop = top - 40;
    }
  }
}

async function neighbour(by) {
  const place = state.rows.findIndex((row) => row.number === state.number) + by;
  if (place >= state.rows.length && state.rows.length < state.count) await list(true);
  if (state.rows[place]) await show(state.rows[place].number);
}

// An episode.
async function show(number, step = 0) {
  pause();
  state.number = number;
  markRows();
  const found = await get("episode", { source: state.source, number });
  if (state.number !== number) return;
  state.episode = found;
  drawHead();
  drawPictures();
  drawCurves();
  const last = found.steps - 1, moves = found.curves.length > 0;
  $("player").hidden = $("keys").hidden = !moves;
  $("time").max = last;
  go(moves ? Math.min(step, last) : 0);
}

function drawHead() {
  const found = state.episode, [kind, , word] = mark[found.success];
  const excluded = source().excluded.includes(found.number);
  const title = `Episode ${integer(found.number)}`, named = found.name.toLowerCase() === title.toLowerCase() ? [] : [el("span", {}, found.name)];
  const parts = [el("h2", {}, title), ...named, el("span", { class: kind }, word), el("span", {}, `${integer(found.steps)} steps`),
    el("span", {}, found.return === null ? "rewards unknown" : `return ${short(found.return)}`)];
  if (found.kind && found.kind !== "whole") parts.push(el("span", { class: "faint" }, found.kind));
  if (found.stride > 1) parts.push(el("span", { class: "faint" }, `curves have every ${found.stride}th step`));
  if (excluded) parts.push(el("span", { class: "excluded" }, "excluded"));
  if (source().can_exclude) parts.push(el("button", { id: "exclude", title: "x", onclick: () => exclude([found.number], excluded) }, excluded ? "Include again" : "Exclude"));
  if (found.task) parts.push(el("p", { class: "task" }, found.task));
  $("head").replaceChildren(...parts);
}

function drawPictures() {
  const { pictures, numbers } = state.episode;
  const drawn = embedded && embedded.film.pictures.length && state.number === 0 ? [...pictures, "film"] : pictures;
  const figures = drawn.map((name) => el("figure", {}, el("img", { "data-name": name, alt: name }), el("figcaption", {}, name)));
  for (const film of source().films) {
    const at = address("film", { source: state.source, name: film });
    const shown = film.endsWith(".mp4") ? el("video", { src: at, controls: "", loop: "" }) : el("img", { class: "film", src: at, alt: film });
    figures.push(el("figure", {}, shown, el("figcaption", {}, `${film}: a film of this evaluation`)));
  }
  if (Object.keys(numbers).length) {
    const rows = Object.entries(numbers).map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, value)));
    figures.push(el("div", { class: "wide" }, el("table", {}, ...rows)));
  }
  $("pictures").replaceChildren(...figures);
}

function colour(line) { return about.colors[line % about.colors.length]; }

function drawCurves() {
  state.cursors = [];
  $("curves").replaceChildren(...state.episode.curves.map(drawCurve));
}

function drawCurve(curve) {
  const off = (state.hidden[curve.name] ||= new Set());
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": curve.name });
  const range = el("span", { class: "faint" });
  const legend = el("div", { class: "legend" });
  const cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT });
  const values = curve.lines.map((line, index) => {
    const value = el("span");
    const swatch = svg("svg", { class: "swatch", viewBox: "0 0 12 4" });
    swatch.append(svg("rect", { width: 12, height: 4, fill: colour(index) }));
    const button = el("button", { type: "button", title: "hide or show this line", onclick: () => {
      off[off.has(index) ? "delete" : "add"](index);
      button.classList.toggle("off");
      draw();
    } }, swatch, curve.names[index] ? `${curve.names[index]} ` : curve.lines.length > 1 ? `${index} ` : "", value);
    button.classList.toggle("off", off.has(index));
    legend.append(button);
    return value;
  });
  function draw() {
    const shown = curve.lines.filter((_, index) => !off.has(index)).flat().filter((x) => x !== null);
    let low = Infinity, high = -Infinity;
    for (const x of shown) { low = Math.min(low, x); high = Math.max(high, x); }
    range.textContent = !shown.length ? "" : low === high ? short(low) : `${short(low)} to ${short(high)}`;
    const pad = (high - low) * 0.05 || 1;
    chart.replaceChildren();
    curve.lines.forEach((line, index) => {
      if (off.has(index)) return;
      let path = "", pen = "M";
      line.forEach((x, i) => {
        if (x === null) { pen = "M"; return; }
        const across = state.episode.steps > 1 ? (i * state.episode.stride * WIDTH) / (state.episode.steps - 1) : WIDTH / 2;
        path += `${pen}${across.toFixed(1)} ${((HEIGHT * (high + pad - x)) / (high - low + 2 * pad)).toFixed(2)}`;
        pen = "L";
      });
      chart.append(svg("path", { d: path, stroke: colour(index), "stroke-dasharray": index < about.colors.length ? "none" : "5 3" }));
    });
    chart.append(cursor);
  }
  function point(event) {
    if (event.buttons !== 1) return;
    const box = chart.getBoundingClientRect();
    pause();
    go(Math.round(((event.clientX - box.left) / box.width) * (state.episode.steps - 1)));
  }
  chart.addEventListener("pointerdown", point);
  chart.addEventListener("pointermove", point);
  draw();
  state.cursors.push((step) => {
    const across = state.episode.steps > 1 ? (step * WIDTH) / (state.episode.steps - 1) : WIDTH / 2;
    cursor.setAttribute("x1", across);
    cursor.setAttribute("x2", across);
    const at = Math.floor(step / state.episode.stride);
    values.forEach((value, index) => { value.textContent = short(curve.lines[index][at]); });
  });
  const more = curve.dims > curve.lines.length ? `, the first ${curve.lines.length} of ${integer(curve.dims)} numbers` : "";
  return el("div", { class: "curve" }, el("div", { class: "axis" }, el("h3", {}, curve.name + more), range), chart, legend);
}

function go(step) {
  const last = state.episode.steps - 1;
  state.step = Math.max(0, Math.min(last, step));
  $("time").value = state.step;
  $("step").textContent = `step ${integer(state.step)} of ${integer(last)}`;
  for (const move of state.cursors) move(state.step);
  loadPictures();
  remember();
}

// A picture is asked for when the one before has arrived: late ones are left out.
function loadPictures() {
  for (const image of $("pictures").querySelectorAll("img[data-name]")) {
    if (embedded) {
      const { pictures, stride } = embedded.film;
      image.src = pictures[Math.min(Math.round(state.step / stride), pictures.length - 1)];
      continue;
    }
    const wanted = address("picture", { source: state.source, number: state.number, name: image.dataset.name, step: state.step });
    if (image.dataset.busy) { image.dataset.next = wanted; continue; }
    if (image.getAttribute("src") !== wanted) load(image, wanted);
  }
}

function load(image, wanted) {
  image.dataset.busy = "1";
  image.onload = image.onerror = () => {
    delete image.dataset.busy;
    const next = image.dataset.next;
    delete image.dataset.next;
    if (next && next !== image.getAttribute("src")) load(image, next);
  };
  image.src = wanted;
}

function pause() {
  cancelAnimationFrame(playing);
  playing = null;
  $("play").textContent = "Play";
}

function play() {
  if (playing !== null) return pause();
  if (state.step >= state.episode.steps - 1) go(0);
  let begun = null, from = state.step;
  $("play").textContent = "Pause";
  const tick = (now) => {
    begun ??= now;
    const step = from + Math.floor(((now - begun) / 1000) * Number($("speed").value));
    if (step !== state.step) go(step);
    if (state.step >= state.episode.steps - 1) return pause();
    playing = requestAnimationFrame(tick);
  };
  playing = requestAnimationFrame(tick);
}

// Marks: messages through a web socket, which no other page can send.
function exclude(episodes, undo) {
  const message = JSON.stringify({ source: state.source, episodes, undo });
  if (edits === null || edits.readyState > 1) {
    edits = new WebSocket(new URL("edits", location.href).href.replace(/^http/, "ws").split("#")[0]);
    edits.onerror = () => fail(new Error("etude has stopped: start `etude data view` again."));
    edits.onopen = () => edits.send(message);
  } else edits.send(message);
  edits.onmessage = (event) => {
    const reply = JSON.parse(event.data);
    if (reply.error) return fail(new Error(reply.error));
    $("error").hidden = true;
    source().excluded = reply.excluded;
    drawHead();
    list().catch(fail);
    drawNote();
  };
}

function drawNote() {
  const { note, excluded, dataset } = source();
  $("note").replaceChildren(note);
  if (!excluded.length || !dataset) return;
  $("note").replaceChildren(
    `${integer(excluded.length)} excluded: left out of training, exports and edits. `,
    el("button", { type: "button", onclick: () => exclude(excluded, true) }, "Include all again"));
}

// Statistics.
function histogram(found, kind) {
  const counts = found.counts || [], most = Math.max(1, ...counts);
  const chart = svg("svg", { class: kind, viewBox: `0 0 ${Math.max(1, counts.length)} 1`, preserveAspectRatio: "none" });
  chart.classList.add("histogram");
  counts.forEach((count, i) => chart.append(svg("rect", { x: i + 0.04, width: 0.92, y: 1 - count / most, height: count / most })));
  return chart;
}

function card(value, name) { return el("div", { class: "card" }, el("b", {}, value), el("span", {}, name)); }

function spreadFigure(name, found) {
  if (!found.count) return el("figure", {}, el("figcaption", {}, `${name}: none`));
  return el("figure", {}, el("h3", {}, name), histogram(found, "large"),
    el("figcaption", {}, `${short(found.min)} to ${short(found.max)}, mean ${short(found.mean)}, median ${short(found.median)}, standard deviation ${short(found.std)}`));
}

async function drawStatistics() {
  const place = $("statistics");
  place.replaceChildren(el("p", { class: "faint" }, "Reading ..."));
  const found = await get("statistics", { source: state.source });
  const { yes, no, unknown } = found.successes, share = (n) => (found.episodes ? `${((100 * n) / found.episodes).toFixed(1)} %` : "–");
  const parts = [el("div", { class: "cards" }, card(integer(found.episodes), found.excluded ? `episodes, without ${integer(found.excluded)} excluded` : "episodes"),
    card(integer(found.steps), "steps"), card(share(yes), `successes: ${integer(yes)}`), card(share(no), `failures: ${integer(no)}`), card(share(unknown), `unknown: ${integer(unknown)}`)),
    el("div", { class: "two" }, spreadFigure("Steps of an episode", found.lengths), spreadFigure("Return", found.returns))];
  const tasks = found.tasks.filter(([sentence]) => sentence);
  if (tasks.length) {
    const more = found.num_tasks > tasks.length ? `Sentences, the ${tasks.length} most frequent` : "Sentences";
    parts.push(el("h2", {}, more), el("div", { class: "wide" }, el("table", {}, ...tasks.map(([sentence, count]) => el("tr", {}, el("td", { class: "text" }, sentence), el("td", {}, integer(count)))))));
  }
  if (found.fields.length) parts.push(el("h2", {}, "Actions, rewards and observations"), el("p", { class: "faint" }, `Of ${found.read}.`));
  const fields = found.fields.map((field) => {
    const rows = field.dims.map((dim, index) => el("tr", {}, el("td", {}, index), ...["mean", "std", "min", "max"].map((name) => el("td", {}, short(dim[name], 3))), el("td", {}, histogram(dim, "small"))));
    return el("div", {}, el("h3", {}, field.name.replace(/^obs\//, "")), el("div", { class: "wide" }, el("table", {},
      el("tr", {}, ...["", "mean", "std", "min", "max", "distribution"].map((name) => el("th", {}, name))), ...rows)));
  });
  parts.push(el("div", { class: "fields" }, ...fields));
  place.replaceChildren(...parts);
}

// What is shown, and keys.
async function open(tab) {
  state.tab = tab;
  for (const each of ["episodes", "statistics"]) {
    $(each).hidden = each !== tab;
    $(`tab-${each}`).classList.toggle("chosen", each === tab);
  }
  remember();
  pause();
  if (tab === "statistics") await drawStatistics();
}

async function choose(number, episode = null, step = 0) {
  state.source = number;
  state.number = state.episode = null;
  state.hidden = {};
  $("source").value = number;
  for (const part of ["head", "pictures", "curves"]) $(part).replaceChildren();
  $("player").hidden = $("keys").hidden = true;
  $("filter").elements.excluded.closest("label").hidden = !source().can_exclude;
  drawNote();
  await list();
  if (episode === null && state.rows.length) episode = state.rows[0].number;
  if (episode !== null) await show(episode, step);
}

function key(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.id !== "time";
  if (typing || event.ctrlKey || event.altKey || event.metaKey || state.tab !== "episodes" || !state.episode) return;
  const far = event.shiftKey ? 10 : 1;
  const moves = {
    ArrowLeft: () => { pause(); go(state.step - far); }, ArrowRight: () => { pause(); go(state.step + far); },
    ArrowUp: () => neighbour(-1), ArrowDown: () => neighbour(1),
    Home: () => go(0), End: () => go(state.episode.steps - 1), " ": () => play(),
    x: () => source().can_exclude && exclude([state.number], source().excluded.includes(state.number)),
  };
  if (!moves[event.key] || (!state.episode.curves.length && !/ArrowUp|ArrowDown/.test(event.key))) return;
  event.preventDefault();
  Promise.resolve(moves[event.key]()).catch(fail);
}

async function start() {
  about = await get("about");
  $("filters").open = innerWidth > 800;
  if (embedded) {
    $("filters").hidden = true;
    document.body.classList.add("embedded");
    $("keys").textContent = "Left and right: a step, with shift ten. Space: play. Click a curve to go there, a number to hide its line.";
    const rate = embedded.film.rate;
    if (rate) $("speed").prepend(el("option", { value: rate, selected: "" }, `${short(rate, 3)}: real time`));
  }
  $("source").replaceChildren(...about.sources.map((each, index) => el("option", { value: index }, `${each.name}: ${integer(each.episodes)} episodes`)));
  $("source").hidden = about.sources.length < 2;
  $("source").addEventListener("change", () => choose(Number($("source").value)).then(() => open(state.tab)).catch(fail));
  $("filter").addEventListener("input", () => list().catch(fail));
  $("filter").addEventListener("submit", (event) => event.preventDefault());
  $("more").addEventListener("click", () => list(true).catch(fail));
  $("time").addEventListener("input", () => { pause(); go(Number($("time").value)); });
  $("play").addEventListener("click", play);
  $("speed").addEventListener("change", () => { if (playing !== null) { pause(); play(); } });
  for (const each of ["episodes", "statistics"]) $(`tab-${each}`).addEventListener("click", () => open(each).catch(fail));
  document.addEventListener("keydown", key);
  const asked = new URLSearchParams(location.hash.slice(1));
  const number = Math.min(Number(asked.get("source")) || 0, about.sources.length - 1);
  const tab = asked.get("tab") === "statistics" ? "statistics" : "episodes";
  await choose(number, asked.has("episode") ? Number(asked.get("episode")) : null, Number(asked.get("step")) || 0);
  await open(tab);
}

start().catch(fail);
