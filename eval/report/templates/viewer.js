"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const ALL = "all"; // the mean over layers or heads
const TRAINED = { show: "both", lambda: null }; // both maps, at the lambda that was learned

// ---------------------------------------- maps

function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out.buffer;
}

for (const example of DATA.maps) for (const m of example) {
  m.values = new Int8Array(bytes(m.maps));
  m.largest = new Float32Array(bytes(m.scales));
  if (!m.second) continue;
  m.secondValues = new Int8Array(bytes(m.second));
  m.secondLargest = new Float32Array(bytes(m.secondScales));
  m.lambdas = new Float32Array(bytes(m.lambda));
}

// Row t of one packed map: t + 1 weights. Stored is sign(a) 127 sqrt(|a| / largest of the row), the lower triangle only.
function packedRow(values, scales, T, head, t) {
  const start = head * (T * (T + 1)) / 2 + (t * (t + 1)) / 2, largest = scales[head * T + t];
  return Float64Array.from({ length: t + 1 }, (_, s) => {
    const share = values[start + s] / DATA.steps;
    return Math.sign(share) * share * share * largest;
  });
}

// For each head, counted over all layers: its number among the differential heads, or null.
for (const model of DATA.models) {
  let n = 0;
  model.pairs = model.heads.flatMap((count, l) => Array.from({ length: count }, () => (model.differential[l] ? n++ : null)));
}

const trained = (example, model, head, t) => // lambda of a differential head in row t
  DATA.maps[example][model].lambdas[DATA.models[model].pairs[head] * DATA.examples[example].tokens.length + t];

// Row t of one head as trained; for a differential head, map 1 - lambda map 2 at another lambda, or one of the maps.
function headRow(example, model, head, t, view = TRAINED) {
  const T = DATA.examples[example].tokens.length, m = DATA.maps[example][model], pair = DATA.models[model].pairs[head];
  const row = packedRow(m.values, m.largest, T, head, t);
  if (pair === null || (view.show === "both" && view.lambda === null)) return row;
  const second = packedRow(m.secondValues, m.secondLargest, T, pair, t);
  if (view.show === "second") return second;
  const more = trained(example, model, head, t) - (view.show === "first" ? 0 : view.lambda);
  return row.map((a, s) => a + more * second[s]);
}

// Heads are counted over all layers.
function headsOf(model, layer, head) {
  const counts = DATA.models[model].heads, out = [];
  let first = 0;
  counts.forEach((count, l) => {
    if (layer === ALL || layer === l) for (let h = 0; h < count; h++) if (head === ALL || head === h) out.push(first + h);
    first += count;
  });
  return out;
}

function rowOf(example, p, t) {
  const heads = headsOf(p.model, p.layer, p.head), mean = new Float64Array(t + 1);
  for (const h of heads) headRow(example, p.model, h, t, p).forEach((a, s) => { mean[s] += a / heads.length; });
  return mean;
}

const total = (row, start, stop) => row.slice(start, Math.min(stop, row.length)).reduce((sum, a) => sum + a, 0);

// ---------------------------------------- state, kept in the address so that a view can be shared

const state = { example: 0, pinned: 0, hovered: null, panels: [] };
const query = () => (state.hovered === null ? state.pinned : state.hovered);

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const whole = (text, limit, otherwise) => (/^\d+$/.test(text || "") && +text < limit ? +text : otherwise);
  state.example = whole(given.get("example"), DATA.examples.length, 0);
  const example = DATA.examples[state.example];
  state.pinned = whole(given.get("query"), example.tokens.length, example.query);
  state.panels = DATA.models.slice(0, 2).map((_, i) => {
    const [place, shown] = (given.get("ab"[i]) || "").split(":"), [m, l, h] = place.split(".");
    const model = whole(m, DATA.models.length, i), [bestLayer, bestHead] = DATA.models[model].best;
    if (l === undefined) return { model, layer: bestLayer, head: bestHead, ...TRAINED };
    const layer = whole(l, DATA.models[model].heads.length, ALL);
    return { model, layer, head: layer === ALL ? ALL : whole(h, DATA.models[model].heads[layer], ALL), ...viewOf(shown) };
  });
}

// "first" or "second" map, or the number of a lambda.
function viewOf(text) {
  if (text === "first" || text === "second") return { show: text, lambda: null };
  return text && Number.isFinite(+text) ? { show: "both", lambda: +text } : TRAINED;
}

