// The front end of every widget: controls, tooltips, player, challenges. No dependency, no build step.
//
// A host connects this page to what draws: a kernel, or a table of pictures drawn beforehand.
//   described          texts and knobs, which never change
//   view()             the current picture, verdict and challenges
//   turn(values, width, serial)
//   pin(), unpin(), load(text)   absent where the host cannot do them; like `turn`, they return false if the kernel is gone
//   onView(callback)   calls back whenever view() changes
//   onAhead(callback)  calls back with views that were drawn ahead of time
//   fixed(knob)        true where the host cannot turn this knob
// The picture's data attributes tell the shell what to do with it (see svg.py).

export default { render: ({ model, el }) => mount(el, kernelHost(model)) };

// A host whose model has the form of anywidget's: a notebook's kernel, or the site's worker.
export function kernelHost(model) {
  const send = (message) => {
    try {
      model.send(message);
    } catch {
      return false; // the kernel that made this widget has ended
    }
  };
  return {
    described: model.get("described"),
    view: () => model.get("view"),
    turn: (values, width, serial) => send({ do: "turn", values, width, serial }),
    pin: () => send({ do: "pin" }),
    unpin: () => send({ do: "unpin" }),
    load: (text) => send({ do: "load", text }),
    onView: (callback) => {
      model.on("change:view", callback);
      return () => model.off("change:view", callback);
    },
    onAhead: (callback) => {
      const receive = (message) => message.ahead && callback(message.ahead, message.width);
      model.on("msg:custom", receive);
      return () => model.off("msg:custom", receive);
    },
    fixed: () => false,
  };
}

// A host without a kernel. `table.views` holds a view for each setting of `table.axes`, keyed by their values as JSON;
// `table.turns` names the knobs that turn. After a preset that has only one view, they start from the first view again.
export function tableHost(table) {
  const key = (values) => JSON.stringify(table.axes.map((name) => values[name]));
  let values = { ...table.values };
  let notify = () => {};
  let serial = 0;
  return {
    described: table.described,
    view: () => ({ ...table.views[key(values)], values, serial }),
    turn: (turned, _width, asked) => {
      const near = { ...values, ...turned };
      const home = { ...table.values, ...Object.fromEntries(table.turns.map((name) => [name, near[name]])) };
      values = [near, home].find((setting) => table.views[key(setting)]) ?? values;
      serial = asked;
      notify();
    },
    onView: (callback) => {
      notify = callback;
      return () => {};
    },
    onAhead: () => () => {},
    fixed: (knob) => !table.turns.includes(knob),
  };
}

const KEYS = { "data-lm-suppress-shortcuts": "true" }; // otherwise JupyterLab takes x, d d and the arrow keys

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const button = (label, onclick, more = {}) => make("button", { type: "button", onclick, ...KEYS, ...more }, label);

let mounted = 0;

export function mount(root, host) {
  const widget = new Shell(root, host);
  return () => widget.leave();
}

export class Shell {
  // `before` is the widget whose place this one takes.
  constructor(root, host, before = null) {
    this.host = host;
    this.id = before?.id ?? `lw${(mounted += 1)}`;
    this.described = host.described;
    this.knobs = new Map();
    this.serial = 0;
    this.waiting = null; // serial of the turn that is not answered yet
    this.pending = null; // knobs turned since then
    this.values = {}; // the knobs' positions
    this.width = null;
    this.frame = null;
    this.asked = !this.described.guess || Boolean(before?.asked); // there is none where the knobs differ from those that it is about
    this.page = before?.page ?? 0;
    this.met = before?.met ?? new Set();
    this.challenge = before?.challenge ?? 0;
    this.build(root);
    this.known = new Map(); // views drawn ahead, by width and knobs
    this.forget = [host.onView(() => this.viewed()), host.onAhead((view, width) => this.know(view, width)), watchTheme(this.el, "lw-dark"), this.watchWidth()];
    if (this.described.still) document.querySelectorAll(`.${this.described.still}`).forEach((still) => still.remove());
    this.viewed();
  }

  // Go on with another host: the same widget, where the reader is.
  replaced(host) {
    const root = this.el.parentNode;
    const focused = root.contains(document.activeElement) ? document.activeElement.id : "";
    this.leave();
    this.el.remove();
    const next = new Shell(root, host, this);
    document.getElementById(focused)?.focus({ preventScroll: true });
    return next;
  }

  leave() {
    clearInterval(this.playing);
    clearTimeout(this.resting);
    this.forget.forEach((stop) => stop());
  }

