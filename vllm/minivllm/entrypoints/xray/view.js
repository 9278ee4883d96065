// What an engine does, step by step: its block pool, its batch, its queues.
//
// Each line is a whole state, as `minivllm/engine/step_recorder.py` describes it. One file for the page of a server
// (`start`) and for notebooks (`default.render`). Whatever a line says is put on the page as text, never as markup.

const FORMAT = 2;
const KEPT = 1000; // steps that one can go back
const CELLS = 20000; // blocks that are drawn
const CHIPS = 40;
const SECONDS_TO_WAIT = 1; // for a step, before a recorded run is shown
const HUES = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442"]; // Okabe and Ito's
const KINDS = { prefill: "#0072B2", decode: "#009E73", draft: "#E69F00" };
const hue = (number) => HUES[(number - 1) % HUES.length];
const on = (colour) => (colour === "#0072B2" ? "#ffffff" : "#111111"); // words on it: 5 : 1 or better
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// ---- Runs: a header and the snapshots that followed it

class Run {
  constructor(header) {
    if (header?.xray !== FORMAT) throw new Error(`its first line is not a header of format ${FORMAT}`);
    this.header = header;
    this.frames = [];
    this.reach = 0; // the highest block that was ever held or cached: blocks beyond it have never been used
  }

  static read(text) {
    const [header, ...lines] = text.trim().split("\n").map((line) => JSON.parse(line));
    const run = new Run(header);
    for (const line of lines) run.add(line);
    if (!run.frames.length) throw new Error("there is no step in it");
    return run;
  }

  // Adds a snapshot; returns how many old ones were forgotten.
  add(line, kept = Infinity) {
    const batch = line.batch.map(([number, tokens, drafts, sampled, cached]) => {
      const kind = cached >= 0 || tokens - drafts > 1 || !sampled ? "prefill" : "decode";
      return { number, tokens, drafts, cached, kind, accepted: Math.max(0, drafts && sampled - 1) };
    });
    const sums = { prefill: 0, decode: 0, draft: 0 };
    for (const { kind, tokens, drafts } of batch) {
      sums[kind] += tokens - drafts;
      sums.draft += drafts;
    }
    const requests = new Map([...line.running, ...line.waiting].map((request) => [request.number, request]));
    const held = new Set([...requests.values()].flatMap((request) => request.blocks));
    const frame = { ...line, line, batch, sums, requests, held: held.size, total: sums.prefill + sums.decode + sums.draft };
    for (const block of [...held, ...line.cached]) this.reach = Math.max(this.reach, block);
    if (this.frames.at(-1)?.step === line.step) this.frames.pop(); // a change between steps
    return this.frames.push(frame) > kept ? this.frames.splice(0, 1).length : 0;
  }

  text() {
    return [this.header, ...this.frames.map((frame) => frame.line)].map((line) => `${JSON.stringify(line)}\n`).join("");
  }
}

