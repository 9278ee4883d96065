// The page on which the embedded model answers: a box to write in, the answers, and the view of the engine's steps (`made` is
// room.js's).

const STARTING = "The engine starts: Python and the model's 8 MB are loaded once.";
const PROMPT = 'class Stack:\n    """A last-in, first-out stack."""\n\n    def push(self, item):\n        """Put an item on top."""\n';

document.addEventListener("DOMContentLoaded", () => {
  const root = document.querySelector(".own-request");
  if (!root) return;
  if (!location.protocol.startsWith("http") || !window.WebAssembly) root.append(made("p", "This page needs a server and WebAssembly.", { className: "widget-note" }));
  else new OwnRequest(root);
});

class OwnRequest {
  constructor(root) {
    this.text = made("textarea", "", { value: PROMPT, rows: 5, ariaLabel: "Your prompt", spellcheck: false });
    this.max = made("input", "", { type: "number", value: 32, min: 1, max: 400, ariaLabel: "Maximum number of tokens" });
    this.send = made("button", "Send", { type: "button", onclick: () => this.post() });
    this.stop = made("button", "Stop all", { type: "button", onclick: () => this.worker.postMessage({ stop: true }) });
    this.says = made("p", STARTING, { className: "says" });
    this.says.setAttribute("role", "status");
    this.answers = made("div", "", { className: "answers" });
    this.picture = made("div");
    const bar = made("div", "", { className: "stops" });
    const label = made("label", "tokens ");
    label.append(this.max);
    bar.append(this.send, label, this.stop);
    const words = made("div");
    words.append(this.text, bar, this.says, this.answers);
    root.append(words, this.picture);
    this.text.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.post());
    this.rows = new Map(); // a request's name -> where its answer is written
    this.worker = new Worker(new URL("engine.js", document.querySelector("script[src*=own_request]").src), { type: "module" });
    this.worker.onmessage = ({ data }) => this.heard(data);
    this.worker.onerror = (error) => this.heard({ failed: error.message ?? "the worker did not start" });
    this.busy(true);
  }

  busy(busy) {
    this.send.disabled = busy;
  }

  post() {
    if (this.send.disabled) return;
    this.worker.postMessage({ prompt: this.text.value, max: Math.max(1, Math.round(this.max.value) || 1) });
  }

  heard({ header, failed, name, prompt, tokens, line, texts, finished, idle }) {
    if (failed) this.says.textContent = failed;
    if (header) {
      this.view = window.xrayView.live(this.picture, header);
      this.says.textContent = "Ready.";
      this.busy(false);
    }
    if (name) this.begin(name, prompt, tokens);
    if (line) this.stepped(line, texts, finished);
    if (idle) this.view.run && this.view.dirty();
  }

  begin(name, prompt, tokens) {
    const answer = made("pre", "", { tabIndex: 0 }), written = made("span"), state = made("small", `${tokens} tokens of prompt`);
    answer.append(made("span", prompt, { className: "prompt" }), written);
    const row = made("div", "", { className: "client" });
    row.append(made("p", name.replace("request-", "Request "), {}), answer, state);
    this.answers.prepend(row);
    this.rows.set(name, { written, state });
    this.says.textContent = "";
  }

  stepped(line, texts, finished) {
    this.view.came(line);
    for (const [name, text] of Object.entries(texts)) this.rows.get(name).written.textContent = text;
    for (const name of finished) this.rows.get(name).state.textContent += ", done";
  }
}