  // ---- building the page

  build(root) {
    const { title, lead, own } = this.described;
    this.tip = make("div", { class: "lw-tip", id: `${this.id}-tip`, hidden: true });
    this.spoken = make("div", { class: "lw-spoken", "aria-live": "polite" });
    const head = make("header", {}, make("h4", {}, title), make("p", {}, [lead, ...own].join(" · ")));
    const columns = make("div", { class: "lw-columns" }, this.buildControls(), this.buildStage());
    this.el = make("section", { class: "lw", "aria-label": title, tabindex: -1, ...KEYS }, head, columns, this.tip, this.spoken);
    root.append(this.el);
  }

  buildControls() {
    const { groups, presets, challenges } = this.described;
    const fields = groups.map(({ heading, knobs }) =>
      make("fieldset", {}, make("legend", {}, heading), ...knobs.map((knob) => this.buildKnob(knob)))
    );
    const jumps = presets.map(({ label, values }) => button(label, () => this.jump(values)));
    this.goals = challenges.map((_, index) => button(`${index + 1}`, () => this.pick(index)));
    this.goal = make("p", { class: "lw-goal" });
    this.progress = make("p", { class: "lw-progress" });
    const goals = make("div", { class: "lw-goals", role: "group", "aria-label": "Challenges" }, make("span", {}, "Challenges"), ...this.goals);
    return make(
      "div",
      { class: "lw-controls" },
      ...fields,
      make("div", { class: "lw-buttons" }, ...jumps),
      make("div", { class: "lw-challenge" }, goals, this.goal, this.progress)
    );
  }

  buildKnob(knob) {
    const id = `${this.id}-${knob.name}`;
    const shared = { id, title: knob.tip, disabled: this.host.fixed(knob.name), ...KEYS };
    const said = make("output", { for: id, "aria-hidden": "true" });
    const names = knob.options.map((option) => option.name);
    const range = (low, high, step) => make("input", { type: "range", min: low, max: high, step, ...shared });
    const controls = {
      choice: () => make("select", shared, ...names.map((name, index) => make("option", { value: index }, name))),
      steps: () => range(0, names.length - 1, 1),
      slider: () => range(knob.low, knob.high, knob.step),
      switch: () => make("input", { type: "checkbox", ...shared }),
      entry: () => make("input", { type: "text", placeholder: knob.placeholder, spellcheck: "false", ...shared }),
    };
    const control = controls[knob.kind]();
    control.addEventListener(knob.kind === "entry" ? "change" : "input", () => this.turn({ [knob.name]: valueOf(knob, control) }));
    this.knobs.set(knob.name, { knob, control, said });
    const label = make("label", { for: id }, knob.label);
    const slides = knob.kind === "steps" || knob.kind === "slider";
    return make("div", { class: `lw-knob lw-${knob.kind}`, title: knob.tip }, label, control, slides ? said : null);
  }

  buildStage() {
    const words = "Picture. Use the arrow keys to step through its marks.";
    this.picture = make("div", { class: "lw-picture", id: `${this.id}-picture`, tabindex: 0, role: "group", "aria-label": words, "aria-describedby": this.tip.id, ...KEYS });
    this.sign = make("b", {});
    this.words = make("span", {});
    this.trace = make("pre", {});
    this.traced = make("details", { hidden: true }, make("summary", KEYS, "Traceback"), this.trace);
    this.mend = button("", () => this.turn(this.view.mend.values), { class: "lw-mend", hidden: true });
    this.because = make("p", { class: "lw-because", hidden: true });
    this.says = make("div", { class: "lw-says" }, this.because, this.sign, this.words, this.mend, this.traced);
    this.listen();
    const top = make("div", { class: "lw-top" }, this.buildGuess(), this.says);
    return make("div", { class: "lw-stage" }, top, this.buildTabs(), this.picture, this.buildPlayer(), this.buildTake());
  }

  buildTabs() {
    this.tabs = this.described.tabs.map((label, index) => button(label, () => this.leaf(index)));
    return make("div", { class: "lw-buttons lw-tabs", role: "group", "aria-label": "Pictures", hidden: !this.tabs.length }, ...this.tabs);
  }

  buildGuess() {
    const { question, options } = this.described.guess ?? { question: "", options: [] };
    const answers = options.map((option, index) => button(option, () => this.guessed(index)));
    const skip = button("Show me", () => this.guessed(null), { class: "lw-quiet" });
    const shown = { class: "lw-guess", role: "group", "aria-label": "Guess first", hidden: this.asked };
    this.question = make("div", shown, make("span", {}, bound(question)), ...answers, skip);
    return this.question;
  }