function writeAddress() {
  const parts = [`example=${state.example}`, `query=${state.pinned}`];
  state.panels.forEach((p, i) => {
    const shown = p.show !== "both" ? `:${p.show}` : p.lambda === null ? "" : `:${p.lambda}`;
    parts.push(`${"ab"[i]}=${p.model}.${p.layer}.${p.head}${shown}`);
  });
  history.replaceState(null, "", `#${parts.join("&")}`);
}

// ---------------------------------------- drawing

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const number = (a, digits = 3) => (a < 0 ? "−" : "") + Math.abs(a).toFixed(digits);
const hue = (a) => (a < 0 ? "var(--neg)" : "var(--pos)");
const opacity = (a, scale) => (scale > 0 ? Math.sqrt(Math.min(1, Math.abs(a) / scale)) * 0.92 : 0);

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => element("option", { value, textContent: text })));
  select.value = String(chosen);
}

function buildPanel(p, index) {
  const side = "AB"[index];
  const panel = (p.panel = element("section", { className: "panel" }));
  panel.setAttribute("aria-label", `model ${side}`);
  const choose = element("div", { className: "choose" });
  for (const what of ["model", "layer", "head"]) {
    p[`${what}Select`] = element("select", { id: `${what}${side}` });
    p[`${what}Select`].onchange = (event) => {
      const value = event.target.value === ALL ? ALL : +event.target.value;
      if (what === "model") {
        const [layer, head] = DATA.models[value].best;
        Object.assign(p, { model: value, layer, head, ...TRAINED });
      }
      else if (what === "layer") Object.assign(p, { layer: value, head: ALL });
      else p.head = value;
      draw();
    };
    choose.append(element("label", {}, `${what} `, p[`${what}Select`]));
  }
  buildLambda(p, side);
  p.tokens = element("div", { className: "tokens", tabIndex: 0, id: `tokens${side}` });
  p.tokens.setAttribute("role", "listbox");
  p.tokens.setAttribute("aria-label", `tokens, model ${side}: choose a query`);
  listen(p);
  p.says = element("p", { className: "says", id: `says${side}` });
  p.says.setAttribute("aria-live", "polite");
  p.shares = element("div", { className: "shares", id: `shares${side}` });
  p.tops = element("div", { className: "tops" });
  p.grid = element("div", { className: "grid" });
  p.gridTitle = element("h3");
  p.canvas = element("canvas", { id: `map${side}` });
  p.mark = element("i");
  p.canvas.onclick = (event) => {
    const box = p.canvas.getBoundingClientRect();
    move(Math.floor(((event.clientY - box.top) / box.height) * DATA.examples[state.example].tokens.length));
  };
  const map = element("details", { open: matchMedia("(min-width: 60rem)").matches }, element("summary", { textContent:
    "The whole map: queries downwards, keys to the right" }), element("div", { className: "map" }, p.canvas, p.mark));
  panel.append(choose, p.lambdaBox, p.tokens, p.says, p.shares, element("h3", { textContent: "Most attention" }), p.tops, p.gridTitle,
    p.grid, map);
  return panel;
}

function buildLambda(p, side) {
  p.showSelect = element("select", { id: `show${side}` });
  options(p.showSelect, [["both", "map 1 − λ map 2"], ["first", "map 1"], ["second", "map 2"]], p.show);
  p.showSelect.onchange = () => { p.show = p.showSelect.value; draw(); };
  p.slider = element("input", { type: "range", step: 0.01, id: `lambda${side}` });
  p.slider.oninput = () => { Object.assign(p, { show: "both", lambda: +p.slider.value }); draw(); };
  p.lambdaSays = element("output", { id: `lambdaSays${side}` });
  p.reset = element("button", { textContent: "as trained" });
  p.reset.onclick = () => { Object.assign(p, TRAINED); draw(); };
  p.lambdaBox = element("div", { className: "choose" }, element("label", {}, "show ", p.showSelect),
    element("label", {}, "λ ", p.slider), p.lambdaSays, p.reset);
}

function drawLambda(p, t) {
  const heads = headsOf(p.model, p.layer, p.head).filter((h) => DATA.models[p.model].pairs[h] !== null);
  p.lambdaBox.hidden = heads.length === 0;
  if (!heads.length) return;
  const learned = heads.reduce((sum, h) => sum + trained(state.example, p.model, h, t), 0) / heads.length;
  p.showSelect.value = p.show;
  const reach = Math.min(10, Math.max(1.5, Math.ceil(1.25 * Math.abs(learned)))); // learned λ may be negative, or above 1.5
  p.slider.max = reach;
  p.slider.min = learned < 0 ? -reach : -0.5;
  p.slider.value = p.lambda === null ? learned : p.lambda;
  p.slider.disabled = p.show !== "both";
  p.reset.disabled = p.lambda === null && p.show === "both";
  p.lambdaSays.textContent = p.show !== "both" ? "" : p.lambda === null
    ? `${number(learned, 2)} (as trained${heads.length > 1 ? ", mean" : ""})` : `${number(p.lambda, 2)} (trained: ${number(learned, 2)})`;
}

