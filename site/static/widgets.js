// The site's widgets. Each begins with a table of views that were drawn in advance. Where the site has Python and the page
// comes from a server, a worker then runs the real widget in the table's place, and every knob turns.
//
// #kv_cache?gpu=H100&tp=2 sets these knobs of this widget, in the page's address and in a link.

const AT = document.currentScript.src;
const PATIENCE = 20_000; // milliseconds without a sign of life after which the worker is started again

const LEAST = 560; // the width from which a table's picture is readable
const STOPPED = { tone: "tight", sign: "!", words: "That took too long, so it was stopped." };

document.addEventListener("DOMContentLoaded", () => {
  const places = [...document.querySelectorAll(".lesson-widget")].map((root) => new Place(root));
  const follow = (beside) => places.forEach((place) => place.follow(beside));
  if (location.protocol.startsWith("http") && window.WebAssembly && window.Worker) {
    const course = new Course();
    places.filter((place) => place.widget).forEach((place) => place.expect(course));
    window.solveExercises?.(course, places); // on a page that has one
  }
  addEventListener("load", () => follow(false)); // before, pictures above it would move it
  addEventListener("hashchange", () => follow(true));
  document.addEventListener("click", ({ target }) => target.closest?.("a.knob")?.hash === location.hash && follow(true));
});

const same = (values, others) => Object.entries(values).every(([name, value]) => value === others?.[name]);

// Where a widget stands on the page.
class Place {
  constructor(root) {
    this.root = root;
    this.id = root.dataset.table;
    this.widget = root.dataset.widget; // absent where the site has no Python
    this.note = root.nextElementSibling;
    const { views, pieces, ...table } = window.widgetTables[this.id];
    const keyed = views.map((view) => [
      JSON.stringify(table.axes.map((name) => view.values[name])),
      { ...view, svg: view.svg.map((index) => pieces[index]).join("") },
    ]);
    root.replaceChildren();
    this.shell = new window.lessonWidgets.Shell(root, window.lessonWidgets.tableHost({ ...table, views: Object.fromEntries(keyed) }));
    this.home = table.described.presets[0].values;
    this.linked = null; // knobs that a link has set, which the table may not have
    this.own = null; // the exercise whose parts the widget runs
    root.addEventListener("lw-turn", () => this.turned());
    this.button = document.createElement("button");
    this.button.className = "dock";
    this.button.addEventListener("click", () => this.dock(!this.docked));
    root.prepend(this.button);
    this.dock(false);
  }

  get values() {
    return this.linked ?? this.shell.values;
  }

  get docked() {
    return this.root.classList.contains("docked");
  }

  // Keep the widget beside the text, or put it back into it; site.css does so on a wide screen only.
  dock(beside) {
    this.root.style.minHeight = beside ? `${this.root.offsetHeight}px` : ""; // so that the text stays where it is
    this.root.classList.toggle("docked", beside);
    this.button.textContent = beside ? "Back into the text" : "Keep beside the text";
    this.model?.show(true);
  }

  // Start Python a little before the reader arrives.
  expect(course) {
    this.course = course;
    const near = new IntersectionObserver((seen) => seen.some(({ isIntersecting }) => isIntersecting) && this.start(), { rootMargin: "150%" });
    near.observe(this.root);
  }

  start() {
    if (this.model) return;
    this.model = new Model(this.course, this);
    this.course.add(this.model);
    new IntersectionObserver(([{ isIntersecting }]) => this.model.show(isIntersecting || this.docked)).observe(this.root);
  }

  // Run the parts that the reader has written in an exercise, or ours again.
  run(own) {
    this.own = own;
    if (!this.model) return this.start();
    this.model.view = null; // what comes next describes another widget
    this.model.begin();
  }

  // Put the live widget in the table's place.
  swap() {
    if (this.shell.dragged || this.shell.playing) return setTimeout(() => this.swap(), 300);
    const { values } = this;
    this.shell = this.shell.replaced(window.lessonWidgets.kernelHost(this.model));
    if (!same(values, this.model.view.values)) this.shell.turn(values);
    this.note.hidden = true;
    this.root.dataset.live = "";
    this.shell.speak("Every knob turns now.");
  }

  // Put the knobs that differ from the start into the page's address, once they rest.
  turned() {
    this.linked = null;
    clearTimeout(this.telling);
    this.telling = setTimeout(() => {
      const turned = Object.entries(this.values).filter(([name, value]) => value !== this.home[name]);
      history.replaceState(null, "", `#${this.shell.described.name}?${new URLSearchParams(turned)}`);
    }, 300);
  }