  buildPlayer() {
    this.scrub = make("input", { type: "range", min: 0, step: 1, "aria-label": "Step", oninput: () => this.goTo(Number(this.scrub.value)), ...KEYS });
    this.play = button("▶", () => this.toggle(), { "aria-label": "Play" });
    this.caption = make("span", { class: "lw-caption" });
    const back = button("◀", () => this.goTo(this.frame - 1), { "aria-label": "Step back" });
    const on = button("▶|", () => this.goTo(this.frame + 1), { "aria-label": "Step forward" });
    this.player = make("div", { class: "lw-player", hidden: true }, back, this.play, on, this.scrub, this.caption);
    return this.player;
  }

  buildTake() {
    this.command = make("pre", { class: "lw-command", tabindex: 0, ...KEYS });
    this.saved = make("textarea", { rows: 2, spellcheck: "false", "aria-label": "This state as JSON: copy it, or paste one here and load it", ...KEYS });
    this.compared = make("p", { class: "lw-compared", hidden: true });
    this.copied = make("output", {});
    this.unpin = button("Unpin", () => this.reach(this.host.unpin()), { hidden: true });
    this.compare = button("Show pinned", () => this.flip(), { hidden: true, "aria-pressed": "false" });
    const pins = this.host.pin ? [button("Pin to compare", () => this.pin()), this.unpin, this.compare] : [];
    const load = this.host.load ? [button("Load", () => this.load())] : [];
    const take = make(
      "details",
      {},
      make("summary", KEYS, "As a command, as JSON"),
      this.command,
      button("Copy command", () => this.copy(this.command.textContent)),
      this.saved,
      button("Copy JSON", () => this.copy(this.saved.value)),
      ...load,
      this.copied
    );
    return make("div", { class: "lw-take" }, make("div", { class: "lw-buttons" }, ...pins), this.compared, take);
  }

  // ---- turning knobs: while one turn is being drawn, only the newest of the later ones waits

  turn(values) {
    this.answer();
    this.ask(values, this.width);
    this.el.dispatchEvent(new CustomEvent("lw-turn", { bubbles: true }));
  }

  jump(values) {
    this.stop(); // a player that goes on would play another run
    this.turn(values);
  }

  pin() {
    clearTimeout(this.telling);
    if (this.pending) this.tell(this.width); // the kernel pins what it was told last
    this.reach(this.host.pin());
  }

  load() {
    this.answer();
    this.reach(this.host.load(this.saved.value));
  }

  answer() {
    this.asked = true; // turning a knob skips the question
    this.question.hidden = true;
    this.because.hidden = true; // it is about the knobs as they were
  }

  ask(values, width) {
    this.pending = { ...this.pending, ...values };
    this.values = { ...this.values, ...values };
    this.showKnobs(this.values);
    const known = this.known.get(keyOf(this.values, width));
    if (known) this.show(known);
    if (this.waiting !== null) return;
    clearTimeout(this.telling);
    if (known) this.telling = setTimeout(() => this.tell(width), 150); // tell the kernel where the handle stopped
    else this.tell(width);
  }

  tell(width) {
    const turned = this.pending ?? {};
    this.pending = null;
    this.serial += 1;
    this.waiting = this.serial;
    this.reach(this.host.turn(turned, width, this.serial));
  }

  reach(answered) {
    if (answered !== false) return;
    this.waiting = null;
    this.picture.classList.add("lw-stale");
    this.says.hidden = false;
    this.mend.hidden = true;
    this.says.dataset.tone = "broken";
    this.sign.textContent = "✕";
    this.words.textContent = "The kernel that drew this has ended. Run this cell again.";
    this.speak(this.words.textContent);
  }

  viewed() {
    const view = this.host.view();
    if (this.waiting !== null && view.serial >= this.waiting) this.waiting = null;
    if (!this.pending || !this.known.has(keyOf(this.values, this.width))) this.show(view);
    if (this.pending && this.waiting === null) this.ask({}, this.width);
  }

  know(view, width) {
    this.known.set(keyOf(view.values, width), view);
    if (this.known.size > 200) this.known.delete(this.known.keys().next().value);
  }