function listen(p) {
  const at = (event) => { const i = event.target.dataset && event.target.dataset.i; return i === undefined ? null : +i; };
  p.tokens.onpointerover = (event) => {
    if (event.pointerType === "mouse" && at(event) !== null && at(event) !== query()) { state.hovered = at(event); draw(); }
  };
  p.tokens.onpointerleave = () => { if (state.hovered !== null) { state.hovered = null; draw(); } };
  p.tokens.onclick = (event) => { if (at(event) !== null) move(at(event)); };
  p.tokens.onkeydown = (event) => {
    const last = DATA.examples[state.example].tokens.length - 1;
    const to = { ArrowLeft: state.pinned - 1, ArrowUp: state.pinned - 1, ArrowRight: state.pinned + 1,
      ArrowDown: state.pinned + 1, Home: 0, End: last }[event.key];
    if (to !== undefined) { event.preventDefault(); move(to); }
  };
}

function move(to) {
  state.hovered = null;
  state.pinned = Math.max(0, Math.min(DATA.examples[state.example].tokens.length - 1, to));
  draw();
}

function drawTokens(p, row, scale) {
  const example = DATA.examples[state.example], t = query(), [from, to] = example.spans.needle || [-1, -1];
  if (p.drawn !== state.example) {
    const side = p.tokens.id.slice(-1);
    p.tokens.replaceChildren(...example.tokens.map((text, i) => {
      const token = element("span", { textContent: text, id: `${side}${i}` });
      token.dataset.i = i;
      token.setAttribute("role", "option");
      return token;
    }));
    p.drawn = state.example;
  }
  [...p.tokens.children].forEach((token, i) => {
    const a = i <= t ? row[i] : 0, dense = opacity(a, scale);
    token.className = [i === t && "chosen", i > t && "after", i >= from && i < to && "needle"].filter(Boolean).join(" ");
    token.setAttribute("aria-selected", i === t);
    token.style.background = i <= t ? `rgba(${hue(a)}, ${dense.toFixed(3)})` : "";
    token.style.color = dense > 0.55 ? "var(--over)" : "";
    token.title = i <= t ? `${token.textContent}  ${number(a)}` : `${token.textContent}  not seen by the query`;
  });
  p.tokens.setAttribute("aria-activedescendant", p.tokens.children[t].id);
}

function meter(a, scale) {
  const bar = element("i"), width = scale > 0 ? Math.min(1, Math.abs(a) / scale) * 100 : 0;
  bar.style.cssText = `left:0; width:${width}%; background:rgb(${hue(a)})`;
  const made = element("div", { className: "meter" });
  made.append(bar);
  return made;
}

function drawNumbers(p, row) {
  const example = DATA.examples[state.example], t = query(), guesses = DATA.maps[state.example][p.model].next[t];
  const sum = total(row, 0, t + 1), says = [];
  guesses.forEach(([text, share], i) => says.push(i ? ", " : "Next token: ", element("code", { textContent: text }), ` ${share.toFixed(2)}`));
  if (t + 1 < example.tokens.length) says.push("; in the text: ", element("code", { textContent: example.tokens[t + 1] }));
  const negative = row.reduce((part, a) => part + Math.min(0, a), 0);
  says.push(`. The row sums to ${number(sum, 2)}`, negative < -5e-3 ? `, of which negative ${number(negative, 2)}.` : ".");
  p.says.replaceChildren(...says);
  const spans = Object.entries(example.spans).filter(([, [start]]) => start <= t);
  const masses = spans.map(([name, [start, stop]]) => [name, total(row, start, stop)]);
  const widest = Math.max(1, ...masses.map(([, a]) => Math.abs(a)));
  p.shares.replaceChildren(...masses.flatMap(([name, a]) => [element("span", { textContent: name }), meter(a, widest),
    element("span", { textContent: number(a) })]));
  const order = [...row.keys()].sort((i, j) => Math.abs(row[j]) - Math.abs(row[i])).slice(0, 5);
  p.tops.replaceChildren(...order.flatMap((s) => [element("span", {}, element("code", { textContent: example.tokens[s] }), ` at ${s}`),
    meter(row[s], Math.abs(row[order[0]])), element("span", { textContent: number(row[s]) })]));
}

