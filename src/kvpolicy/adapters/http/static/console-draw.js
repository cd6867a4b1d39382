// The drawings: a bar of what a session holds, and plots of a figure over the turns. Text never leaves textContent.

const NUMBER = new Intl.NumberFormat("en");
export const number = (value) => NUMBER.format(value);

function add(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

// The bar has two rows. The upper one is all that the session was ever given: gone on the left, held on the right. The
// lower one is the held part, magnified to the budget; two lines tie them together.
// `isPast`: it was so until the session ended.
export function drawBar(svg, status, budget, isPast) {
  svg.replaceChildren();
  svg.classList.toggle("past", isPast);
  const segments = status?.segments ?? [];
  const held = sum(segments);
  const gone = status?.num_evicted_tokens ?? 0;
  const scale = Math.max(budget ?? 0, held, 1);
  const share = (tokens, of) => `${(100 * tokens) / of}%`;
  const split = gone + held ? gone / (gone + held) : 0;

  add(svg, "text", {class: "label", x: 0, y: 12}, status ? `gone ${number(gone)}` : "gone");
  const until = isPast ? ", until it ended" : "";
  add(svg, "text", {class: "label end", x: "100%", y: 12}, status ? `held ${number(held)} tokens${until}` : "held");
  add(svg, "rect", {class: "free", x: 0, y: 18, width: "100%", height: 14});
  add(svg, "rect", {id: "bar-gone", fill: "url(#fill-gone)", x: 0, y: 18, width: share(split, 1), height: 14});
  if (held) add(svg, "rect", {class: "held", x: share(split, 1), y: 18, width: share(1 - split, 1), height: 14});
  if (gone) add(svg, "rect", {class: "edge", x: share(split, 1), y: 18, width: 1, height: 14});

  if (held) {
    add(svg, "line", {class: "tie", x1: share(split, 1), x2: 0, y1: 32, y2: 48});
    add(svg, "line", {class: "tie", x1: "100%", x2: share(held, scale), y1: 32, y2: 48});
  }
  add(svg, "rect", {class: "free", x: 0, y: 48, width: "100%", height: 34});
  let start = 0;
  for (const [index, {kind, tokens}] of segments.entries()) {
    const place = {x: share(start, scale), y: 48, width: share(tokens, scale), height: 34};
    const paint = kind === "reply" ? {fill: "url(#fill-reply)"} : {class: kind === "anchor" ? "anchor" : "content"};
    const part = add(svg, "rect", {...place, ...paint, "data-kind": kind});
    add(part, "title", {}, `${kind}: ${number(tokens)} tokens (${index + 1} of ${segments.length}, oldest first)`);
    if (index) add(svg, "rect", {class: "edge", x: place.x, y: 48, width: 1, height: 34});
    start += tokens;
  }
  const end = budget ? share(budget, scale) : "100%";
  if (budget) add(svg, "line", {class: "budget", x1: end, x2: end, y1: 42, y2: 88});
  add(svg, "text", {class: "label", x: 0, y: 102}, "0");
  add(svg, "text", {class: "label end", x: end, y: 102}, budget ? `budget ${number(budget)} tokens` : "budget");

  const [anchor, reply] = ["anchor", "reply"].map((kind) => sum(segments.filter((part) => part.kind === kind)));
  const content = held - anchor - reply;
  const parts = `anchor ${number(anchor)}, content ${number(content)}, replies ${number(reply)}`;
  const told = `${number(gone)} tokens are gone, ${number(held)} are held: ${parts}; budget ${number(budget ?? 0)}.`;
  svg.setAttribute("aria-label", status ? told : "No session.");
  return {anchor, content, reply, gone, free: Math.max(0, (budget ?? 0) - held)};
}

// points: [{turn, value, evicted, consolidated}], oldest first.
export function drawPlot(svg, {name, unit, points, limit}) {
  svg.replaceChildren();
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  const [left, right, top, bottom] = [52, width - 14, 20, height - 34];
  const first = points[0]?.turn ?? 1;
  const last = Math.max(points.at(-1)?.turn ?? 1, first + 9);
  const highest = Math.max(limit ?? 0, ...points.map((point) => point.value)) * 1.08 || 1;
  const x = (turn) => left + ((right - left) * (turn - first)) / (last - first);
  const y = (value) => bottom - ((bottom - top) * value) / highest;

  for (const value of points.length || limit ? ticks(0, highest, 4) : [0]) {
    add(svg, "line", {class: "grid", x1: left, x2: right, y1: y(value), y2: y(value)});
    add(svg, "text", {class: "tick end", x: left - 6, y: y(value) + 4}, number(value));
  }
  for (const turn of ticks(first, last, 6, 1)) {
    add(svg, "line", {class: "axis", x1: x(turn), x2: x(turn), y1: bottom, y2: bottom + 4});
    add(svg, "text", {class: "tick middle", x: x(turn), y: bottom + 16}, number(turn));
  }
  add(svg, "line", {class: "axis", x1: left, x2: right, y1: bottom, y2: bottom});
  add(svg, "text", {class: "label end", x: left - 6, y: 11}, unit);
  add(svg, "text", {class: "label end", x: right, y: height - 4}, "turn");
  if (limit) {
    add(svg, "line", {class: "budget", x1: left, x2: right, y1: y(limit), y2: y(limit)});
    add(svg, "text", {class: "label end", x: right, y: y(limit) - 5}, `budget ${number(limit)}`);
  }

  const path = points.map(({turn, value}, index) => `${index ? "L" : "M"}${x(turn).toFixed(1)} ${y(value).toFixed(1)}`);
  if (path.length) add(svg, "path", {class: "curve", d: path.join("")});
  for (const {turn, value, evicted, consolidated} of points) {
    if (evicted) add(svg, "line", {class: "evicted-mark", x1: x(turn), x2: x(turn), y1: bottom - 9, y2: bottom - 1});
    if (consolidated) add(svg, "circle", {class: "ring", cx: x(turn), cy: y(value), r: 5});
    if (points.length > 80) continue;
    const dot = add(svg, "circle", {class: "point", cx: x(turn), cy: y(value), r: 2.5});
    add(dot, "title", {}, `turn ${turn}: ${number(value)} ${unit}`);
  }
  const newest = points.at(-1);
  if (!newest) add(svg, "text", {class: "label middle", x: (left + right) / 2, y: (top + bottom) / 2}, "no turns yet");
  const told = newest ? `turn ${newest.turn}: ${number(newest.value)} ${unit}` : "no turns yet";
  svg.setAttribute("aria-label", `${name} over the turns; ${told}.`);
}

const sum = (segments) => segments.reduce((total, {tokens}) => total + tokens, 0);

// Round values from low to high, about `count` of them, at least `least` apart.
function ticks(low, high, count, least = 0) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10));
  const from = Math.ceil(low / step);
  const length = Math.floor(high / step) - from + 1;
  return Array.from({length}, (_, index) => Number(((from + index) * step).toPrecision(12)));
}