  watchWidth() {
    const observer = new ResizeObserver(() => {
      const [least, most] = this.described.widths;
      const width = Math.max(least, Math.min(most, Math.floor(this.picture.clientWidth / 10) * 10));
      if (!this.picture.clientWidth || width === this.width) return;
      this.width = width;
      this.ask({}, width);
    });
    observer.observe(this.picture);
    return () => observer.disconnect();
  }

  // ---- showing a view

  show(view) {
    if (JSON.stringify(view.pinned?.values) !== JSON.stringify(this.view?.pinned?.values)) this.known.clear();
    this.view = view;
    const flipped = this.compare.getAttribute("aria-pressed") === "true";
    if (view.svg !== this.drawn || (flipped && !view.pinned)) {
      this.drawn = view.svg;
      this.draw(view.svg);
      this.compare.setAttribute("aria-pressed", "false"); // the picture shown is no longer the pinned one
    }
    this.picture.classList.toggle("lw-stale", view.stale);
    this.el.classList.toggle("lw-busy", view.busy);
    this.el.classList.toggle("lw-asking", !this.asked);
    const secret = !this.asked && !view.stale; // the verdict would give away the answer
    this.says.hidden = secret;
    this.says.dataset.tone = view.tone;
    this.sign.textContent = view.sign;
    this.words.textContent = bound(view.words);
    this.mend.hidden = !view.mend || Object.keys(view.mend.values).some((name) => this.host.fixed(name));
    this.mend.textContent = view.mend?.label ?? "";
    this.traced.hidden = !view.trace;
    this.trace.textContent = view.trace || "";
    if (!view.busy && !secret) this.speak(view.words);
    this.command.textContent = view.command;
    if (document.activeElement !== this.saved && view.saved !== this.lastSaved) this.saved.value = this.lastSaved = view.saved; // keep text that could not be loaded
    if (!this.pending && this.waiting === null) this.showKnobs((this.values = { ...view.values }));
    this.showChallenge(view);
    this.showPinned(view);
  }

  showKnobs(values) {
    for (const [name, { knob, control, said }] of this.knobs) {
      const value = values[name];
      const index = knob.options.findIndex((option) => option.value === value);
      const words = index >= 0 ? knob.options[index].name : `${value}${knob.unit || ""}`;
      if (knob.kind === "switch") control.checked = value;
      else if (knob.kind === "entry") {
        if (document.activeElement !== control) control.value = value;
      } else control.value = knob.kind === "slider" ? value : index;
      if (control.type === "range") control.setAttribute("aria-valuetext", words);
      said.textContent = words;
    }
  }

  pick(index) {
    this.challenge = index;
    this.showChallenge(this.view);
  }

  showChallenge(view) {
    clearTimeout(this.resting);
    const met = view.challenges.flatMap((challenge, index) => (challenge.met && !this.met.has(index) ? [index] : []));
    const rested = () => {
      met.forEach((index) => this.met.add(index));
      this.showChallenge(view);
    };
    if (met.length && !view.busy && this.asked) this.resting = setTimeout(rested, 800); // dragging past the goal does not count
    view.challenges.forEach((_, index) => {
      const solved = this.met.has(index);
      this.goals[index].textContent = `${index + 1}${solved ? " ✓" : ""}`;
      this.goals[index].setAttribute("aria-pressed", String(index === this.challenge));
      this.goals[index].setAttribute("aria-label", `Challenge ${index + 1}${solved ? ", met" : ""}`);
    });
    const { goal, lesson, elsewhere } = this.described.challenges[this.challenge];
    const { met: now, words, advice } = view.challenges[this.challenge];
    this.goal.textContent = bound(goal);
    this.progress.hidden = !this.asked && !view.stale && !elsewhere;
    const help = elsewhere ? "It needs knobs that only turn in the notebook." : `${words} ${advice}`;
    this.progress.textContent = bound(now ? `✓ Met. ${words} ${lesson}` : `Not yet. ${help}`);
    this.progress.classList.toggle("lw-met", now);
  }

  showPinned(view) {
    const pinned = view.pinned;
    this.unpin.hidden = this.compare.hidden = !pinned;
    this.compared.hidden = !pinned || !this.asked;
    if (!pinned) return;
    const turned = [...this.knobs.values()].filter(({ knob }) => pinned.values[knob.name] !== view.values[knob.name]);
    const changes = turned.map(({ knob }) => `${knob.label} ${named(knob, pinned.values[knob.name])}`).join(", ");
    this.compared.textContent = `Pinned${changes ? ` (${changes})` : ""}: ${pinned.sign} ${bound(pinned.words)}`;
  }

