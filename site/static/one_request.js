// The page of one recorded request (`made` is room.js's): the view of the engine's steps, the stops of the text, and what the client has received.

document.addEventListener("DOMContentLoaded", () => {
  const root = document.querySelector(".one-request");
  if (root) new OneRequest(root, window.recorded);
});

class OneRequest {
  constructor(root, text) {
    this.sent = JSON.parse(text.slice(0, text.indexOf("\n"))).request;
    this.tokens = this.sent.events.filter((event) => event !== "[DONE]").flatMap((event) => tokensOf(JSON.parse(event)));
    this.stops = [...document.querySelectorAll(".stop")].map((mark) => ({ section: mark.closest("section"), step: Number(mark.dataset.step) }));
    this.bar = made("nav", "", { className: "stops", ariaLabel: "Stops" });
    this.where = made("span");
    this.bar.append(this.button("◀", "Stop before", -1), this.where, this.button("▶", "Next stop", 1));
    this.client = made("div", "", { className: "client" });
    this.picture = made("div");
    const words = made("div");
    this.stops[0].section.before(root);
    words.append(this.bar, ...this.stops.map(({ section }) => section), this.client);
    root.append(words, this.picture);
    this.view = window.xrayView.mount(this.picture, text);
    this.number = this.view.run.frames.flatMap((frame) => [...frame.requests.values()]).find(({ id }) => id.includes("yours")).number;
    const draw = this.view.draw.bind(this.view);
    this.view.draw = () => (draw(), this.tell(this.view.frame));
    addEventListener("hashchange", () => this.follow());
    if (!this.follow()) this.go(0);
  }

  button(words, label, by) {
    return made("button", words, { type: "button", ariaLabel: label, onclick: () => this.go(this.place + by) });
  }

  // Show the stop that the address names, if it names one.
  follow() {
    const place = this.stops.findIndex(({ section }) => `#${section.id}` === decodeURIComponent(location.hash));
    if (place >= 0) this.go(place);
    return place >= 0;
  }

  go(place) {
    this.place = Math.max(0, Math.min(this.stops.length - 1, place));
    this.stops.forEach(({ section }, index) => (section.hidden = index !== this.place));
    this.where.textContent = `stop ${this.place + 1} of ${this.stops.length}`;
    this.bar.firstChild.disabled = this.place === 0;
    this.bar.lastChild.disabled = this.place === this.stops.length - 1;
    this.view.selected = this.number;
    this.view.go(this.stops[this.place].step);
  }

  // The number of generated tokens after a frame: those that it has, or all once it has ended.
  generated(frame) {
    const request = frame.requests.get(this.number);
    if (request) return request.tokens - request.prompt;
    return frame.step < this.stops.at(-1).step ? 0 : this.tokens.length;
  }

  tell(frame) {
    const before = this.view.run.frames[this.view.position - 1];
    const count = this.generated(frame), had = before ? this.generated(before) : 0;
    const written = (from, to) => this.tokens.slice(from, to).map(({ text }) => text).join("");
    const answer = made("pre", "", { tabIndex: 0 });
    answer.append(made("span", count ? `…${this.sent.body.prompt.slice(-24)}` : this.sent.body.prompt, { className: "prompt" }), written(0, had), made("mark", written(had, count)));
    const title = made("p", count ? `The client has ${count} of ${this.sent.body.max_tokens} tokens` : `The client has sent this, and asked for ${this.sent.body.max_tokens} tokens of “${this.sent.body.model}”`);
    const last = count > had ? this.tokens[count - 1] : null;
    this.client.replaceChildren(title, answer, ...(last ? [candidates(last)] : []));
    answer.scrollTop = answer.scrollHeight;
  }
}

function tokensOf(event) {
  const { tokens = [], top_logprobs: tops } = event.choices[0]?.logprobs ?? {};
  return tokens.map((text, index) => ({ text, top: Object.entries(tops[index]) }));
}

// The most probable tokens at the last position, as bars.
function candidates({ text, top }) {
  const list = made("ol", "", { className: "candidates", ariaLabel: "Most probable tokens at the last position" });
  for (const [token, logprob] of top) {
    const percent = 100 * Math.exp(logprob);
    const row = made("li", "", { className: token === text ? "taken" : "" });
    row.append(made("code", JSON.stringify(token)), made("span", percent < 0.1 ? "< 0.1 %" : `${percent.toFixed(1)} %`));
    row.style.setProperty("--share", `${percent}%`);
    list.append(row);
  }
  return list;
}
