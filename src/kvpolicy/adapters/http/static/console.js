// The console: one session at a time, its turns, and what they do to its memory.

import {ApiError, Client} from "./console-api.js";
import {drawBar, drawPlot, number} from "./console-draw.js";
import {TURNS} from "./console-turns.js";

const MAX_SHOWN_TURNS = 200; // a page that is left open must not grow without end
const MAX_POINTS = 1000;
const POLL_MS = 5000;
const PLAY_PAUSE_MS = 250;

const $ = (id) => document.getElementById(id);
const log = $("log");

let session = null; // {client, id, budget, isOpen}
let status = null; // of the session, as of its last reply
let held = null; // the last status before its end: what it held when it still held something
let points = [];
let isBusy = false;
let isPlaying = false;

// Text of users and servers goes through textContent only.
function element(name, className, text, ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

function wantedSession() {
  const wanted = {retention: {}, sampling: {}};
  const prompt = $("system_prompt").value.trim();
  if (prompt) wanted.system_prompt = prompt;
  for (const field of document.querySelectorAll("input[data-group]")) {
    const text = field.value.trim();
    // What is no number goes as it is: the server says best what it expects.
    if (text) wanted[field.dataset.group][field.id] = /^-?\d+$/.test(text) ? Number(text) : text;
  }
  return wanted;
}

async function open() {
  if (isBusy || session?.isOpen) return;
  const client = new Client($("key").value);
  isBusy = true;
  render("opening");
  try {
    const opened = await client.open(wantedSession());
    forget();
    const budget = opened.retention?.total_tokens ?? null;
    session = {client, id: opened.session_id, budget, isOpen: true};
    note(`Session open. Budget ${number(budget ?? 0)} tokens, at most ${number(opened.max_blocks)} KV blocks.`);
    await refresh();
  } catch (error) {
    showError(error, "The session was not opened");
  } finally {
    isBusy = false;
    render();
    if (session?.isOpen) $("text").focus();
  }
  showServer(client);
}

async function close() {
  isPlaying = session.isOpen = false;
  render();
  try {
    const {frames, closed} = await session.client.close(session.id);
    note(`Closed after ${number(frames)} turns${closed ? "" : "; the engine is late in letting go of it"}.`);
    await refresh();
  } catch (error) {
    session.isOpen = true; // unless it has ended, as its status may tell
    showError(error, "The session was not closed");
    await refresh();
  }
  render();
  $("open").focus();
}

// Ask what the session holds, and notice if it has ended by itself.
async function refresh() {
  const asked = session;
  if (!asked) return;
  try {
    const answer = await asked.client.status(asked.id);
    if (session !== asked) return;
    status = answer;
    if (status.state !== "ended") held = status;
    if (status.state === "ended" && asked.isOpen) showEnd(status.reason ?? "no reason is known");
  } catch (error) {
    if (session === asked && asked.isOpen && error.status === 404) showEnd(error.message);
  }
  render();
}

function forget() {
  for (const image of log.querySelectorAll("img")) URL.revokeObjectURL(image.src);
  log.replaceChildren();
  [session, status, held, points] = [null, null, null, []];
}

async function push(text, image) {
  const pieces = element("p", "reply");
  const figures = element("p", "figures", "the reply is being made …");
  const chunk = element("p", "chunk", text);
  if (image) {
    const picture = element("img");
    picture.src = URL.createObjectURL(image);
    picture.alt = image.name;
    chunk.prepend(picture);
  }
  const turn = element("article", "turn", undefined, chunk, pieces, figures);
  append(turn);
  isBusy = true;
  log.setAttribute("aria-busy", "true");
  render();
  try {
    const reply = await session.client.push(session.id, text, image, showingPieces(pieces));
    showReply(turn, pieces, figures, reply);
    return true;
  } catch (error) {
    figures.textContent = "no reply";
    turn.classList.add("failed");
    showError(error, "No reply to this turn");
    return false;
  } finally {
    isBusy = false;
    log.removeAttribute("aria-busy");
    await refresh();
  }
}

// Return what takes the pieces of a reply. They are drawn once per frame of the screen, however fast they come.
function showingPieces(pieces) {
  let fresh = "";
  return (piece) => {
    if (!fresh) {
      requestAnimationFrame(() => {
        if (!("whole" in pieces.dataset)) pieces.textContent += fresh;
        fresh = "";
        scrollDown();
      });
    }
    fresh += piece;
  };
}

function showReply(turn, pieces, figures, reply) {
  pieces.dataset.whole = "";
  pieces.textContent = reply.text;
  if (reply.finish_reason === "length") pieces.append(element("span", "cut", " … cut at max tokens"));
  turn.dataset.index = reply.frame_index;
  const said = [
    `turn ${number(reply.frame_index + 1)}`,
    `TTFT ${milliseconds(reply.ttft_s)}`,
    `latency ${milliseconds(reply.latency_s)}`,
    `chunk ${number(reply.chunk_tokens)} + reply ${number(reply.reply_tokens)} tokens`,
    `evicted ${number(reply.num_evicted_tokens)}`,
    `resident ${number(reply.resident_tokens)}`,
    `${number(reply.blocks)} blocks`,
  ];
  figures.replaceChildren(...said.map((part) => element("span", "", part)));
  figures.children[4].classList.toggle("strong", reply.num_evicted_tokens > 0);
  if (reply.consolidated) figures.append(element("span", "strong", "consolidated"));
  points.push({
    turn: reply.frame_index + 1,
    resident: reply.resident_tokens,
    ttft: Number((1000 * reply.ttft_s).toPrecision(3)),
    evicted: reply.num_evicted_tokens > 0,
    consolidated: reply.consolidated,
  });
  points = points.slice(-MAX_POINTS);
  scrollDown();
}

const milliseconds = (seconds) => `${number(Number((1000 * seconds).toPrecision(3)))} ms`;

async function play() {
  if (isPlaying) {
    isPlaying = false;
    return render();
  }
  isPlaying = true;
  if (!session?.isOpen) await open();
  for (const text of TURNS) {
    if (!isPlaying || !session?.isOpen || !(await push(text, null))) break;
    await new Promise((resolve) => setTimeout(resolve, PLAY_PAUSE_MS));
  }
  isPlaying = false;
  render();
}

function append(node) {
  log.querySelector(".hint")?.remove();
  log.append(node);
  while (log.childElementCount > MAX_SHOWN_TURNS) {
    for (const image of log.firstElementChild.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    log.firstElementChild.remove();
  }
  scrollDown();
}

const scrollDown = () => log.scrollTo(0, log.scrollHeight);

const note = (text) => append(element("p", "note", text));

function showError(error, title) {
  if (!(error instanceof ApiError)) throw error; // a fault of this page: leave it to the browser's console
  const code = [error.status || "", error.code].filter(Boolean).join(" ");
  alertBox("error", element("p", "title", title, element("code", "", code)), list(error.reasons));
}

function showEnd(reason) {
  session.isOpen = isPlaying = false;
  const again = element("button", "", "Open a new session");
  again.addEventListener("click", open);
  alertBox("error ended", element("p", "title", "The session has ended"), list(reason.split("\n")), again);
}

const list = (lines) => element("ul", "", undefined, ...lines.map((line) => element("li", "", line)));

function alertBox(className, ...children) {
  const box = element("div", className, undefined, ...children);
  box.setAttribute("role", "alert");
  append(box);
}

function render(state) {
  const isOpen = Boolean(session?.isOpen);
  const shown = state ?? (isBusy ? "pending" : isOpen ? "open" : session ? "ended" : "no session");
  $("state").textContent = shown;
  $("state").dataset.state = shown;
  $("fields").disabled = isOpen || isBusy;
  $("open").disabled = isOpen || isBusy;
  $("close").disabled = !isOpen;
  $("send").disabled = !isOpen || isBusy || isPlaying;
  $("play").disabled = isBusy && !isPlaying;
  $("play").textContent = isPlaying ? "Stop" : `Play ${TURNS.length} turns`;

  const tokens = drawBar($("bar"), held, session?.budget, status?.state === "ended");
  for (const [kind, count] of Object.entries(tokens)) $(`tokens-${kind}`).textContent = held ? number(count) : "–";
  for (const name of ["frames", "refused", "num_evictions", "num_consolidations", "num_parks"]) {
    $(name).textContent = status ? number(status[name]) : "–";
  }
  $("blocks").textContent = status ? `${number(status.blocks)} of ${number(status.max_blocks)}` : "–";
  renderPlots();
}

function renderPlots() {
  const series = (name) => points.map((point) => ({...point, value: point[name]}));
  const limit = session?.budget;
  drawPlot($("plot-resident"), {name: "Resident tokens", unit: "tokens", points: series("resident"), limit});
  drawPlot($("plot-ttft"), {name: "Time to first token", unit: "ms", points: series("ttft")});
  const now = points.at(-1);
  $("now-resident").textContent = now ? `${number(now.resident)} tokens` : "";
  $("now-ttft").textContent = now ? `${number(now.ttft)} ms` : "";
}

async function showServer(client) {
  try {
    const {model, takes_images: takesImages, engine} = await client.config();
    const kinds = takesImages ? "text and images" : "text only";
    const blocks = `${number(engine.num_pool_blocks)} blocks of ${number(engine.block_size)} tokens`;
    $("server").textContent = `${model} · ${kinds} · context ${number(engine.context_limit)} tokens · ${blocks}`;
    $("image").disabled = !takesImages;
    $("image").title = takesImages ? "" : "The model takes text only.";
  } catch (error) {
    $("server").textContent = error.status === 401 ? "this server wants an API key" : error.message;
  }
}

function showImage() {
  const file = $("image").files[0];
  URL.revokeObjectURL($("thumb").src);
  $("chosen").classList.toggle("filled", Boolean(file));
  if (file) $("thumb").src = URL.createObjectURL(file);
  else $("thumb").removeAttribute("src");
}

function clearImage() {
  $("image").value = "";
  showImage();
}

$("settings").addEventListener("submit", (event) => {
  event.preventDefault();
  open();
});
$("close").addEventListener("click", close);
$("play").addEventListener("click", play);
$("image").addEventListener("change", showImage);
$("drop-image").addEventListener("click", clearImage);
$("key").addEventListener("change", () => showServer(new Client($("key").value)));

$("composer").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("text").value;
  const image = $("image").files[0] ?? null;
  if ($("send").disabled || !(text.trim() || image)) return;
  $("text").value = "";
  clearImage();
  $("text").focus();
  await push(text, image);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

$("turns").addEventListener("dragover", (event) => {
  event.preventDefault();
  $("turns").classList.add("over");
});
$("turns").addEventListener("dragleave", () => $("turns").classList.remove("over"));
$("turns").addEventListener("drop", (event) => {
  event.preventDefault();
  $("turns").classList.remove("over");
  if ($("image").disabled || !event.dataTransfer.files.length) return;
  $("image").files = event.dataTransfer.files;
  showImage();
});

new ResizeObserver(renderPlots).observe($("plots"));
setInterval(() => {
  if (session?.isOpen && !isBusy && !document.hidden) refresh();
}, POLL_MS);
// A page that is left gives the room of its session back.
addEventListener("pagehide", () => {
  if (session?.isOpen) session.client.abandon(session.id);
});

render();
showServer(new Client($("key").value));