  // Set the knobs that the page's address names, if it names this widget.
  follow(beside) {
    const [name, query] = location.hash.slice(1).split("?");
    if (name !== this.shell.described.name || query === undefined) return;
    const named = [...new URLSearchParams(query)].map(([knob, text]) => [knob, this.value(knob, text)]);
    const values = { ...this.home, ...Object.fromEntries(named) };
    this.shell.turn(values);
    this.linked = values;
    if (this.course) this.start();
    this.reveal(beside);
  }

  // Bring the picture into view, beside the text if there is room.
  reveal(beside) {
    const box = this.shell.picture.getBoundingClientRect();
    if (box.top >= 0 && box.bottom <= innerHeight) return;
    if (beside && matchMedia("(min-width: 63em)").matches) this.dock(true);
    else this.root.scrollIntoView();
  }

  // A knob's value for a text of an address.
  value(name, text) {
    const { knob } = this.shell.knobs.get(name) ?? {};
    if (knob?.kind === "entry") return text;
    if (knob?.kind === "switch") return text === "true";
    const option = knob?.options.find(({ value }) => String(value) === text);
    return option?.value ?? (Number.isNaN(Number(text)) ? text : Number(text)); // a table lacks some of a slider's values
  }
}

// What anywidget calls a model: one widget's state, and the messages between the page and its Python.
class Model {
  heard = {};
  serial = 0;
  seen = true;
  view = null;

  constructor(course, place) {
    this.course = course;
    this.place = place;
    this.values = place.values;
    this.width = place.shell.width;
    this.drawn = this.width < LEAST ? null : place.shell.view; // by the table: complete, while the first sweep is not
  }

  get = (name) => this[name];
  on = (event, callback) => (this.heard[event] = callback);
  off = (event) => delete this.heard[event];

  send = (message) => {
    this.serial = message.serial ?? this.serial;
    this.width = message.width ?? this.width;
    this.course.post({ id: this.place.id, ...message });
  };

  begin() {
    this.send({ do: "start", widget: this.place.widget, settings: this.values, own: this.place.own, width: this.width, serial: this.serial });
  }

  // Forget what the worker knew: it has ended, perhaps in the reader's own code.
  lose() {
    this.lost = true;
    if (this.place.own) this.view = this.place.own = null;
  }

  // Compute only while the reader sees it.
  show(seen) {
    this.seen = seen;
    if (this.view) this.send(seen ? { do: "turn", values: {}, width: this.width, serial: this.serial } : { do: "rest" });
  }

  receive({ described, view, ...message }) {
    if (described) this.described = described;
    else if (view) this.look(view);
    else this.heard["msg:custom"]?.(message);
  }

  look(view) {
    const first = !this.view;
    const { busy, serial, values } = view;
    if (!busy || !same(values, this.drawn?.values)) this.drawn = null;
    this.view = { ...view, ...this.drawn, busy, serial, ...(this.lost && STOPPED) };
    if (!busy && !view.stale) this.values = values; // with these, Python starts again
    this.lost = false;
    if (!first) return this.heard["change:view"]?.();
    this.place.swap();
    if (!this.seen) this.show(false);
  }
}

// The worker that runs the Python of all widgets and exercises of a page.
class Course {
  models = new Map();

  add(model, id = model.place.id) {
    this.models.set(id, model);
    if (this.worker) model.begin();
    else this.start();
  }

  start() {
    this.worker = new Worker(new URL("worker.js", AT), { type: "module" });
    this.worker.onmessage = ({ data }) => this.receive(data);
    this.worker.onerror = () => this.fail("the worker does not start");
    this.models.forEach((model) => model.begin());
  }

  post(message) {
    this.worker?.postMessage(JSON.stringify(message));
  }

  receive(data) {
    if (data === "ready") this.watching = setInterval(() => this.watch(), 1000);
    else if (typeof data === "number") this.called = null;
    else if (data.startsWith("failed")) this.fail(data);
    else {
      const { id, ...message } = JSON.parse(data);
      this.models.get(id).receive(message);
    }
  }

  // Start again if a loop without an end holds the worker.
  watch() {
    const now = performance.now();
    if (!this.called) this.worker.postMessage((this.called = now));
    else if (now - this.called > this.patience) this.restart();
  }

  get patience() {
    return window.patience ?? PATIENCE;
  }

  restart() {
    this.stop();
    if (![...this.models.values()].some(({ view }) => view)) return this.fail("the first sweep does not end");
    this.models.forEach((model) => model.lose());
    this.start();
  }

  // Go on with the tables.
  fail(reason) {
    this.stop();
    this.worker = null;
    this.models.forEach((model) => model.failed?.());
    console.warn(`Python does not run here (${reason}), so only some knobs turn.`);
  }

  stop() {
    clearInterval(this.watching);
    this.called = null;
    this.worker.terminate();
  }
}
