// What an engine does, step by step: its pool, its batch, its queues. `minivllm/core/step_events.py` describes the lines.
//
// One file for the page of a server (`start`), for notebooks (`default.render`) and for anybody's page (`mount`). Nothing
// is fetched but the server's events. Whatever a line says is put on the page as text, never as markup.

const FORMAT = 1;
const KEPT = 1000; // steps that one can go back
const MOST_BYTES = 64 * 2 ** 20;
const MOST_LINES = 100000;
const MOST_BLOCKS = 1000000;
const MOST_CORES = 1024;
const CELLS = 20000; // blocks that are drawn
const CHIPS = 40;
const SLOTS = 64; // of adapters, that are drawn
const HUES = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442"]; // Okabe and Ito's
const PREFILL = "#0072B2", DECODE = "#009E73", DRAFT = "#E69F00";
const hue = (number) => HUES[(number - 1) % HUES.length];
const on = (colour) => (colour === "#0072B2" ? "#ffffff" : "#111111"); // words on it: 5 : 1 or better
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// ---- Lines, and the states they tell

class Refusal extends Error {}

function ensure(holds, words) {
  if (!holds) throw new Refusal(words);
}

const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const counts = (list, length) => Array.isArray(list) && (length === undefined || list.length === length) && list.every(isCount);
const lists = (value, fits) => Array.isArray(value ?? []) && (value ?? []).every(fits);

// A second tier of the cache: its blocks, used ones, those being loaded and stored; or nothing.
const tierOf = (line) => (Array.isArray(line.tier) && [0, 4].includes(line.tier.length) ? line.tier : "tier" in line ? [NaN] : []);

function checkLine(line) {
  ensure(line !== null && typeof line === "object" && typeof line.t === "number" && isFinite(line.t), "no line of a recording");
  const named = (one) => Array.isArray(one) && counts([one[0], one[2], one[3]]) && typeof one[1] === "string" && typeof (one[4] ?? "") !== "object";
  const blocks = (one) => Array.isArray(one) && isCount(one[0]) && counts(one.at(-1));
  const waiting = line.waiting ?? [0, []];
  const fits =
    lists(line.named, named) && lists(line.gone, isCount) && lists(line.preempted, isCount) &&
    lists(line.admitted, (one) => blocks(one) && counts(one.slice(0, 3), 3)) && lists(line.blocks, blocks) &&
    lists(line.batch, (one) => isCount(one) || counts(one, 4)) && lists(line.removed, isCount) && lists(line.stored, isCount) &&
    lists(line.ended, (one) => Array.isArray(one) && isCount(one[0]) && typeof one[1] === "string") &&
    Array.isArray(waiting) && isCount(waiting[0]) && counts(waiting[1]) && tierOf(line).every(isCount) &&
    lists(line.slots, (one) => Array.isArray(one) && typeof one[0] === "string" && typeof one[1] === "boolean");
  ensure(fits, "a field has another form than it should");
  if (!("key" in line)) return ensure(isCount(line.step), "the step has no number");
  const sizes = [line.key, line.num_blocks, line.block_size, line.max_num_seqs, line.max_num_batched_tokens];
  ensure(isCount(line.max_loras ?? 0) && counts(sizes) && line.num_blocks >= 2 && line.num_blocks <= MOST_BLOCKS && line.block_size > 0, "no sizes of a pool");
  const state = (one) => named(one) && counts(one.slice(4, 7), 3) && typeof one[7] === "boolean" && counts(one[8]);
  ensure(Array.isArray(line.requests) && line.requests.every(state) && counts(line.cached), "no state of a pool");
}

class State {
  constructor(key) {
    this.step = key.key;
    this.t = key.t;
    this.numBlocks = key.num_blocks;
    this.blockSize = key.block_size;
    this.maxSeqs = key.max_num_seqs;
    this.budget = key.max_num_batched_tokens;
    this.maxLoras = key.max_loras ?? 0;
    this.cached = new Set(this.inPool(key.cached));
    this.waiting = key.waiting;
    this.tier = tierOf(key);
    this.slots = key.slots ?? []; // [adapter's name or "", pinned]; none in recordings that did not tell them
    this.requests = new Map();
    this.refs = new Map(); // block -> how many requests hold it
    for (const [number, id, prompt, max, tokens, computed, preemptions, running, blocks, adapter = ""] of key.requests) {
      const request = { number, id, prompt, max, tokens, computed, preemptions, running, blocks: [], adapter };
      this.requests.set(number, request);
      this.hold(request, blocks);
    }
  }

  get usage() {
    return this.refs.size / (this.numBlocks - 1);
  }

  hold(request, blocks) {
    request.blocks.push(...this.inPool(blocks));
    for (const block of blocks) this.refs.set(block, (this.refs.get(block) ?? 0) + 1);
  }

  release(request) {
    for (const block of request?.blocks ?? []) {
      const left = this.refs.get(block) - 1;
      if (left) this.refs.set(block, left);
      else this.refs.delete(block);
    }
    if (request) request.blocks = [];
  }

  end(number) {
    this.release(this.requests.get(number));
    this.requests.delete(number);
  }

  // Moves on by one line; returns what happened, for drawing.
  apply(line) {
    const happened = { fresh: new Set(), hits: new Set(), batch: [], preempted: line.preempted ?? [], ended: line.ended ?? [] };
    this.step = line.step;
    this.t = line.t;
    for (const [number, id, prompt, max, adapter = ""] of line.named ?? [])
      this.requests.set(number, { number, id, prompt, max, tokens: prompt, computed: 0, preemptions: 0, running: false, blocks: [], adapter });
    for (const number of line.gone ?? []) this.end(number);
    for (const number of happened.preempted) {
      const request = this.known(number);
      this.release(request);
      Object.assign(request, { running: false, computed: 0, preemptions: request.preemptions + 1 });
    }
    for (const [number, tokens, computed, blocks] of line.admitted ?? []) {
      const request = Object.assign(this.known(number), { running: true, tokens, computed });
      this.release(request);
      this.hold(request, blocks);
      const hits = Math.floor(computed / this.blockSize);
      blocks.forEach((block, index) => happened[index < hits ? "hits" : "fresh"].add(block));
    }
    for (const [number, blocks] of line.blocks ?? []) {
      this.hold(this.known(number), blocks);
      for (const block of blocks) happened.fresh.add(block);
    }
    for (const one of line.batch ?? []) happened.batch.push(this.compute(...(typeof one === "number" ? [one, 1, 0, 1] : one)));
    happened.evicted = new Set((line.removed ?? []).filter((block) => this.cached.delete(block)));
    for (const block of this.inPool(line.stored ?? [])) this.cached.add(block);
    for (const [number] of happened.ended) this.end(number);
    if (line.waiting) this.waiting = line.waiting;
    if (line.tier) this.tier = line.tier;
    if (line.slots) {
      const before = this.slots;
      this.slots = line.slots;
      happened.filled = new Map(this.slots.flatMap(([name], slot) => (name && name !== before[slot]?.[0] ? [[slot, before[slot]?.[0]]] : [])));
    }
    happened.usage = this.usage;
    return happened;
  }