  flip() {
    const shown = this.compare.getAttribute("aria-pressed") !== "true";
    this.compare.setAttribute("aria-pressed", String(shown));
    this.draw(shown ? this.view.pinned.svg : this.drawn);
  }

  guessed(index) {
    const { right, options, because } = this.described.guess;
    const verdict = index === null ? "" : index === right ? "Right. " : `No, ${options[right].replace(/^[A-Z](?=[a-z])/, (first) => first.toLowerCase())}. `;
    this.answer();
    this.because.hidden = false;
    this.because.textContent = bound(`${verdict}${because}`);
    this.show(this.view);
    this.speak(this.because.textContent);
    this.picture.focus({ preventScroll: true });
  }

  async copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = make("textarea", {}, text); // pages without https have no clipboard
      this.el.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    this.copied.textContent = "Copied.";
    setTimeout(() => (this.copied.textContent = ""), 2000);
  }

  speak(words) {
    clearTimeout(this.speaking);
    this.speaking = setTimeout(() => {
      if (this.spoken.textContent !== words) this.spoken.textContent = words;
    }, 500); // while a slider moves, only the last verdict is read out
  }

  // ---- the picture: frames, tooltips, groups, dragging

  leaf(page) {
    this.page = page;
    this.draw(this.compare.getAttribute("aria-pressed") === "true" ? this.view.pinned.svg : this.drawn);
  }

  draw(svg) {
    this.picture.innerHTML = svg; // one picture, or one for each tab
    const pages = [...this.picture.children];
    pages.forEach((page, index) => (page.style.display = index === this.page ? "" : "none"));
    this.tabs.forEach((tab, index) => tab.setAttribute("aria-pressed", String(index === this.page)));
    this.svg = pages[this.page];
    this.mark = null;
    this.hideTip();
    const captions = this.svg?.dataset.frames ? JSON.parse(this.svg.dataset.frames) : null;
    this.player.hidden = !captions;
    if (!captions) {
      this.stop();
      this.frame = null;
      return;
    }
    const last = captions.length - 1;
    const stay = this.frame === null || this.frame === this.captions.length - 1 ? last : Math.min(this.frame, last);
    this.captions = captions;
    this.timed = [...this.svg.querySelectorAll("[data-at]")].map((mark) => [mark, ...mark.dataset.at.split(" ").map(Number)]);
    this.scrub.max = last;
    this.goTo(stay, true);
  }

  goTo(index, playing = false) {
    if (!playing) this.stop();
    this.frame = Math.max(0, Math.min(index, this.captions.length - 1));
    for (const [mark, first, last] of this.timed) mark.style.display = first <= this.frame && this.frame <= last ? "" : "none";
    this.scrub.value = this.frame;
    this.scrub.setAttribute("aria-valuetext", `${this.frame + 1} of ${this.captions.length}: ${this.captions[this.frame]}`);
    this.caption.textContent = this.captions[this.frame];
  }

  toggle() {
    if (this.playing) return this.stop();
    if (this.frame === this.captions.length - 1) this.goTo(0, true);
    this.play.textContent = "❚❚";
    this.play.setAttribute("aria-label", "Pause");
    this.playing = setInterval(() => {
      if (this.frame === this.captions.length - 1) this.stop();
      else this.goTo(this.frame + 1, true);
    }, Math.max(60, Math.min(700, 15000 / this.captions.length)));
  }

  stop() {
    clearInterval(this.playing);
    this.playing = null;
    this.play.textContent = "▶";
    this.play.setAttribute("aria-label", "Play");
  }

  listen() {
    const on = (event, react) => this.picture.addEventListener(event, react);
    on("pointermove", (event) => (this.dragged ? this.drag(event) : this.point(event)));
    on("pointerdown", (event) => this.grab(event));
    on("pointerup", () => (this.dragged = null));
    on("pointercancel", () => (this.dragged = null));
    on("pointerleave", () => this.hideTip());
    on("blur", () => this.hideTip());
    on("keydown", (event) => this.walk(event));
  }

  point(event) {
    this.picture.classList.toggle("lw-handle", this.plotAt(event) !== null);
    this.light(event.target.closest("[data-group]")?.dataset.group);
    const mark = event.target.closest("[data-tip]");
    if (!mark) return this.hideTip(false);
    this.showTip(mark.dataset.tip, event.clientX, event.clientY);
  }

  light(group) {
    if (group === this.lit || !this.svg) return;
    this.svg.querySelectorAll(".lw-lit").forEach((mark) => mark.classList.remove("lw-lit"));
    this.lit = group;
    this.svg.classList.toggle("lw-grouped", Boolean(group));
    if (group) this.svg.querySelectorAll(`[data-group="${CSS.escape(group)}"]`).forEach((mark) => mark.classList.add("lw-lit"));
  }

  showTip(words, x, y) {
    const frame = this.el.getBoundingClientRect();
    this.tip.textContent = words;
    this.tip.hidden = false;
    const left = Math.min(x - frame.left + 14, frame.width - this.tip.offsetWidth - 4);
    const above = y - frame.top - this.tip.offsetHeight - 12;
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${above > 0 ? above : y - frame.top + 18}px`;
  }

  hideTip(unlight = true) {
    this.tip.hidden = true;
    this.outline?.remove();
    if (unlight) this.light(undefined);
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") return this.hideTip();
    if (step === undefined || !this.svg) return;
    event.preventDefault();
    const marks = [...this.svg.querySelectorAll("[data-tip]")].filter((mark) => mark.getClientRects().length);
    if (!marks.length) return;
    const now = this.mark ? marks.indexOf(this.mark) : step > 0 ? -1 : marks.length;
    this.mark = marks[Math.max(0, Math.min(marks.length - 1, now + step))];
    const box = this.mark.getBoundingClientRect();
    this.light(this.mark.closest("[data-group]")?.dataset.group);
    this.ring(this.mark);
    this.showTip(this.mark.dataset.tip, box.left + box.width / 2, box.top);
    this.speak(this.mark.dataset.tip);
  }

  ring(mark) {
    this.outline?.remove();
    const box = mark.getBBox();
    this.outline = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const place = { x: box.x - 2, y: box.y - 2, width: box.width + 4, height: box.height + 4, rx: 2, class: "lw-ring" };
    for (const [name, value] of Object.entries(place)) this.outline.setAttribute(name, value);
    mark.parentNode.append(this.outline);
  }

  // Find the plot under the pointer by its box, since other marks may lie on top of it.
  plotAt({ clientX, clientY }) {
    for (const area of this.svg?.querySelectorAll("[data-drag]") ?? []) {
      const box = area.getBoundingClientRect();
      const inside = clientX >= box.left - 8 && clientX <= box.right + 8 && clientY >= box.top && clientY <= box.bottom + 14;
      if (inside && !this.host.fixed(area.dataset.drag)) return { ...area.dataset, x: box.left, width: box.width };
    }
    return null;
  }

  grab(event) {
    this.dragged = this.plotAt(event);
    if (!this.dragged) return this.point(event);
    this.picture.setPointerCapture(event.pointerId);
    this.picture.focus({ preventScroll: true });
    event.preventDefault();
    this.drag(event);
  }

  drag(event) {
    const { drag, low, high, log, x, width } = this.dragged;
    const share = Math.max(0, Math.min(1, (event.clientX - x) / width));
    const [first, last] = [Number(low), Number(high)];
    const value = log === "1" ? first * (last / first) ** share : first + (last - first) * share;
    const { knob } = this.knobs.get(drag);
    const nearest = nearestTo(knob, value, log === "1");
    if (nearest !== this.values[drag]) this.turn({ [drag]: nearest });
  }
}

const bound = (text) => text.replace(/(\d) (?=[%×]|(?:ms|s|[KMG]i?B)\b)/g, "$1\u00a0"); // a unit stays with its number
const keyOf = (values, width) => JSON.stringify([width, Object.entries(values).sort()]);
const named = (knob, value) =>
  knob.kind === "switch" ? (value ? "on" : "off") : (knob.options.find((option) => option.value === value)?.name ?? `${value}${knob.unit || ""}`);

function valueOf(knob, control) {
  if (knob.kind === "switch") return control.checked;
  if (knob.kind === "entry") return control.value;
  return knob.kind === "slider" ? Number(control.value) : knob.options[Number(control.value)].value;
}

function nearestTo(knob, value, log) {
  if (knob.kind === "slider") {
    const steps = Math.round((Math.min(Math.max(value, knob.low), knob.high) - knob.low) / knob.step);
    return Number((knob.low + steps * knob.step).toFixed(10));
  }
  const far = (option) => (log ? Math.abs(Math.log(option.value / value)) : Math.abs(option.value - value));
  return knob.options.reduce((best, option) => (far(option) < far(best) ? option : best)).value;
}