function drawGrid(p) {
  const example = DATA.examples[state.example], counts = DATA.models[p.model].heads, t = query();
  const [name, [from, to]] = Object.entries(example.spans).find(([span, [start]]) => span === "needle" && start <= t)
    || ["first token", [0, 1]];
  p.gridTitle.textContent = `Each head's attention to the ${name} (layers downwards)`;
  p.grid.style.gridTemplateColumns = `max-content repeat(${Math.max(...counts)}, minmax(0, 3rem))`;
  const cells = [];
  let n = 0;
  counts.forEach((count, layer) => {
    cells.push(element("em", { textContent: layer }));
    for (let head = 0; head < Math.max(...counts); head++) {
      if (head >= count) { cells.push(element("span")); continue; }
      const a = total(headRow(state.example, p.model, n++, t, p), from, to);
      const button = element("button", { title: `layer ${layer}, head ${head}: ${number(a)}`, tabIndex: -1 });
      button.setAttribute("aria-label", button.title);
      button.setAttribute("aria-pressed", p.layer === layer && p.head === head);
      button.style.backgroundImage = `linear-gradient(rgba(${hue(a)}, ${opacity(a, 1)}) 0 0)`;
      button.onclick = () => { Object.assign(p, { layer, head }); draw(); };
      cells.push(button);
    }
  });
  p.grid.replaceChildren(...cells);
}

function drawMap(p) {
  const T = DATA.examples[state.example].tokens.length, key = [state.example, p.model, p.layer, p.head, p.show, p.lambda, dark.matches].join();
  const context = p.canvas.getContext("2d");
  if (p.mapKey !== key) {
    const rows = Array.from({ length: T }, (_, t) => rowOf(state.example, p, t));
    const scale = Math.max(...rows.map((row) => Math.max(...row.map(Math.abs))));
    const colours = ["--pos", "--neg"].map((name) => getComputedStyle(document.documentElement).getPropertyValue(name).split(",").map(Number));
    p.canvas.width = p.canvas.height = T;
    p.image = context.createImageData(T, T);
    rows.forEach((row, t) => row.forEach((a, s) => p.image.data.set([...colours[a < 0 ? 1 : 0], 255 * opacity(a, scale)], 4 * (t * T + s))));
    p.mapKey = key;
  }
  context.putImageData(p.image, 0, 0);
  p.mark.style.cssText = `top:${(100 * query()) / T}%; height:${100 / T}%`;
}

function draw() {
  const example = DATA.examples[state.example], t = query();
  const rows = state.panels.map((p) => rowOf(state.example, p, t));
  const scale = Math.max(...rows.map((row) => Math.max(...row.map(Math.abs)))); // one scale for both sides, so that they can be compared
  byId("example").value = String(state.example);
  byId("query").textContent = `query ${t}: ${example.tokens[t]}`;
  const strip = (name) => `<i style="background:linear-gradient(90deg, rgba(var(${name}),0), rgba(var(${name}),.46) 25%, rgba(var(${name}),.92))"></i>`;
  byId("legend").innerHTML = `<span>0 ${strip("--pos")} ${number(scale)} attention</span>`
    + `<span>0 ${strip("--neg")} ${number(-scale)} negative attention</span>`
    + `<span>(colour grows with the square root; the needle is underlined)</span>`;
  state.panels.forEach((p, i) => {
    const heads = DATA.models[p.model].heads;
    options(p.modelSelect, DATA.models.map((model, m) => [m, model.label]), p.model);
    options(p.layerSelect, [[ALL, "mean of all"], ...heads.map((_, l) => [l, `${l}`])], p.layer);
    const count = p.layer === ALL ? 0 : heads[p.layer];
    options(p.headSelect, [[ALL, "mean of all"], ...Array.from({ length: count }, (_, h) => [h, `${h}`])], p.head);
    p.headSelect.disabled = p.layer === ALL;
    p.panel.style.borderTopColor = DATA.models[p.model].colour;
    drawLambda(p, t);
    drawTokens(p, rows[i], scale);
    drawNumbers(p, rows[i]);
    drawGrid(p);
    drawMap(p);
  });
  writeAddress();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
dark.onchange = draw;
addEventListener("hashchange", () => location.reload()); // another view's address; writeAddress does not cause this event
readAddress();
byId("panels").append(...state.panels.map(buildPanel));
options(byId("example"), DATA.examples.map((example, i) => [i, example.title]), state.example);
byId("example").onchange = (event) => {
  state.example = +event.target.value;
  move(DATA.examples[state.example].query);
};
byId("back").onclick = () => move(state.pinned - 1);
byId("on").onclick = () => move(state.pinned + 1);
draw();