// Who holds which block after a step, which blocks were taken in it, and which of those were found in the cache.
function poolOf(frame, before) {
  const holders = new Map(), fresh = new Set(), hits = new Set();
  const cachedTokens = new Map(frame.batch.map(({ number, cached }) => [number, cached]));
  for (const { number, blocks } of frame.requests.values()) {
    const had = new Set(before?.requests.get(number)?.blocks ?? (before ? [] : blocks));
    const numHits = Math.floor((cachedTokens.get(number) ?? -1) / frame.block_size);
    blocks.forEach((block, index) => {
      holders.has(block) ? holders.get(block).push(number) : holders.set(block, [number]);
      if (!had.has(block)) (index < numHits ? hits : fresh).add(block);
    });
  }
  return { holders, fresh, hits, cached: new Set(frame.cached) };
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
  constructor(element, run) {
    Object.assign(this, { run, live: null, connected: false, position: 0, playing: false, selected: null });
    this.areas = new Map(); // canvas -> (x, y) -> what is said of that place, and what a click does
    this.build(element);
    this.forgetTheme = watchTheme(this.root, "xr-dark", () => this.dirty());
    this.resized = new ResizeObserver(() => this.dirty());
    this.resized.observe(this.root);
  }

  build(element) {
    const button = (words, act, label = words) => make("button", { type: "button", onclick: act, title: label, "aria-label": /[◀▶]/.test(words) && label }, words);
    const canvas = (name) => (this[name] = make("canvas", { role: "img", class: "xr-pick" }));
    const legend = (kinds) => make("ul", { class: "xr-legend" }, ...kinds.map(([kind, words]) => make("li", {}, make("i", { class: `xr-${kind}` }), words)));
    const card = (title, kinds, ...parts) => make("section", { class: "xr-card", "aria-label": title }, make("header", {}, make("h3", {}, title), legend(kinds)), ...parts);
    const chips = (name) => (this[name] = make("div", { class: "xr-chips" }));
    this.model = make("small");
    this.status = make("span", { class: "xr-state" });
    this.says = make("p", { class: "xr-alarm", role: "status" });
    this.file = make("input", { type: "file", accept: ".jsonl", hidden: true, "aria-label": "A recording", onchange: () => this.load(this.file.files[0]) });
    this.back = button("Back to live", () => this.show(this.live));
    this.play = button("", () => this.toggle(), "Pause or play (space)");
    this.range = make("input", { type: "range", min: 0, "aria-label": "Step", oninput: () => this.go(Number(this.range.value)) });
    this.where = make("output");
    this.numbers = make("dl", { class: "xr-numbers" });
    this.slotCard = card("Adapter slots", [["filled", "filled in this step"]], chips("slots"));
    this.headings = { running: make("h4"), waiting: make("h4") };
    this.detail = make("div");
    this.tip = make("div", { class: "xr-tip", hidden: true });
    this.root = make("div", { class: "xr", "data-lm-suppress-shortcuts": "true" },
      make("div", { class: "xr-bar" }, make("h2", {}, "X-ray", this.model), this.status, this.back, button("Save", () => this.save(), "Save these steps"), button("Load", () => this.file.click(), "Show saved steps"), this.file),
      this.says,
      make("div", { class: "xr-bar" }, this.play, button("◀", () => this.go(this.position - 1), "Step back"), button("▶", () => this.go(this.position + 1), "Step forward"), this.range, this.where),
      this.numbers,
      card("Batch of this step", [["prefill", "P prefill"], ["decode", "D decode, ✓ drafts accepted"], ["preempted", "↩ preempted"]], canvas("strip")),
      this.slotCard,
      card("Steps so far", [["prefill", "prefill tokens"], ["decode", "decode tokens"], ["draft", "drafts"], ["usage", "blocks held"], ["mark", "preemption"]], canvas("history")),
      make("div", { class: "xr-columns" },
        make("div", {},
          card("KV-cache blocks", [["held", "held, by request"], ["shared", "shared"], ["cached", "cached and free"], ["free", "free"], ["fresh", "taken in this step"], ["hit", "found in the cache"]], canvas("pool"), (this.beyond = make("p", { class: "xr-quiet" }))),
          card("Request", [], this.detail)),
        card("Queues", [], this.headings.running, chips("running"), this.headings.waiting, chips("waiting"))),
      this.tip);
    element.replaceChildren(this.root);
    for (const place of [this.strip, this.history, this.pool]) {
      place.addEventListener("pointermove", (event) => this.point(place, event));
      place.addEventListener("pointerleave", () => (this.tip.hidden = true));
      place.addEventListener("click", (event) => this.areas.get(place)?.(event.offsetX, event.offsetY)?.act());
    }
    this.keys = (event) => this.press(event);
    document.addEventListener("keydown", this.keys);
  }

  press(event) {
    const act = { " ": () => this.toggle(), ArrowLeft: () => this.go(this.position - 1), ArrowRight: () => this.go(this.position + 1), Home: () => this.go(0), Escape: () => this.select(null) }[event.key];
    const ours = this.root.contains(event.target) || (this.live && event.target === document.body);
    if (!act || !ours || event.altKey || event.ctrlKey || event.metaKey) return;
    const typed = event.target.tagName === "INPUT" || (event.target.tagName === "BUTTON" && event.key === " ");
    if (typed && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  // -- where we are

  show(run) {
    this.run = run;
    this.playing = run === this.live;
    this.position = this.playing ? Math.max(0, run.frames.length - 1) : 0;
    this.selected = null;
    this.says.textContent = "";
    this.dirty();
  }

  came(line) { // a snapshot of the live run
    const forgotten = this.live.add(line, KEPT);
    if (this.run === this.sample && line.batch.length) this.show(this.live);
    if (this.run !== this.live) return;
    this.position = this.playing ? this.live.frames.length - 1 : Math.max(0, this.position - forgotten);
    this.dirty();
  }

  go(index) {
    this.playing = false;
    this.position = Math.max(0, Math.min(this.run.frames.length - 1, index));
    this.dirty();
  }

  toggle() {
    this.playing = !this.playing;
    if (this.playing && this.run === this.live) this.position = Math.max(0, this.run.frames.length - 1);
    if (this.playing && this.run !== this.live) this.advance();
    this.dirty();
  }

  advance() { // a recording plays ten steps a second
    if (!this.playing || this.run === this.live || !this.root.isConnected) return;
    if (this.position >= this.run.frames.length - 1) this.playing = false;
    else {
      this.position += 1;
      setTimeout(() => this.advance(), 100);
    }
    this.dirty();
  }

  // The recorded run that a server without requests shows; its next step ends it.
  watch(sample) {
    if (this.run !== this.live || this.live.frames.length > 1) return;
    this.show((this.sample = sample));
    this.says.textContent = "This server has nothing to do. Here is a recorded run; the next request brings the page back to live.";
    this.toggle();
  }

  select(number) {
    this.selected = number === this.selected ? null : number;
    this.dirty();
  }

  async load(file) {
    try {
      this.show(Run.read(await file.text()));
    } catch (error) {
      this.says.textContent = `${file.name} is not a recording that can be shown: ${error.message}`;
    }
    this.file.value = "";
  }

  save() {
    const url = URL.createObjectURL(new Blob([this.run.text()], { type: "application/jsonl" }));
    make("a", { href: url, download: "xray.jsonl" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  // -- drawing

  dirty() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      if (this.run && this.root.clientWidth) this.draw();
    });
  }

  draw() {
    const { header, frames } = this.run;
    const isLive = this.run === this.live, frame = (this.frame = frames[this.position]);
    const style = getComputedStyle(this.root);
    this.colours = Object.fromEntries(["ink", "quiet", "rule", "pale", "dot", "alarm"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
    this.model.replaceChildren(header.model, ...(header.cores > 1 ? Array.from({ length: header.cores }, (_, core) => make("a", { href: `?core=${core}`, "aria-current": core === header.core && "page" }, `core ${core}`)) : []));
    this.status.textContent = isLive ? (this.connected ? (this.playing ? "● live" : "❚❚ paused") : "○ not connected") : "■ recording";
    this.back.hidden = isLive || !this.live;
    this.play.textContent = this.playing ? "❚❚ Pause" : isLive ? "● Live" : "▶ Play";
    this.range.max = Math.max(0, frames.length - 1);
    this.range.value = this.position;
    this.where.textContent = frame ? `step ${frame.step.toLocaleString("en")} · ${frame.t.toFixed(2)} s` : "no step yet";
    this.range.setAttribute("aria-valuetext", this.where.textContent);
    if (!frame) return;
    const before = frames[this.position - 1];
    this.shown = poolOf(frame, before);
    this.drawNumbers(frame);
    this.drawStrip(frame);
    this.drawSlots(frame, before);
    this.drawHistory(frames);
    this.drawPool(frame);
    this.drawQueues(frame);
    this.drawDetail(frame);
  }

  brush(canvas, height, label) {
    const scale = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth - 24;
    Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    canvas.style.height = `${height}px`;
    canvas.setAttribute("aria-label", label);
    const brush = canvas.getContext("2d");
    brush.scale(scale, scale);
    Object.assign(brush, { textBaseline: "middle", textAlign: "center", font: "600 11px system-ui, sans-serif" });
    return [brush, width];
  }

  drawNumbers(frame) {
    const usable = frame.num_blocks - 1, { held } = frame;
    const idle = frame.cached.filter((block) => !this.shown.holders.has(block)).length;
    const percent = (count) => `${Math.round((100 * count) / usable)} %`;
    const [tier, used, loading, storing] = frame.tier;
    const shown = [["tokens in step", frame.total, `of ${frame.max_num_batched_tokens}`], ["running", frame.running.length, `of ${frame.max_num_seqs}`], ["waiting", frame.num_waiting, ""],
      ["blocks held", held, percent(held)], ["cached and free", idle, percent(idle)], ["free", usable - held - idle, percent(usable - held - idle)],
      ...(tier === undefined ? [] : [["in host memory", used, `of ${tier}${loading ? `, ${loading} loading` : ""}${storing ? `, ${storing} storing` : ""}`]])];
    this.numbers.replaceChildren(...shown.map(([name, value, rest]) => make("div", {}, make("dt", {}, name), make("dd", {}, value.toLocaleString("en"), make("small", {}, ` ${rest}`)))));
  }

  // The batch: a box for each request in scheduling order, the wider the more tokens; then the preempted ones.
  drawStrip(frame) {
    const boxes = [...frame.batch, ...frame.preempted.map((number) => ({ number, kind: "preempted", tokens: 1 }))];
    const [brush, width] = this.brush(this.strip, 40, `Batch: ${plural(frame.batch.length, "request")}. ${boxes.slice(0, 12).map(wordsOf).join("; ")}`);
    const weight = ({ tokens }) => 2 + Math.sqrt(tokens);
    const unit = Math.min(16, (width - 2 * boxes.length) / boxes.reduce((sum, box) => sum + weight(box), 0));
    let x = 0;
    const places = boxes.map((box) => {
      const wide = weight(box) * unit, preempted = box.kind === "preempted";
      brush.globalAlpha = this.selected === null || this.selected === box.number ? 1 : 0.25;
      brush.fillStyle = preempted ? this.colours.pale : hue(box.number);
      brush.fillRect(x, 0, wide, 40);
      if (box.kind === "prefill") hatch(brush, x, 32, wide, 8, on(hue(box.number)));
      brush.fillStyle = preempted ? this.colours.ink : on(hue(box.number));
      const said = { prefill: `P ${box.tokens}`, decode: box.drafts ? `D ✓${box.accepted}/${box.drafts}` : "D", preempted: "↩" }[box.kind];
      if (wide > 16) brush.fillText(`${box.number}`, x + wide / 2, 11);
      if (wide > brush.measureText(said).width) brush.fillText(said, x + wide / 2, 25);
      x += wide + 2;
      return { end: x, words: wordsOf(box), act: () => this.select(box.number) };
    });
    this.areas.set(this.strip, (px) => places.find(({ end }) => px < end));
  }

  drawSlots(frame, before) {
    this.slotCard.hidden = !frame.slots.length;
    this.slots.replaceChildren(...frame.slots.map(([name, pinned], slot) => {
      const users = frame.running.filter((request) => name && request.adapter === name);
      const filled = before && name && before.slots[slot]?.[0] !== name;
      const words = name ? `${slot}: ${name}, ${users.length ? `${users.length} running` : "not in use"}${pinned ? ", pinned" : ""}` : `${slot}: free`;
      return make("button", { type: "button", class: `xr-chip${filled ? " xr-filled" : ""}`, onclick: () => users.length && this.select(users[0].number) }, words);
    }));
  }

  // All steps that are kept, as bars; the window moves so that the shown one is in it.
  drawHistory(frames) {
    const [brush, width] = this.brush(this.history, 64, `Tokens of ${plural(frames.length, "step")}; the step shown is ${this.frame.step}`);
    const each = Math.max(3, Math.min(10, width / frames.length)), room = Math.floor(width / each);
    const first = Math.max(0, Math.min(frames.length - room, this.position - Math.floor(room * 0.75)));
    const window = frames.slice(first, first + room);
    const most = Math.max(1, ...window.map((frame) => frame.total));
    window.forEach((frame, place) => {
      let y = 64;
      for (const kind of ["decode", "draft", "prefill"]) {
        const tall = frame.total && (Math.sqrt(frame.total / most) * 52 * frame.sums[kind]) / frame.total;
        brush.fillStyle = KINDS[kind];
        brush.fillRect(place * each, (y -= tall), each - 1, tall);
      }
      brush.fillStyle = this.colours.alarm;
      if (frame.preempted.length) brush.fillText("▼", (place + 0.5) * each, 5);
      brush.fillStyle = this.colours.ink;
      brush.fillRect(place * each, 62 - (frame.held / (frame.num_blocks - 1)) * 52, each, 1.5);
      if (first + place === this.position) brush.fillRect((place + 0.5) * each - 1, 0, 2, 64);
    });
    this.areas.set(this.history, (px) => {
      const index = Math.min(window.length - 1, Math.floor(px / each)), { step, sums, held, preempted } = window[index];
      return { words: `Step ${step}: ${sums.prefill} prefill, ${sums.decode} decode, ${sums.draft} draft tokens\n${plural(held, "block")} held, ${preempted.length} preempted`, act: () => this.go(first + index) };
    });
  }

  // The blocks that have been used, and a few more; of a large pool most never are.
  drawPool(frame) {
    const shown = Math.min(frame.num_blocks, CELLS, Math.max(64, Math.ceil(1.25 * this.run.reach))), { holders } = this.shown;
    this.beyond.textContent = shown < frame.num_blocks ? `Blocks 0 to ${(shown - 1).toLocaleString("en")} of ${frame.num_blocks.toLocaleString("en")}${this.run.reach < shown ? ": the others have not been used yet" : ""}.` : "";
    const fitting = Math.max(4, Math.min(shown > 100 ? 30 : 44, Math.floor(Math.sqrt((this.pool.parentElement.clientWidth * 470) / shown))));
    const columns = Math.max(1, Math.floor((this.pool.parentElement.clientWidth - 24) / fitting));
    const [brush] = this.brush(this.pool, Math.ceil(shown / columns) * fitting, `${holders.size} of ${frame.num_blocks - 1} blocks are held`);
    const chosen = this.selected === null ? null : new Map(frame.requests.get(this.selected)?.blocks.map((block, index) => [block, index]));
    brush.font = `600 ${Math.min(11, fitting * 0.45)}px system-ui, sans-serif`;
    for (let block = 0; block < shown; block += 1)
      this.cell(brush, block, (block % columns) * fitting, Math.floor(block / columns) * fitting, fitting - 2, chosen);
    this.areas.set(this.pool, (px, py) => {
      const block = Math.floor(py / fitting) * columns + Math.floor(px / fitting);
      if (px >= columns * fitting || block >= shown) return null;
      const numbers = holders.get(block) ?? [];
      return { words: this.wordsOfBlock(block), act: () => numbers.length && this.select(numbers[(numbers.indexOf(this.selected) + 1) % numbers.length]) };
    });
  }

  cell(brush, block, x, y, size, chosen) {
    const { holders, cached, fresh, hits } = this.shown, { ink, rule, pale, dot } = this.colours;
    const numbers = holders.get(block) ?? [], isFree = !numbers.length;
    const number = numbers.includes(this.selected) ? this.selected : numbers[0];
    brush.globalAlpha = chosen && !chosen.has(block) ? 0.22 : 1;
    brush.fillStyle = isFree ? (block === 0 || cached.has(block) ? pale : "transparent") : hue(number);
    brush.fillRect(x, y, size, size);
    brush.lineWidth = 1;
    brush.strokeStyle = rule;
    if (isFree) brush.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    if (numbers.length > 1) hatch(brush, x, y, size, size, on(hue(number)));
    brush.fillStyle = isFree ? dot : on(hue(number));
    const said = block === 0 ? "∅" : isFree ? (cached.has(block) ? "·" : "") : String(chosen?.get(block) ?? number);
    if (size >= 12) brush.fillText(said, x + size / 2, y + size / 2 + 1);
    if (!fresh.has(block) && !hits.has(block)) return;
    brush.lineWidth = 2;
    brush.strokeStyle = ink;
    brush.setLineDash(hits.has(block) ? [3, 2] : []);
    brush.strokeRect(x + 1, y + 1, size - 2, size - 2);
    brush.setLineDash([]);
  }

  wordsOfBlock(block) {
    if (block === 0) return "Block 0: the null block, which no request gets";
    const { holders, cached, fresh, hits } = this.shown, numbers = holders.get(block) ?? [];
    if (!numbers.length) return `Block ${block}: ${cached.has(block) ? "cached and free: the next request with this prefix finds it" : "free"}`;
    const places = numbers.slice(0, 6).map((number) => `request ${number}, position ${this.frame.requests.get(number).blocks.indexOf(block)} of its table`);
    const marks = [numbers.length > 1 ? `shared by ${numbers.length}` : "held", cached.has(block) && "cached", fresh.has(block) && "taken in this step", hits.has(block) && "found in the cache"];
    return [`Block ${block}: ${marks.filter(Boolean).join(", ")}`, ...places].join("\n");
  }

  drawQueues({ running, waiting, num_waiting: numWaiting }) {
    this.headings.running.textContent = `Running (${running.length}), in order of admission`;
    this.headings.waiting.textContent = `Waiting (${numWaiting.toLocaleString("en")}), next first`;
    const progress = ({ computed, prompt, tokens, max }) => (computed < prompt ? `${computed}/${prompt} prompt` : `+${tokens - prompt}/${max}`);
    this.fill(this.running, running, progress, running.length);
    this.fill(this.waiting, waiting, ({ preemptions, prompt }) => `${preemptions ? "↩ " : ""}${plural(prompt, "token")}`, numWaiting);
  }

  fill(box, requests, words, total) {
    const focused = box.contains(document.activeElement) ? document.activeElement.dataset.number : null;
    const shown = requests.slice(0, CHIPS);
    box.replaceChildren(...shown.map((request) => make("button", { type: "button", class: "xr-chip", "data-number": request.number, title: request.id, "aria-pressed": String(request.number === this.selected), style: `--hue: ${hue(request.number)}`, onclick: () => this.select(request.number) },
      make("i"), `#${request.number} ${words(request)}${request.adapter ? ` · ${request.adapter}` : ""}`)), total > shown.length ? `and ${(total - shown.length).toLocaleString("en")} more` : "");
    if (focused) box.querySelector(`[data-number="${focused}"]`)?.focus();
  }

  drawDetail(frame) {
    const request = frame.requests.get(this.selected);
    if (!request) return this.detail.replaceChildren(this.selected === null ? "Click a block, a box of the batch or a request: its block table appears here. Space pauses, the arrow keys step." : `Request ${this.selected} is not there at this step: it has ended, or has not come yet.`);
    const { number, id, prompt, tokens, max, computed, preemptions, blocks, adapter } = request;
    const facts = [["request", `#${number}`], ["id", id], ["prompt", plural(prompt, "token")], ["generated", `${tokens - prompt} of at most ${max}`], ["computed", `${computed} of ${plural(tokens, "token")}`], ["preemptions", preemptions], ...(adapter ? [["adapter", adapter]] : [])];
    const table = blocks.slice(0, 256).map((block, index) => make("li", { title: this.wordsOfBlock(block) }, `${index} → ${block}`));
    this.detail.replaceChildren(make("dl", { class: "xr-facts" }, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))])),
      make("h4", {}, `Block table: position → block (${blocks.length})`), make("ol", { class: "xr-table", tabindex: 0, "aria-label": "Block table" }, ...table));
  }

  point(canvas, event) {
    const place = this.areas.get(canvas)?.(event.offsetX, event.offsetY);
    this.tip.hidden = !place;
    if (!place) return;
    this.tip.textContent = place.words;
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, document.documentElement.clientWidth - this.tip.offsetWidth - 6))}px`;
    this.tip.style.top = `${event.clientY > this.tip.offsetHeight + 12 ? event.clientY - this.tip.offsetHeight - 12 : event.clientY + 20}px`;
  }

  remove() {
    this.forgetTheme();
    this.resized.disconnect();
    document.removeEventListener("keydown", this.keys);
    cancelAnimationFrame(this.pending);
  }
}

function wordsOf({ number, kind, tokens, drafts, accepted, cached }) {
  if (kind === "preempted") return `Request ${number}: preempted, its blocks are free again`;
  if (kind === "prefill") return `Request ${number}: prefill of ${plural(tokens, "token")}${cached > 0 ? `, ${cached} more were cached` : ""}`;
  return `Request ${number}: decode${drafts ? `, ${accepted} of ${plural(drafts, "draft")} accepted` : ""}`;
}

function hatch(brush, x, y, width, height, colour) {
  brush.save();
  brush.beginPath();
  brush.rect(x, y, width, height);
  brush.clip();
  Object.assign(brush, { strokeStyle: colour, lineWidth: 1, globalAlpha: brush.globalAlpha * 0.45 });
  brush.beginPath();
  for (let start = x - height; start < x + width; start += 5) {
    brush.moveTo(start, y + height);
    brush.lineTo(start + height, y);
  }
  brush.stroke();
  brush.restore();
}

// ---- Where the lines come from

// A recording, as text.
export function mount(element, text) {
  const view = new View(element, null);
  try {
    view.show(Run.read(text));
  } catch (error) {
    view.says.textContent = `This is not a recording that can be shown: ${error.message}`;
  }
  return view;
}

// An engine in the page itself, which calls `came` with each line.
export function live(element, header) {
  const view = new View(element, null);
  view.live = new Run(header);
  view.connected = true;
  view.show(view.live);
  return view;
}

// The server that the page came from: asked again every second while it does not answer.
export async function start(element) {
  const view = (window.xray = new View(element, null));
  const field = make("input", { type: "password", "aria-label": "API key", autocomplete: "off" });
  const form = make("form", { class: "xr-bar", hidden: true }, "This server asks for an API key.", field, make("button", {}, "Open"));
  view.says.after(form);
  for (;;) {
    let words = "The server does not answer; it is asked again every second.";
    try {
      const headers = field.value ? { authorization: `Bearer ${field.value}` } : {};
      const answer = await fetch(`xray/events${location.search}`, { headers, cache: "no-store" });
      form.hidden = answer.status !== 401;
      if (answer.ok) await follow(view, answer.body, headers);
      else words = answer.status !== 401 ? `The server answers with status ${answer.status}.` : field.value ? "This key is not known here." : "";
    } catch (error) {
      if (!(error instanceof TypeError)) words = `The server's steps cannot be shown: ${error.message}`;
    }
    view.connected = false;
    view.says.textContent = words;
    view.dirty();
    await new Promise((done) => (form.hidden ? setTimeout(done, 1000) : form.addEventListener("submit", (event) => (event.preventDefault(), done()), { once: true })));
  }
}

async function follow(view, body, headers) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", live = null;
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((line) => line.startsWith("data: ")).map((line) => JSON.parse(line.slice(6)))) {
      if (live) view.came(line);
      else {
        const follows = view.run === view.live;
        live = view.live = new Run(line); // another connection begins anew, and may be another engine's
        view.connected = true;
        if (follows) view.show(live);
        fetchSample(view, live, headers);
      }
    }
  }
}

// A server that is idle when the page opens shows a recorded run.
async function fetchSample(view, live, headers) {
  await new Promise((done) => setTimeout(done, SECONDS_TO_WAIT * 1000));
  const idle = live.frames.length === 1 && !live.frames[0].requests.size;
  const answer = idle && !view.sample && (await fetch("xray/recorded", { headers }));
  if (answer?.ok) view.watch(Run.read(await answer.text()));
}

// A notebook: anywidget calls this.
export default {
  render({ model, el }) {
    const view = mount(el, model.get("text"));
    return () => view.remove();
  },
};
