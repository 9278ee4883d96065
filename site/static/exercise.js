// An exercise in the page: an editor, the checks in the course's worker, and the reader's part in the widget. What the reader
// writes is kept in this browser.

const EXERCISES_AT = document.currentScript.src;

window.solveExercises = (course, places) => document.querySelectorAll(".exercise").forEach((root) => new Exercise(root, course, places));

class Exercise {
  constructor(root, course, places) {
    this.root = root;
    this.course = course;
    this.id = root.dataset.exercise;
    this.part = window.exercises[this.id];
    this.place = places.find(({ widget }) => widget && widget === this.part.widget);
    this.view = null; // while checks run, the worker is worth starting again
    this.run = 0; // how often they have run
    const near = new IntersectionObserver((seen) => {
      if (!seen.some(({ isIntersecting }) => isIntersecting)) return;
      near.disconnect();
      this.open();
    }, { rootMargin: "100%" });
    near.observe(root);
  }

  async open() {
    const note = this.root.firstElementChild;
    try {
      this.editor = await this.edited();
    } catch (error) {
      return console.warn(`The editor does not start (${error}).`);
    }
    const bar = element("div", "", { className: "exercise-bar" });
    this.checks = this.button("Check", "Ctrl-Enter", () => (this.view ? this.course.restart() : this.check()));
    this.shows = this.place && this.button("Show in the widget", `Run your ${Object.values(this.part.own).join(", ")} in it`, () => this.show());
    this.ours = this.place && this.button("Show ours again", "Run the engine's own part in the widget", () => this.showOurs());
    if (this.ours) this.ours.hidden = true;
    const saves = this.button("Save as a file", `The whole file, for make check N=${this.id.slice(0, 2)}`, () => this.save());
    const resets = this.button("Start over", "Put the stub back", () => this.reset());
    bar.append(...[this.checks, this.shows, this.ours, saves, resets].filter(Boolean));
    this.says = element("p", "", { className: "exercise-says" });
    this.says.setAttribute("role", "status");
    this.list = element("ul", "", { className: "exercise-list" });
    this.root.replaceChildren(this.editor.dom, bar, this.says, this.list);
    this.note = note;
    const limit = Math.round(this.course.patience / 1000);
    this.say(`${this.part.statements.length} checks, ${limit} seconds at most for each. Tab indents; Esc, then Tab leaves the editor.`);
    this.root.dataset.ready = "";
    this.course.add(this, this.id);
  }

  button(words, title, act) {
    const button = element("button", words, { type: "button", title });
    button.addEventListener("click", act);
    return button;
  }

  async edited() {
    const load = (name) => import(new URL(`codemirror/${name}.js`, EXERCISES_AT));
    const [{ EditorView, keymap, lineNumbers, drawSelection }, { EditorState }, commands, language, { python }, { classHighlighter }] = await Promise.all(
      ["codemirror-view", "codemirror-state", "codemirror-commands", "codemirror-language", "codemirror-lang-python", "lezer-highlight"].map(load),
    );
    const run = () => (this.checks.click(), true);
    return new EditorView({
      state: EditorState.create({
        doc: stored(this.key) ?? this.part.text,
        extensions: [
          lineNumbers(),
          drawSelection(),
          commands.history(),
          language.indentUnit.of("    "),
          language.bracketMatching(),
          language.syntaxHighlighting(classHighlighter),
          python(),
          EditorView.lineWrapping,
          EditorView.contentAttributes.of({ "aria-label": `Your code of exercise ${this.id.slice(0, 2)}`, spellcheck: "false" }),
          EditorView.updateListener.of(({ docChanged }) => docChanged && this.keep()),
          keymap.of([{ key: "Mod-Enter", run }, commands.indentWithTab, ...commands.defaultKeymap, ...commands.historyKeymap]),
        ],
      }),
    });
  }

  get key() {
    return `exercise ${this.id}`;
  }

  get source() {
    return this.editor.state.doc.toString();
  }

  keep() {
    stored(this.key, this.source);
  }

  say(words, tone = "") {
    this.says.textContent = words;
    this.says.dataset.tone = tone;
  }

  check() {
    this.list.replaceChildren();
    this.right = this.done = 0;
    this.began = performance.now();
    this.wait(true);
    this.say(this.course.worker ? "Checking …" : "Starting Python …");
    this.course.post({ id: this.id, do: "check", source: this.source, run: (this.run += 1) });
  }

  // While checks run, the first button stops them.
  wait(busy) {
    this.view = busy || null;
    this.checks.textContent = busy ? "Stop" : "Check";
  }

  show() {
    this.course.post({ id: this.id, do: "take", source: this.source, own: this.part.own });
  }

  showOurs() {
    this.ours.hidden = true;
    this.place.run(null);
  }

  save() {
    const file = new Blob([this.part.head + this.source.trim() + "\n" + this.part.tail], { type: "text/x-python" });
    const link = element("a", "", { href: URL.createObjectURL(file), download: `${this.id}.py` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    this.say(`Put ${this.id}.py into lessons/exercises, then run make check N=${this.id.slice(0, 2)}.`);
  }

  reset() {
    this.editor.dispatch({ changes: { from: 0, to: this.editor.state.doc.length, insert: this.part.text } });
    this.list.replaceChildren();
    this.say("This is the stub again. Ctrl-Z in the editor brings your code back.");
    this.editor.focus();
  }

  // What the course asks of everything that its worker runs.
  begin() {}

  lose() {
    const running = this.part.statements[this.done];
    if (this.view) this.say(`Stopped in check ${this.done + 1} of ${this.part.statements.length} (${running}). Does a loop in your code never end?`, "wrong");
    this.wait(false);
    if (this.ours) this.ours.hidden = true;
  }

  failed() {
    this.root.replaceChildren(this.note, this.editor.dom);
  }

  receive({ run, result, checked, refused, taken }) {
    if (run !== this.run && (result || checked)) return; // of code that has changed since
    if (result) this.add(result);
    else if (checked) this.end();
    else if (taken) {
      this.ours.hidden = false;
      this.place.run(this.id);
      this.place.reveal(true);
      if (this.place.docked) this.says.scrollIntoView({ block: "center" }); // the text beside it has moved
    } else {
      this.wait(false);
      this.say(refused, "wrong");
    }
  }

  add({ statement, problem }) {
    this.done += 1;
    this.right += !problem;
    const line = element("li", "", { className: problem ? "wrong" : "right" });
    line.append(element("span", problem ? "✗ " : "✓ "), statement);
    if (problem) line.append(element("small", problem));
    this.list.append(line);
    this.say(`Checking … ${this.done} of ${this.part.statements.length}`);
  }

  end() {
    this.wait(false);
    const [count, missing] = [this.done, this.done - this.right];
    const seconds = ((performance.now() - this.began) / 1000).toFixed(1);
    if (missing) this.say(`${missing} of ${count} checks to go (${seconds} s).`, "wrong");
    else this.say(`All ${count} checks pass (${seconds} s). For the rest of the exercise and the engine with your part, save the file and run make check.`, "right");
  }
}

function element(tag, words = "", properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: words }, properties);
}