  compute(number, tokens, drafts, fresh) {
    const request = this.known(number);
    const start = request.computed;
    const kind = start < request.prompt || request.tokens - start > 1 ? "prefill" : "decode";
    const accepted = drafts && fresh ? fresh - 1 : 0;
    request.computed += tokens - (drafts && fresh ? drafts - accepted : 0);
    request.tokens += fresh;
    return { number, id: request.id, kind, start, tokens, drafts, accepted, fresh };
  }

  known(number) {
    const request = this.requests.get(number);
    ensure(request, `step ${this.step} names request ${number}, of which nothing was said`);
    return request;
  }

  inPool(blocks) {
    for (const block of blocks) ensure(block > 0 && block < this.numBlocks, `block ${block} of a pool of ${this.numBlocks}`);
    return blocks;
  }

  // Block -> the requests that hold it.
  holders() {
    const found = new Map();
    for (const { number, blocks } of this.requests.values())
      for (const block of blocks) found.has(block) ? found.get(block).push(number) : found.set(block, [number]);
    return found;
  }

  // The same as plain data, for tests.
  plain() {
    const requests = [...this.requests.values()].sort((a, b) => a.number - b.number).map((one) => ({ ...one, blocks: [...one.blocks] }));
    return { step: this.step, cached: [...this.cached].sort((a, b) => a - b), waiting: this.waiting, requests, ...(this.tier.length ? { tier: this.tier } : {}), ...(this.slots.length ? { slots: this.slots } : {}) };
  }
}

// The frames of a run, and the state at any of them. A frame is a line, and what happened in it; a key may belong to it.
export class Replay {
  constructor(kept = Infinity) {
    this.kept = kept;
    this.header = null;
    this.frames = [];
    this.head = null;
    this.at = { index: -1, state: null };
    this.adapters = new Map(); // name -> its number, in the order in which they were first mentioned
  }

  take(text) {
    const line = JSON.parse(text);
    if (!this.header) {
      ensure(line?.xray === FORMAT && typeof (line.model ?? "") === "string", `no recording of format ${FORMAT}`);
      this.header = { xray: FORMAT, model: line.model ?? "" };
      if (line.cores !== undefined) {
        ensure(counts([line.core ?? 0, line.cores]) && line.cores <= MOST_CORES, "no number of a core");
        Object.assign(this.header, { core: line.core ?? 0, cores: line.cores });
      }
      return;
    }
    checkLine(line);
    for (const name of [...(line.slots ?? []).map(([name]) => name), ...(line.named ?? []).map((one) => one[4]), ...(line.requests ?? []).map((one) => one[9])])
      if (name && !this.adapters.has(name)) this.adapters.set(name, this.adapters.size + 1);
    if ("key" in line) return this.takeKey(line);
    ensure(this.head, "the first step comes before any state");
    this.frames.push({ line, ...this.head.apply(line), step: line.step, t: line.t });
    if (this.frames.length > this.kept) this.forget();
  }

  takeKey(key) {
    this.head = new State(key);
    const last = this.frames.at(-1);
    if (last?.step === key.key && last.line) last.key = key;
    else this.frames.push({ key, step: key.key, t: key.t, batch: [], preempted: [], ended: [], fresh: new Set(), hits: new Set(), evicted: new Set(), usage: this.head.usage });
  }

  // The oldest frames go, up to the next key from which all later ones can be told.
  forget() {
    const key = this.frames.findIndex((frame, index) => index > 0 && frame.key);
    if (key < 0 || this.frames.length - key < this.kept) return;
    this.frames.splice(0, key);
    this.at = this.at.index >= key ? { index: this.at.index - key, state: this.at.state } : { index: -1, state: null };
    this.forgotten = (this.forgotten ?? 0) + key;
  }

  state(index) {
    if (index === this.frames.length - 1) return this.head;
    let { index: from, state } = this.at;
    let key = index;
    while (!this.frames[key].key) key -= 1;
    if (!state || from > index || from < key) {
      state = new State(this.frames[key].key);
      from = key;
    }
    for (from += 1; from <= index; from += 1) state.apply(this.frames[from].line);
    this.at = { index, state };
    return state;
  }

  text() {
    const lines = [this.header];
    this.frames.forEach(({ line, key }, index) => {
      if (line && (index > 0 || !key)) lines.push(line);
      if (key) lines.push(key);
    });
    return lines.map((line) => JSON.stringify(line) + "\n").join("");
  }

  static read(text) {
    ensure(text.length <= MOST_BYTES, `more than ${MOST_BYTES / 2 ** 20} MiB`);
    const lines = text.split("\n").slice(0, -1); // an unfinished last line is left out
    ensure(lines.length <= MOST_LINES, `more than ${MOST_LINES} lines`);
    const replay = new Replay();
    lines.forEach((line, index) => {
      try {
        replay.take(line);
      } catch (error) {
        throw new Refusal(`line ${index + 1}: ${error instanceof Refusal ? error.message : "it is no JSON"}`);
      }
    });
    ensure(replay.frames.length, "there is no step in it");
    return replay;
  }
}

// ---- The view

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

class View {
  constructor(element, { live }) {
    this.live = live;
    this.replay = live;
    this.position = 0;
    this.playing = true;
    this.selected = null;
    this.cursor = null;
    this.drawn = 0;
    this.build(element);
    this.forgetTheme = watchTheme(this.root, "xr-dark", () => {
      this.colours = null;
      this.dirty();
    });
    this.resized = new ResizeObserver(() => this.dirty());
    this.resized.observe(this.root);
    this.dirty();
  }

  build(element) {
    const button = (words, act, extra = {}) => make("button", { type: "button", onclick: act, ...extra }, words);
    this.model = make("small");
    this.status = make("span", { class: "xr-state" });
    this.says = make("p", { class: "xr-alarm", role: "status" });
    this.file = make("input", { type: "file", accept: ".jsonl,.json,.txt", hidden: true, "aria-label": "A recording", onchange: () => this.open(this.file.files[0]) });
    this.back = button("Back to live", () => this.show(this.live), { hidden: true });
    this.core = make("select", { "aria-label": "Core", hidden: true, onchange: () => this.choose(Number(this.core.value)) });
    const bar = make("div", { class: "xr-bar" }, this.core, this.back, button("Save", () => this.save(), { title: "Save these steps as a recording" }), button("Load", () => this.file.click(), { title: "Show a recording" }), this.file);
    this.play = button("", () => this.toggle(), { class: "xr-play", title: "Space" });
    this.speed = make("select", { "aria-label": "Steps a second" }, ...[2, 5, 10, 30].map((n) => make("option", { value: n, selected: n === 10 }, `${n}/s`)));
    this.range = make("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Step", oninput: () => this.go(Number(this.range.value)) });
    this.where = make("output");
    const steps = make("div", { class: "xr-steps" }, this.play, button("◀", () => this.go(this.position - 1), { "aria-label": "Step back", title: "Left arrow" }),
      button("▶", () => this.go(this.position + 1), { "aria-label": "Step forward", title: "Right arrow" }), this.speed, this.range, this.where);
    this.numbers = {};
    const number = (name, words) => make("div", {}, make("dt", {}, words), (this.numbers[name] = make("dd")));
    const numbers = make("dl", { class: "xr-numbers" }, number("tokens", "tokens in step"), number("running", "running"), number("waiting", "waiting"),
      number("held", "blocks held"), number("cached", "cached and free"), number("free", "free"), number("host", "in host memory"));

