// Play the recorded rounds of `make predict`: who gets how many tokens in the scheduler's next step, and who is preempted?
// `tools/build_site.py` adds what starts it in a page, and `widgets/predict.py` what starts it in a notebook.

const element = (name, text, attributes = {}) => {
  const made = Object.assign(document.createElement(name), attributes);
  made.textContent = text ?? "";
  return made;
};
const key = ({ tokens, preempted }) => JSON.stringify([Object.entries(tokens).sort(), [...preempted].sort()]);

class Game {
  constructor(root, levels) {
    this.root = root;
    this.levels = levels;
    this.menu = element("p", "", { className: "predict-levels" });
    this.round = element("div");
    root.replaceChildren(this.menu, this.round);
    levels.forEach((level, index) => {
      const button = element("button", `${index + 1}. ${level.title}`, { type: "button" });
      button.addEventListener("click", () => this.begin(index));
      this.menu.append(button);
    });
    this.begin(0);
  }

  begin(level) {
    [...this.menu.children].forEach((button, index) => button.setAttribute("aria-pressed", String(index === level)));
    Object.assign(this, { level, number: 0, right: 0 });
    this.ask();
  }

  ask() {
    const level = this.levels[this.level];
    const puzzle = level.rounds[this.number];
    const form = element("form");
    form.append(element("p", `Round ${this.number + 1} of ${level.rounds.length}, after lesson ${level.lesson}: ${puzzle.facts}`));
    const longest = Math.max(...puzzle.rows.map((row) => row.known));
    const table = element("table", "", { className: "predict-rows" });
    table.innerHTML = "<thead><tr><th></th><th>request</th><th>gets tokens</th><th>is preempted</th></tr></thead>";
    puzzle.rows.forEach((row) => table.append(this.row(row, longest)));
    form.append(table, element("button", "Ask vLLM", { type: "submit" }));
    const reply = element("div", "", { className: "predict-reply" });
    reply.setAttribute("role", "status");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.reply(puzzle, this.answer(form), reply);
      form.querySelectorAll("input, button").forEach((control) => (control.disabled = true));
    });
    this.round.replaceChildren(form, reply);
    form.querySelector("input").focus({ preventScroll: true });
  }

  row(row, longest) {
    const line = element("tr");
    const bar = element("span", "", { className: "predict-bar" });
    bar.style.width = `${(9 * row.known) / longest}rem`;
    bar.append(Object.assign(element("i"), { style: `width: ${(100 * row.done) / row.known}%` }));
    const words = element("td");
    words.append(element("b", row.name), " ", bar, element("small", row.words));
    const gets = element("td");
    gets.append(element("input", "", { type: "number", min: 0, max: row.lacks, name: row.name, inputMode: "numeric", ariaLabel: `tokens of ${row.name}` }));
    const gone = element("td");
    if (row.runs) gone.append(element("input", "", { type: "checkbox", name: `-${row.name}`, ariaLabel: `${row.name} is preempted` }));
    line.append(element("td", row.runs ? "runs" : "waits"), words, gets, gone);
    return line;
  }

  answer(form) {
    const numbers = [...form.querySelectorAll("[type=number]")].filter((input) => Number(input.value) > 0);
    const gone = [...form.querySelectorAll("[type=checkbox]:checked")];
    return {
      tokens: Object.fromEntries(numbers.map((input) => [input.name, Number(input.value)])),
      preempted: gone.map((input) => input.name.slice(1)),
    };
  }

  reply(puzzle, answer, place) {
    const right = key(answer) === key(puzzle.decision);
    this.right += right;
    const { tokens, preempted } = puzzle.decision;
    const told = [...Object.entries(tokens).map((pair) => pair.join(" ")), ...preempted.map((name) => `${name} is preempted`)];
    place.append(element("p", right ? "Right." : `vLLM decided: ${told.join(", ") || "nobody gets a token"}.`, { className: right ? "right" : "wrong" }));
    if (!right) this.correct(puzzle, answer).forEach((line) => place.append(line));
    const why = element("details");
    why.append(element("summary", "Why, request by request"), ...puzzle.why.map((words) => element("p", words)), element("p", `(${puzzle.source})`));
    place.append(why);
    const { rounds } = this.levels[this.level];
    if (this.number + 1 === rounds.length) {
      place.append(element("p", `${this.right} of ${rounds.length} right.`, { className: "predict-score" }));
      return;
    }
    const next = element("button", "Next round", { type: "button" });
    next.addEventListener("click", () => {
      this.number += 1;
      this.ask();
    });
    place.append(next);
    next.focus({ preventScroll: true });
  }

  // What corrects a wrong answer: the rule that it missed, or what does not add up.
  correct(puzzle, answer) {
    const missed = puzzle.mistakes.filter((mistake) => key(mistake) === key(answer));
    if (missed.length) {
      return missed.map(({ says, link }) => {
        const line = element("p", `${says} `);
        line.append(element("a", "vLLM's lines", { href: link }));
        return line;
      });
    }
    const total = Object.values(answer.tokens).reduce((sum, count) => sum + count, 0);
    const most = puzzle.rows.find(({ name }) => answer.tokens[name] > puzzle.limit);
    if (most) return [element("p", `${most.name} gets ${answer.tokens[most.name]}, but no request may get more than ${puzzle.limit} in this step.`)];
    if (total > puzzle.budget) return [element("p", `Your step has ${total} tokens; its budget is ${puzzle.budget}.`)];
    const { tokens, preempted } = puzzle.decision;
    const other = puzzle.rows.find(({ name }) => preempted.includes(name) !== answer.preempted.includes(name));
    if (other) return [element("p", `${other.name} is ${preempted.includes(other.name) ? "" : "not "}preempted: go through the running requests in order, and count the free blocks.`)];
    const wrong = puzzle.rows.find(({ name }) => (tokens[name] ?? 0) !== (answer.tokens[name] ?? 0));
    return wrong ? [element("p", `${wrong.name} gets ${tokens[wrong.name] ?? "nothing"}, where you gave it ${answer.tokens[wrong.name] ?? "nothing"}.`)] : [];
  }
}