    const canvas = (name, label, extra = {}) => (this[name] = make("canvas", { role: "img", "aria-label": label, ...extra }));
    const card = (title, legend, ...parts) => make("section", { class: "xr-card", "aria-label": title }, make("header", {}, make("h3", {}, title), legend ?? ""), ...parts);
    const batch = card("Batch of this step", this.legend([["prefill", "P prefill"], ["decode", "D decode"], ["draft", "drafts ✓ accepted, ✕ rejected"], ["preempted", "↩ preempted"]]), canvas("strip", "", { class: "xr-pick" }));
    this.slotBox = make("div", { class: "xr-chips xr-slots" });
    this.slotCard = card("Adapter slots", this.legend([["fresh", "filled in this step"]]), this.slotBox);
    const past = card("Steps so far", this.legend([["prefill", "prefill tokens"], ["decode", "decode tokens"], ["draft", "drafts"], ["usage", "blocks held"], ["mark", "preemption"]]), canvas("history", "", { class: "xr-pick" }));
    const pool = card("KV-cache blocks", this.legend([["held", "held, by request"], ["shared", "shared"], ["filling", "being filled"], ["cached", "cached and free"], ["free", "free"], ["fresh", "taken in this step"], ["hit", "found in the cache"]]),
      canvas("pool", "", { class: "xr-pick", tabindex: 0, role: "application" }));
    this.chips = { running: make("div", { class: "xr-chips" }), waiting: make("div", { class: "xr-chips" }) };
    this.headings = { running: make("h4"), waiting: make("h4") };
    const queues = card("Queues", null, this.headings.running, this.chips.running, this.headings.waiting, this.chips.waiting);
    this.detail = make("div", { class: "xr-detail" });
    canvas("timeline", "Timeline of the request");
    this.timelineBox = make("div", {}, make("h4", {}, "Its steps, by tokens computed"), this.timeline);
    const request = card("Request", null, this.detail, this.timelineBox);
    this.tip = make("div", { class: "xr-tip", hidden: true });
    this.spoken = make("p", { class: "xr-spoken", "aria-live": "polite" });
    this.root = make("div", { class: "xr", "data-lm-suppress-shortcuts": "true" },
      make("div", { class: "xr-top" }, make("h2", {}, "X-ray", this.model), this.status, bar), this.says, steps, numbers, batch, this.slotCard, past,
      make("div", { class: "xr-columns" }, make("div", {}, pool, request), queues), this.tip, this.spoken);
    element.replaceChildren(this.root);
    this.listen();
  }

  legend(entries) {
    this.samples ??= [];
    return make("ul", { class: "xr-legend" }, ...entries.map(([kind, words]) => {
      const canvas = make("canvas", { "aria-hidden": "true" });
      this.samples.push([canvas, kind]);
      return make("li", {}, canvas, words);
    }));
  }

  listen() {
    const keys = { " ": () => this.toggle(), ArrowLeft: () => this.go(this.position - 1), ArrowRight: () => this.go(this.position + 1),
      Home: () => this.go(0), End: () => this.go(Infinity), Escape: () => this.select(null) };
    const heard = (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
      const tag = event.target.tagName;
      const typed = tag === "INPUT" || tag === "SELECT" || (tag === "BUTTON" && event.key === " ");
      if (typed && event.key !== "Escape") return;
      if (!keys[event.key]) return;
      event.preventDefault();
      event.stopPropagation();
      keys[event.key]();
    };
    this.pool.addEventListener("keydown", (event) => this.walk(event));
    this.root.addEventListener("keydown", heard);
    if (this.live) document.addEventListener("keydown", (event) => event.target === document.body && heard(event));
    for (const canvas of [this.strip, this.pool, this.history, this.timeline]) {
      canvas.addEventListener("pointermove", (event) => this.point(canvas, event));
      canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
      canvas.addEventListener("click", (event) => this.hit(canvas, event)?.act?.());
    }
    this.root.addEventListener("dragover", (event) => event.preventDefault());
    this.root.addEventListener("drop", (event) => {
      event.preventDefault();
      this.open(event.dataTransfer.files[0]);
    });
  }

  // -- where we are

  get frame() {
    return this.replay?.frames[this.position];
  }

  came() { // a line of the live run has come
    if (this.replay !== this.live) return;
    if (this.live.forgotten) {
      this.position = Math.max(0, this.position - this.live.forgotten);
      this.live.forgotten = 0;
    }
    const last = Math.max(0, this.live.frames.length - 1);
    this.position = this.playing ? last : Math.min(this.position, last);
    this.dirty();
  }

  show(replay) {
    this.replay = replay;
    this.playing = replay === this.live;
    this.position = this.playing ? Math.max(0, replay.frames.length - 1) : 0;
    this.selected = this.cursor = null;
    this.tell("");
    this.dirty();
  }

  // Of several cores the reader chooses one. `follow` asks for its steps when the steps of another are aborted.

  offerCores(header) {
    if (!header) return; // the next connection's is on its way
    const cores = header.cores ?? 1;
    this.core.hidden = cores < 2;
    if (this.core.length === cores) return;
    this.core.replaceChildren(...Array.from({ length: cores }, (_, core) => make("option", { value: core, selected: core === header.core }, `core ${core}`)));
  }

  choose(core) {
    this.shownCore = core;
    this.show(this.live);
    this.reading?.abort();
  }

  go(index) {
    const last = (this.replay?.frames.length ?? 0) - 1;
    if (last < 0) return;
    this.playing = false;
    this.position = Math.max(0, Math.min(last, index));
    this.dirty();
    this.speakSoon();
  }

  toggle() {
    this.playing = !this.playing;
    const last = (this.replay?.frames.length ?? 0) - 1;
    if (this.playing && this.replay === this.live) this.position = Math.max(0, last);
    if (this.playing && this.replay !== this.live && this.position >= last) this.position = 0;
    this.played = performance.now();
    this.dirty();
    this.speakSoon();
  }

  advance(now) {
    if (!this.playing || this.replay === this.live || !this.replay) return;
    const due = Math.floor(((now - (this.played ?? now)) / 1000) * Number(this.speed.value));
    if (due > 0) {
      this.played = now;
      this.position = Math.min(this.position + due, this.replay.frames.length - 1);
      if (this.position === this.replay.frames.length - 1) this.playing = false;
    }
    this.played ??= now;
    this.dirty();
  }

  select(number) {
    this.selected = number === this.selected ? null : number;
    this.dirty();
    this.speakSoon();
  }

  speakSoon() {
    clearTimeout(this.speaking);
    this.speaking = setTimeout(() => (this.spoken.textContent = this.summary()), 200);
  }

  summary() {
    const { frame } = this;
    if (!frame) return "";
    const kinds = ["prefill", "decode"].map((kind) => plural(frame.batch.filter((one) => one.kind === kind).length, kind));
    const chosen = this.selected === null ? "" : ` Request ${this.selected} is chosen.`;
    const filled = [...(frame.filled ?? [])].map(([slot, before]) => ` Slot ${slot} gets the adapter ${this.state?.slots[slot]?.[0]}${before ? ` in place of ${before}` : ""}.`);
    return `Step ${frame.step}: ${kinds.join(", ")}, ${frame.preempted.length} preempted.${filled.join("")}${chosen}`;
  }

  tell(words) {
    this.says.textContent = words;
  }

  async open(file) {
    if (!file) return;
    try {
      ensure(file.size <= MOST_BYTES, `more than ${MOST_BYTES / 2 ** 20} MiB`);
      this.show(Replay.read(await file.text()));
    } catch (error) {
      this.tell(`${file.name} is no recording that can be shown: ${error.message}.`);
    }
    this.file.value = "";
  }

  save() {
    if (!this.frame) return;
    const url = URL.createObjectURL(new Blob([this.replay.text()], { type: "application/jsonl" }));
    make("a", { href: url, download: "xray.jsonl" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  // -- drawing

  dirty() {
    this.pending ??= requestAnimationFrame((now) => {
      this.pending = null;
      this.advance(now);
      this.draw();
    });
  }

  draw() {
    if (!this.root.clientWidth) return;
    this.drawn += 1;
    this.readColours();
    const { replay, frame } = this;
    const { model, core, cores } = replay?.header ?? {};
    this.model.textContent = `${model ?? ""}${cores > 1 ? ` · core ${core} of ${cores}` : ""}`;
    this.offerCores(this.live?.header);
    const isLive = replay === this.live;
    this.status.textContent = isLive ? (this.connected ? (this.playing ? "● live" : "❚❚ paused") : "○ not connected") : "■ recording";
    this.status.classList.toggle("xr-on", isLive && this.playing && Boolean(this.connected));
    this.back.hidden = isLive || !this.live;
    this.speed.hidden = isLive;
    this.play.textContent = this.playing ? "❚❚ Pause" : isLive ? "● Live" : "▶ Play";
    const last = (replay?.frames.length ?? 0) - 1;
    this.range.max = Math.max(0, last);
    this.range.value = this.position;
    this.range.setAttribute("aria-valuetext", frame ? `step ${frame.step}` : "no step yet");
    this.where.textContent = frame ? `step ${frame.step.toLocaleString("en")} · ${frame.t.toFixed(2)} s` : "no step yet";
    this.hits = new Map();
    if (!frame) return;
    const state = replay.state(this.position);
    this.state = state;
    this.drawNumbers(state, frame);
    this.drawStrip(state, frame);
    this.drawSlots(state, frame);
    this.drawHistory();
    this.drawPool(state, frame);
    this.drawQueues(state);
    this.drawDetail(state, frame);
  }

  readColours() {
    if (this.colours) return;
    const style = getComputedStyle(this.root);
    this.colours = Object.fromEntries(["ink", "quiet", "card", "rule", "pale", "dot", "accent", "alarm"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    for (const [canvas, kind] of this.samples) this.drawSample(canvas, kind);
  }

  brush(canvas, width, height) {
    const scale = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
    if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
    canvas.style.height = `${height}px`;
    const brush = canvas.getContext("2d");
    brush.setTransform(scale, 0, 0, scale, 0, 0);
    brush.clearRect(0, 0, width, height);
    brush.textBaseline = "middle";
    brush.textAlign = "center";
    return brush;
  }

  widthOf(canvas) {
    return canvas.parentElement.clientWidth - parseFloat(getComputedStyle(canvas.parentElement).paddingLeft) * 2;
  }

  drawSample(canvas, kind) {
    const brush = this.brush(canvas, 16, 16);
    canvas.style.width = "16px";
    const { ink, alarm } = this.colours;
    if (kind === "usage" || kind === "mark") {
      brush.strokeStyle = ink;
      brush.fillStyle = alarm;
      if (kind === "mark") return triangle(brush, 8, 3, 5);
      brush.lineWidth = 1.5;
      brush.beginPath();
      brush.moveTo(1, 8);
      brush.lineTo(15, 8);
      return brush.stroke();
    }
    if (kind === "prefill" || kind === "decode" || kind === "draft") return this.bar(brush, kind, 1, 1, 14, 14);
    if (kind === "preempted") {
      brush.setLineDash([3, 2]);
      brush.strokeStyle = ink;
      return brush.strokeRect(1.5, 1.5, 13, 13);
    }
    const looks = { held: { holders: [1] }, shared: { holders: [1, 2] }, filling: { holders: [1], filled: 0.5 }, cached: { holders: [], cached: true }, free: { holders: [] }, fresh: { holders: [1], fresh: true }, hit: { holders: [1], hit: true } };
    return this.cell(brush, 1, 1, 14, looks[kind]);
  }

  bar(brush, kind, x, y, width, height) {
    if (height <= 0) return;
    brush.fillStyle = { prefill: PREFILL, decode: DECODE, draft: DRAFT }[kind];
    brush.fillRect(x, y, width, height);
    if (kind === "prefill" && width > 2) hatch(brush, x, y, width, height, "#ffffffaa", 5);
    if (kind === "draft") {
      brush.fillStyle = "#111111";
      for (let dot = y + 2; dot < y + height - 1; dot += 4) brush.fillRect(x + width / 2 - 0.75, dot, 1.5, 1.5);
    }
  }

  drawNumbers(state, frame) {
    const holders = state.holders();
    this.holders = holders;
    let idle = 0;
    for (const block of state.cached) idle += !holders.has(block);
    const usable = state.numBlocks - 1;
    const tokens = frame.batch.reduce((sum, one) => sum + one.tokens, 0);
    let running = 0;
    const adapters = new Set();
    for (const one of state.requests.values()) {
      running += one.running;
      if (one.running && one.adapter) adapters.add(one.adapter);
    }
    const set = (name, value, rest) => this.numbers[name].replaceChildren(value.toLocaleString("en"), make("small", {}, ` ${rest}`));
    set("tokens", tokens, `of ${state.budget.toLocaleString("en")}`);
    const inSlots = state.maxLoras ? `, ${adapters.size} of ${plural(state.maxLoras, "adapter")}` : "";
    set("running", running, `of ${state.maxSeqs.toLocaleString("en")}${inSlots}`);
    set("waiting", state.waiting[0], "");
    set("held", holders.size, `${Math.round((100 * holders.size) / usable)} %`);
    set("cached", idle, `${Math.round((100 * idle) / usable)} %`);
    const [blocks, used, loading, storing] = state.tier;
    this.numbers.host.parentElement.hidden = blocks === undefined;
    if (blocks !== undefined) set("host", used, `of ${blocks.toLocaleString("en")}${loading ? `, ${loading} loading` : ""}${storing ? `, ${storing} storing` : ""}`);
    set("free", usable - holders.size - idle, `${Math.round((100 * (usable - holders.size - idle)) / usable)} %`);
  }

  // The batch: a box for each request in scheduling order, the wider the more tokens.
  drawStrip(state, frame) {
    const [width, height, gap] = [this.widthOf(this.strip), 54, 2];
    const brush = this.brush(this.strip, width, height);
    const { ink, quiet } = this.colours;
    const boxes = [...frame.batch.map((one) => ({ ...one, weight: 2 + Math.sqrt(one.tokens) })), ...frame.preempted.map((number) => ({ number, kind: "preempted", weight: 3 }))];
    const label = boxes.length ? plural(frame.batch.length, "request") : frame.line ? "nothing was computed" : "the state when watching began";
    this.strip.setAttribute("aria-label", `Batch: ${label}. ${boxes.slice(0, 12).map((one) => this.wordsOf(one)).join("; ")}`);
    if (!boxes.length) {
      brush.fillStyle = quiet;
      brush.font = "13px system-ui, sans-serif";
      brush.textAlign = "left";
      return brush.fillText(label, 2, height / 2);
    }
    const total = boxes.reduce((sum, one) => sum + one.weight, 0);
    const unit = Math.min(16, (width - gap * boxes.length) / total);
    let x = 0;
    const areas = [];
    for (const one of boxes) {
      const wide = one.weight * unit;
      this.drawBox(brush, one, x, wide, height, ink);
      areas.push({ x, wide, words: this.wordsOf(one), act: () => this.select(one.number) });
      x += wide + gap;
    }
    this.hits.set(this.strip, (px) => areas.find((area) => px >= area.x && px < area.x + area.wide + gap));
  }

  drawBox(brush, one, x, wide, height, ink) {
    const dim = this.selected !== null && this.selected !== one.number;
    const colour = hue(one.number);
    brush.globalAlpha = dim ? 0.25 : 1;
    if (one.kind === "preempted") {
      brush.setLineDash([4, 3]);
      brush.strokeStyle = ink;
      brush.strokeRect(x + 1, 1, wide - 2, height - 2);
      brush.setLineDash([]);
      words(brush, [`#${one.number}`, "↩"], x + wide / 2, height / 2, wide, ink);
    } else {
      brush.fillStyle = colour;
      round(brush, x, 0, wide, height, 4);
      if (one.kind === "prefill" && wide > 3) hatch(brush, x, height - 12, wide, 12, on(colour) + "77", 5);
      if (one.drafts) this.drawDrafts(brush, one, x, wide, height, colour);
      const second = one.kind === "prefill" ? `P ${one.tokens}` : one.drafts ? `D+${one.drafts}` : "D";
      if (!dim) words(brush, [wide < 34 ? `${one.number}` : `#${one.number}`, second], x + wide / 2, height / 2 - 6, wide, on(colour));
    }
    brush.globalAlpha = 1;
  }

  drawDrafts(brush, one, x, wide, height, colour) {
    const each = Math.min(12, (wide - 2) / one.drafts);
    brush.font = "9px system-ui, sans-serif";
    for (let index = 0; index < one.drafts; index += 1) {
      const [left, taken] = [x + 1 + index * each, index < one.accepted];
      brush.fillStyle = taken ? "#ffffff" : "#111111";
      brush.fillRect(left, height - 12, each - 1, 11);
      brush.fillStyle = taken ? "#111111" : "#ffffff";
      if (each > 7) brush.fillText(taken ? "✓" : "✕", left + (each - 1) / 2, height - 6);
    }
    brush.fillStyle = colour;
  }

  wordsOf(one) {
    if (one.kind === "preempted") return `Request ${one.number}: preempted, its blocks are free again`;
    const end = one.start + one.tokens;
    if (one.kind === "prefill") return `Request ${one.number}: prefill, tokens ${one.start} to ${end - 1}${one.fresh ? ", and its first new token" : ""}`;
    const drafts = one.drafts ? `, ${one.accepted} of ${plural(one.drafts, "draft")} accepted` : "";
    return `Request ${one.number}: decode at position ${one.start}${drafts}`;
  }

  // The slots of adapters: a chip for each, which chooses the requests that use what lies in it, one after the other.
  drawSlots(state, frame) {
    this.slotCard.hidden = !state.slots.length;
    const users = new Map();
    for (const { number, running, adapter } of state.requests.values())
      if (running && adapter) users.set(adapter, [...(users.get(adapter) ?? []), number]);
    const slots = state.slots.slice(0, SLOTS).map(([name, pinned], slot) => ({ slot, name, pinned, users: users.get(name) ?? [], filled: frame.filled?.has(slot) ?? false, before: frame.filled?.get(slot) ?? "" }));
    rebuild(this.slotBox, JSON.stringify([slots, state.slots.length]), () => [
      ...slots.map((one) => {
        const said = !one.name ? "free" : [one.users.length ? `${one.users.length} running` : "not in use", ...(one.pinned ? ["pinned"] : []), ...(one.before ? [`in place of ${one.before}`] : [])].join(", ");
        const act = () => this.select(one.users[(one.users.indexOf(this.selected) + 1) % one.users.length] ?? null);
        return make("button", { type: "button", class: `xr-chip${one.filled ? " xr-filled" : ""}`, "data-kept": one.slot, onclick: act, title: wordsOfSlot(one), "aria-label": wordsOfSlot(one) },
          make("small", {}, String(one.slot)), ...(one.name ? [this.badge(one.name)] : []), make("span", {}, said));
      }),
      ...(state.slots.length > SLOTS ? [make("span", { class: "xr-more" }, `and ${state.slots.length - SLOTS} more`)] : []),
    ]);
  }

  // An adapter's name with its colour: a square, since requests have round ones.
  badge(name) {
    const square = make("i");
    square.style.background = hue(this.replay.adapters.get(name));
    return make("em", { class: "xr-adapter" }, square, name);
  }

  // All steps that are kept, as bars; the window moves so that the shown one is in it.
  windowOf(width) {
    const { frames } = this.replay;
    const each = Math.max(3, Math.min(10, width / frames.length));
    const room = Math.floor(width / each);
    const first = Math.max(0, Math.min(frames.length - room, this.position - Math.floor(room * 0.75)));
    return { each, first, last: Math.min(frames.length, first + room) };
  }

  drawHistory() {
    const [width, height] = [this.widthOf(this.history), 64];
    const brush = this.brush(this.history, width, height);
    const { frames } = this.replay;
    const { each, first, last } = this.windowOf(width);
    const { ink, alarm, pale } = this.colours;
    const sums = [];
    for (let index = first; index < last; index += 1) sums.push(sumsOf(frames[index]));
    const most = Math.max(1, ...sums.map((one) => one.total));
    sums.forEach((one, place) => {
      const x = place * each;
      if (first + place === this.position) {
        brush.fillStyle = pale;
        brush.fillRect(x - 1, 0, Math.max(each, 4) + 1, height);
      }
      const tall = one.total ? Math.max(2, Math.sqrt(one.total / most) * (height - 12)) : 0;
      let y = height;
      for (const kind of ["decode", "draft", "prefill"]) {
        const part = one.total ? (tall * one[kind]) / one.total : 0;
        y -= part;
        this.bar(brush, kind, x, y, each - (each > 4 ? 1 : 0.5), part);
      }
      if (frames[first + place].preempted.length) {
        brush.fillStyle = alarm;
        triangle(brush, x + each / 2, 1, 4);
      }
    });
    brush.strokeStyle = ink;
    brush.lineWidth = 1.5;
    brush.beginPath();
    sums.forEach((_, place) => {
      brush.lineTo((place + 0.5) * each, height - 2 - frames[first + place].usage * (height - 12));
    });
    brush.stroke();
    const x = (this.position - first + 0.5) * each;
    brush.fillStyle = ink;
    brush.fillRect(x - 1, 0, 2, height);
    this.history.setAttribute("aria-label", `Steps ${frames[first].step} to ${frames[last - 1].step}; the step shown is ${this.frame.step}`);
    this.hits.set(this.history, (px) => {
      const index = Math.min(last - 1, first + Math.floor(px / each));
      const one = sums[index - first];
      const held = `\n${Math.round(100 * frames[index].usage)} % of the blocks held`;
      const preempted = frames[index].preempted.length ? `\n${frames[index].preempted.length} preempted` : "";
      return { words: `Step ${frames[index].step}: ${one.prefill} prefill, ${one.decode} decode, ${one.draft} draft tokens${held}${preempted}`, act: () => this.go(index) };
    });
  }

  drawPool(state, frame) {
    const width = this.widthOf(this.pool);
    const shown = Math.min(state.numBlocks, CELLS);
    const fitting = Math.max(4, Math.min(shown > 100 ? 30 : 44, Math.floor(Math.sqrt((width * 470) / shown))));
    const columns = Math.max(1, Math.floor(width / fitting));
    const size = Math.floor(width / columns);
    const brush = this.brush(this.pool, width, Math.ceil(shown / columns) * size + (shown < state.numBlocks ? 18 : 0));
    const chosen = this.selected === null ? null : state.requests.get(this.selected);
    const place = new Map(chosen?.blocks.map((block, index) => [block, index]));
    const filled = fillsOf(state);
    for (let block = 0; block < shown; block += 1) {
      const holders = this.holders.get(block) ?? [];
      const x = (block % columns) * size, y = Math.floor(block / columns) * size;
      this.cell(brush, x + 0.5, y + 0.5, size - 1.5, {
        block, holders, filled: filled.get(block), cached: state.cached.has(block), fresh: frame.fresh.has(block), evicted: frame.evicted.has(block), hit: frame.hits.has(block),
        index: place.get(block), dim: chosen && !place.has(block), here: block === this.cursor,
      });
    }
    if (shown < state.numBlocks) {
      brush.fillStyle = this.colours.quiet;
      brush.textAlign = "left";
      brush.font = "12px system-ui, sans-serif";
      brush.fillText(`the first ${shown.toLocaleString("en")} of ${state.numBlocks.toLocaleString("en")} blocks`, 0, Math.ceil(shown / columns) * size + 10);
    }
    this.columns = columns;
    this.pool.setAttribute("aria-label", `${this.holders.size} of ${state.numBlocks - 1} blocks are held. The arrow keys walk the blocks, Enter chooses a block's request.`);
    this.hits.set(this.pool, (px, py) => {
      const block = Math.floor(py / size) * columns + Math.floor(px / size);
      if (px >= columns * size || block >= shown) return null;
      return { words: this.wordsOfBlock(block), act: () => this.selectHolder(block) };
    });
  }

  cell(brush, x, y, size, { block, holders, filled = 1, cached, fresh, evicted, hit, index, dim, here }) {
    const { ink, rule, pale, dot, accent } = this.colours;
    const number = index !== undefined && holders.includes(this.selected) ? this.selected : holders[0];
    brush.globalAlpha = dim ? 0.22 : 1;
    if (block === 0) {
      brush.fillStyle = pale;
      brush.fillRect(x, y, size, size);
      if (size > 12) words(brush, ["∅"], x + size / 2, y + size / 2, size, dot);
    } else if (holders.length) {
      const colour = hue(number);
      brush.fillStyle = colour;
      brush.globalAlpha *= filled < 1 ? 0.3 : 1;
      brush.fillRect(x, y, size, size);
      brush.globalAlpha = dim ? 0.22 : 1;
      if (filled < 1) brush.fillRect(x, y + size * (1 - filled), size, size * filled);
      if (holders.length > 1) hatch(brush, x, y, size, size, `${on(colour)}66`, Math.max(4, size / 4));
      const said = index !== undefined ? String(index) : String(number);
      if (block !== undefined && size >= 14 && !dim) label(brush, said, x, y, size, filled < 0.6 ? ink : on(colour), holders.length > 1 && colour);
    } else {
      brush.fillStyle = cached ? pale : "transparent";
      if (cached) brush.fillRect(x, y, size, size);
      brush.lineWidth = 1;
      brush.strokeStyle = rule;
      if (size > 5) brush.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      if (cached) {
        brush.fillStyle = dot;
        brush.beginPath();
        brush.arc(x + size / 2, y + size / 2, Math.max(1, size * 0.13), 0, 7);
        brush.fill();
      }
    }
    if (fresh || hit) {
      brush.lineWidth = size > 8 ? 2 : 1;
      brush.strokeStyle = ink;
      if (hit) brush.setLineDash([3, 2]);
      brush.strokeRect(x + 1, y + 1, size - 2, size - 2);
      brush.setLineDash([]);
    }
    if (evicted && size > 9) words(brush, ["×"], x + size - 4, y + 5, 12, holders.length ? on(hue(number)) : ink);
    brush.globalAlpha = 1;
    if (here) {
      brush.lineWidth = 3;
      brush.strokeStyle = accent;
      brush.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    }
  }

  wordsOfBlock(block) {
    if (block === 0) return "Block 0: the null block, which nobody gets";
    const holders = this.holders.get(block) ?? [];
    const cached = this.state.cached.has(block);
    if (!holders.length) return `Block ${block}: ${cached ? "cached and free: the next request with this prefix finds it" : "free"}`;
    const lines = holders.map((number) => {
      const { blocks, computed } = this.state.requests.get(number);
      const index = blocks.indexOf(block);
      const filled = Math.max(0, Math.min(this.state.blockSize, computed - index * this.state.blockSize));
      return `request ${number}, place ${index} of its table, ${filled} of ${this.state.blockSize} slots computed`;
    });
    const marks = `${holders.length > 1 ? `shared by ${holders.length}` : "held"}${cached ? ", findable by its hash" : ""}`;
    const fresh = this.frame.fresh.has(block) ? (this.frame.evicted.has(block) ? "\ntaken in this step; what it cached is gone" : "\ntaken in this step") : "";
    return `Block ${block}: ${marks}\n${lines.slice(0, 6).join("\n")}${lines.length > 6 ? "\n…" : ""}${fresh}`;
  }

  selectHolder(block) {
    this.cursor = block;
    const holders = this.holders.get(block) ?? [];
    const next = holders[(holders.indexOf(this.selected) + 1) % Math.max(1, holders.length)];
    this.selected = holders.length ? next : null;
    this.dirty();
    this.speakSoon();
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns, Enter: 0 }[event.key];
    if (step === undefined || !this.state) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Enter") return this.cursor !== null && this.selectHolder(this.cursor);
    this.cursor = Math.max(0, Math.min(Math.min(this.state.numBlocks, CELLS) - 1, (this.cursor ?? 0) + step));
    this.spoken.textContent = this.wordsOfBlock(this.cursor);
    this.dirty();
  }

  drawQueues(state) {
    const running = [...state.requests.values()].filter((one) => one.running);
    const waiting = state.waiting[1].map((number) => state.requests.get(number)).filter(Boolean);
    this.headings.running.textContent = `Running (${running.length}), in order of admission, with the tokens generated`;
    this.headings.waiting.textContent = `Waiting (${state.waiting[0].toLocaleString("en")}), next first, with the tokens of the prompt`;
    const progress = (one) => (one.computed < one.prompt ? `${one.computed}/${one.prompt} prompt` : `+${one.tokens - one.prompt}${one.max ? `/${one.max}` : ""}`);
    this.fill(this.chips.running, running, progress, running.length);
    this.fill(this.chips.waiting, waiting, (one) => `${one.preemptions ? "↩ " : ""}${one.prompt}`, state.waiting[0]);
  }

  fill(box, requests, words, total) {
    const shown = requests.slice(0, CHIPS);
    rebuild(box, `${shown.map((one) => one.number).join()} ${total}`, () => {
      const chips = shown.map((one) => {
        const dot = make("i");
        dot.style.background = hue(one.number);
        return make("button", { type: "button", class: "xr-chip", "data-number": one.number, "data-kept": one.number, onclick: () => this.select(one.number) },
          dot, ...(one.adapter ? [this.badge(one.adapter)] : []), make("span"));
      });
      const more = total > shown.length ? [make("span", { class: "xr-more" }, `and ${(total - shown.length).toLocaleString("en")} more`)] : [];
      const none = total ? [] : [make("span", { class: "xr-more" }, "nobody")];
      return [...chips, ...more, ...none];
    });
    shown.forEach((one, index) => {
      const chip = box.children[index];
      const said = `#${one.number} ${words(one)}`;
      if (chip.lastChild.textContent !== said) chip.lastChild.textContent = said;
      const pressed = String(one.number === this.selected);
      if (chip.getAttribute("aria-pressed") !== pressed) chip.setAttribute("aria-pressed", pressed);
      if (chip.title !== one.id) chip.title = one.id;
    });
  }

  drawDetail(state, frame) {
    this.timelineBox.hidden = this.selected === null;
    if (this.selected === null) {
      if (this.detail.dataset.key !== "none") {
        this.detail.dataset.key = "none";
        this.detail.replaceChildren(make("p", { class: "xr-quiet" }, "Click a block, a box of the batch or a request: here are its block table and its steps. Space pauses, the arrow keys step."));
      }
      return;
    }
    const request = state.requests.get(this.selected);
    const key = JSON.stringify([this.selected, this.position, this.replay === this.live, frame.step, request?.computed]);
    if (this.detail.dataset.key !== key) {
      this.detail.dataset.key = key;
      this.detail.replaceChildren(...this.detailOf(state, request));
    }
    this.drawTimeline(request);
  }

  detailOf(state, request) {
    const close = make("button", { type: "button", onclick: () => this.select(null), title: "Escape" }, "Close");
    if (!request) return [make("p", { class: "xr-quiet" }, `Request ${this.selected} is not there at this step: it has ended, or has not come yet. `), close];
    const slots = request.adapter ? state.slots.flatMap(([name], slot) => (name === request.adapter ? [slot] : [])) : [];
    const facts = [
      ["request", `#${request.number}`], ["id", request.id], ["status", request.running ? "running" : request.preemptions ? "waits after a preemption" : "waits"],
      ["prompt", plural(request.prompt, "token")], ["generated", `${request.tokens - request.prompt}${request.max ? ` of at most ${request.max}` : ""}`],
      ["computed", `${request.computed} of ${request.tokens} tokens`], ["preemptions", String(request.preemptions)],
      ...(request.adapter ? [["adapter", `${request.adapter}, in ${slots.length ? `slot ${slots.join(" and ")}` : "no slot"}`]] : []),
    ];
    const table = make("ol", { class: "xr-table", tabindex: 0, "aria-label": "Block table" }, ...request.blocks.slice(0, 256).map((block, index) => {
      const filled = Math.max(0, Math.min(state.blockSize, request.computed - index * state.blockSize));
      const sharers = this.holders.get(block)?.length ?? 1;
      const inner = make("i");
      inner.style.cssText = `width: ${(100 * filled) / state.blockSize}%; background: ${hue(request.number)}`;
      return make("li", { title: this.wordsOfBlock(block) }, make("small", {}, `${index} → `), `${block}${sharers > 1 ? ` ×${sharers}` : ""}`, make("span", { class: "xr-fill" }, inner));
    }));
    const list = make("dl", { class: "xr-facts" }, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
    const right = make("div", {}, make("h4", {}, `Block table: place → block (${request.blocks.length})`), table);
    return [make("div", { class: "xr-split" }, make("div", {}, list, close), right)];
  }

  drawTimeline() {
    const [width, height] = [this.widthOf(this.timelineBox), 44];
    const brush = this.brush(this.timeline, width, height);
    this.timeline.style.width = `${width}px`;
    const { frames } = this.replay;
    const { each, first, last } = this.windowOf(width);
    const { alarm, ink, pale } = this.colours;
    const parts = [];
    let most = 1;
    for (let index = first; index < last; index += 1) {
      const part = partOf(frames[index], this.selected);
      parts.push(part);
      most = Math.max(most, part?.tokens ?? 1);
    }
    brush.fillStyle = pale;
    brush.fillRect(0, height - 1, width, 1);
    parts.forEach((part, place) => {
      const x = place * each;
      if (first + place === this.position) {
        brush.fillStyle = ink;
        brush.fillRect(x, 0, 2, height);
      }
      if (!part) return;
      if (part.kind === "preempted" || part.kind === "ended") {
        brush.fillStyle = part.kind === "ended" ? ink : alarm;
        return part.kind === "ended" ? brush.fillRect(x, height - 12, 3, 12) : triangle(brush, x + each / 2, height - 10, 5);
      }
      const tall = Math.max(4, Math.sqrt(part.tokens / most) * (height - 6));
      this.bar(brush, part.drafts ? "draft" : part.kind, x, height - tall, each - (each > 4 ? 1 : 0.5), tall);
    });
    const there = parts.filter((part) => part?.tokens).length;
    this.timeline.setAttribute("aria-label", `Request ${this.selected} is in ${there} of the ${parts.length} steps from ${frames[first].step} to ${frames[last - 1].step}`);
    this.hits.set(this.timeline, (px) => {
      const index = Math.min(last - 1, first + Math.floor(px / each));
      const part = parts[index - first];
      const words = !part ? "not in the batch" : part.kind === "ended" ? `ended: ${part.reason}` : this.wordsOf(part);
      return { words: `Step ${frames[index].step}: ${words}`, act: () => this.go(index) };
    });
  }

  // -- the pointer

  hit(canvas, event) {
    const box = canvas.getBoundingClientRect();
    return this.hits?.get(canvas)?.(event.clientX - box.left, event.clientY - box.top);
  }

  point(canvas, event) {
    const found = this.hit(canvas, event);
    this.tip.hidden = !found;
    if (!found) return;
    this.tip.textContent = found.words;
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - this.tip.offsetWidth - 6);
    const above = event.clientY - this.tip.offsetHeight - 12;
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${above > 0 ? above : event.clientY + 20}px`;
  }

  remove() {
    this.forgetTheme();
    this.resized.disconnect();
    cancelAnimationFrame(this.pending);
  }
}

// Puts other children into a box when what its key says has changed; who has the focus keeps it.
function rebuild(box, key, children) {
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.kept : null;
  box.replaceChildren(...children());
  if (focused) box.querySelector(`[data-kept="${focused}"]`)?.focus();
}

function wordsOfSlot({ slot, name, pinned, users, filled, before }) {
  if (!name) return `Slot ${slot}: free`;
  const use = users.length ? `used by ${plural(users.length, "running request")}` : pinned ? "not in use" : "not in use, so another adapter may take its place";
  return `Slot ${slot}: adapter ${name}, ${use}${pinned ? ", pinned" : ""}${filled ? `; copied in this step${before ? `, in place of ${before}` : ""}` : ""}`;
}

// Block -> the share of its slots that is computed, for those that are not full.
function fillsOf(state) {
  const found = new Map();
  for (const { blocks, computed } of state.requests.values())
    for (let index = Math.floor(computed / state.blockSize); index < blocks.length; index += 1)
      found.set(blocks[index], Math.max(0, computed / state.blockSize - index));
  return found;
}

function sumsOf(frame) {
  if (frame.sums) return frame.sums;
  const sums = { prefill: 0, decode: 0, draft: 0, total: 0 };
  for (const one of frame.batch) {
    sums[one.kind] += one.tokens - one.drafts;
    sums.draft += one.drafts;
    sums.total += one.tokens;
  }
  return (frame.sums = sums);
}

function partOf(frame, number) {
  const part = frame.batch.find((one) => one.number === number);
  const end = frame.ended.find(([one]) => one === number);
  if (part) return part;
  if (end) return { kind: "ended", reason: end[1] };
  return frame.preempted.includes(number) ? { number, kind: "preempted" } : null;
}

function hatch(brush, x, y, width, height, colour, gap) {
  brush.save();
  brush.beginPath();
  brush.rect(x, y, width, height);
  brush.clip();
  brush.strokeStyle = colour;
  brush.lineWidth = 1.5;
  brush.beginPath();
  for (let start = x - height; start < x + width; start += gap) {
    brush.moveTo(start, y + height);
    brush.lineTo(start + height, y);
  }
  brush.stroke();
  brush.restore();
}

function round(brush, x, y, width, height, radius) {
  brush.beginPath();
  brush.roundRect(x, y, width, height, Math.min(radius, width / 2));
  brush.fill();
}

function triangle(brush, x, y, size) {
  brush.beginPath();
  brush.moveTo(x - size, y);
  brush.lineTo(x + size, y);
  brush.lineTo(x, y + size * 1.6);
  brush.fill();
}

// Lines of words in the middle of a box, in letters that fit; none at all if these were too small.
function words(brush, lines, x, y, room, colour) {
  brush.font = "600 12px system-ui, sans-serif";
  const widest = Math.max(...lines.map((line) => brush.measureText(line).width));
  const size = Math.min(12, Math.floor((12 * (room - 2)) / widest));
  if (size < 8) return;
  brush.font = `600 ${size}px system-ui, sans-serif`;
  brush.fillStyle = colour;
  lines.forEach((line, index) => brush.fillText(line, x, y + (index - (lines.length - 1) / 2) * 15));
}

// A cell's number. On a hatched cell it stands on a plate, so that it can be read.
function label(brush, text, x, y, size, colour, plate) {
  brush.font = `600 ${Math.min(12, Math.floor((size * 1.5) / Math.max(3, text.length)))}px system-ui, sans-serif`;
  if (plate) {
    const wide = brush.measureText(text).width + 2;
    brush.fillStyle = plate;
    brush.fillRect(x + (size - wide) / 2, y + size / 2 - 6, wide, 11);
  }
  brush.fillStyle = colour;
  brush.fillText(text, x + size / 2, y + size / 2);
}

// ---- Where the lines come from

// A recording, as text.
export function mount(element, text) {
  const view = new View(element, { live: null });
  try {
    view.show(Replay.read(text));
  } catch (error) {
    view.tell(`This is no recording that can be shown: ${error.message}.`);
  }
  return view;
}

// The server that the page came from.
export function start(element) {
  const view = new View(element, { live: new Replay(KEPT) });
  window.xray = view;
  const field = make("input", { type: "password", "aria-label": "API key", autocomplete: "off" });
  const form = make("form", { class: "xr-key", hidden: true }, "This server asks for an API key.", field, make("button", {}, "Open"));
  view.root.querySelector(".xr-top").after(form);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    form.hidden = true;
    follow(view, form, field.value);
  });
  follow(view, form, "");
  return view;
}

async function follow(view, form, key) {
  for (;;) {
    let words = "The server does not answer; it is asked again every second.";
    try {
      view.reading = new AbortController();
      const headers = key ? { authorization: `Bearer ${key}` } : {};
      const answer = await fetch(`xray/events?core=${view.shownCore ?? 0}`, { headers, cache: "no-store", signal: view.reading.signal });
      if (answer.status === 401) {
        view.tell(key ? "This key is not known here." : "");
        form.hidden = false;
        return form.querySelector("input").focus();
      }
      if (answer.ok) await readEvents(view, answer.body);
      else words = `The server answers with status ${answer.status}; it is asked again every second.`;
    } catch (error) {
      if (error.name === "AbortError") continue; // another core was chosen
      if (error instanceof Refusal) words = `The server's events cannot be shown: ${error.message}.`;
    }
    view.connected = false;
    view.tell(words);
    view.dirty();
    await new Promise((done) => setTimeout(done, 1000));
  }
}

async function readEvents(view, body) {
  const live = new Replay(KEPT); // another connection begins anew, and may be another engine's
  const wasLive = view.replay === view.live;
  view.live = live;
  if (wasLive) view.replay = live;
  view.connected = true;
  view.tell("");
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) live.take(line.slice(6));
    view.came();
  }
}

// A notebook: anywidget calls this.
export default {
  render({ model, el }) {
    const described = model.get("described");
    for (const still of document.getElementsByClassName(described.still)) still.hidden = true;
    const view = mount(el, described.text);
    return () => view.remove();
  },
};
