// Play the recorded rounds of `make predict`: who gets how many tokens in the scheduler's next step, and who is preempted?
// `tools/build_site.py` adds what starts it in a page of the site, `widgets/predict.py` in a notebook, and `page.py` in a page of its own.

const element = (name, text, attributes = {}) => {
  const made = Object.assign(document.createElement(name), attributes);
  made.textContent = text ?? "";
  return made;
};
const key = ({ tokens, preempted }) => JSON.stringify([Object.entries(tokens).sort(), [...preempted].sort()]);

class Game {
  constructor(root, levels, rules) {
    Object.assign(this, { root, levels, rules });
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
    Object.assign(this, { level, number: 0, right: [0, 0] });
    this.ask();
  }

  ask() {
    this.tries = 0;
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
      this.reply(puzzle, this.answer(form), form, reply);
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

  // A wrong answer is told its rule and may be changed once; then, or when asked, vLLM's decision is shown.
  reply(puzzle, answer, form, place) {
    const right = key(answer) === key(puzzle.decision);
    this.tries += 1;
    if (right) this.right[this.tries - 1] += 1;
    const said = right ? [] : diagnose(puzzle, answer).map((missed, index) => this.correction(missed, index));
    if (right || this.tries === 2) return this.show(puzzle, form, place, right, said);
    const show = element("button", "Show the answer", { type: "button" });
    show.addEventListener("click", () => this.show(puzzle, form, place, false, said));
    place.replaceChildren(...said, element("p", "You have a second try."), show);
  }

  correction({ says, rule }, index) {
    const { says: right, lesson, link } = this.rules[rule];
    const line = element("p", `${index ? "Or: " : ""}${says} ${right} (lesson ${lesson}; `, { className: "wrong" });
    line.append(element("a", "vLLM's lines", { href: link }), ")");
    return line;
  }

  show(puzzle, form, place, right, said) {
    form.querySelectorAll("input, button").forEach((control) => (control.disabled = true));
    const { tokens, preempted } = puzzle.decision;
    const told = [...Object.entries(tokens).map((pair) => pair.join(" ")), ...preempted.map((name) => `${name} is preempted`)];
    const verdict = right ? "Right." : `vLLM decided: ${told.join(", ") || "nobody gets a token"}.`;
    const why = element("details");
    const sentences = puzzle.reasons.map((reason) => reason.says).filter(Boolean);
    why.append(element("summary", "Why, request by request"), ...sentences.map((words) => element("p", words)), element("p", `(${puzzle.source})`));
    place.replaceChildren(element("p", verdict, { className: right ? "right" : "wrong" }), ...said, why);
    const { rounds } = this.levels[this.level];
    if (this.number + 1 === rounds.length) {
      const second = this.right[1] ? `, ${this.right[1]} more at the second try` : "";
      place.append(element("p", `${this.right[0]} of ${rounds.length} right${second}.`, { className: "predict-score" }));
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
}

// What is wrong with an answer, with the rule that it missed: the one or two wrong rules that give it, or else the first thing that does not fit.
function diagnose(puzzle, answer) {
  const missed = puzzle.mistakes.filter((mistake) => key(mistake) === key(answer));
  if (missed.length) return missed.filter(({ rule }, index) => missed.findIndex((other) => other.rule === rule) === index).slice(0, 2);
  return [impossible(puzzle, answer) ?? firstDifference(puzzle, answer)];
}

const countOf = (number, thing) => `${number} ${thing}${number === 1 ? "" : "s"}`;

function impossible({ rows, budget, limit, seats }, { tokens, preempted }) {
  for (const { name, lacks } of rows) {
    if (tokens[name] > lacks) return { says: `${name} lacks ${countOf(lacks, "token")}, so it cannot get ${tokens[name]}.`, rule: "all it lacks" };
    if (limit < budget && tokens[name] > limit) return { says: `${name} gets ${tokens[name]}, but no request may get more than ${limit} here.`, rule: "chunk limit" };
  }
  const total = Object.values(tokens).reduce((sum, count) => sum + count, 0);
  if (total > budget) return { says: `Your step has ${total} tokens, but its budget is ${budget}.`, rule: "budget" };
  const runs = rows.filter(({ name, runs }) => (runs ? !preempted.includes(name) : name in tokens)).length;
  return runs > seats ? { says: `After your step ${runs} requests run, but there are ${countOf(seats, "seat")}.`, rule: "seats" } : undefined;
}

function firstDifference({ reasons, decision }, answer) {
  for (const { name, rule } of reasons) {
    const [yours, right] = [answer, decision].map(({ preempted }) => preempted.includes(name));
    if (yours && !right) return { says: `Look at ${name}: you preempt it.`, rule: decision.preempted.length ? "victim" : "blocks" };
    if (right && !yours) {
      const onlyFewer = answer.preempted.every((other) => decision.preempted.includes(other));
      return { says: `Look at ${name}: you do not preempt it.`, rule: onlyFewer ? "preemption" : rule };
    }
    const count = answer.tokens[name] ?? 0;
    if (count !== (decision.tokens[name] ?? 0)) return { says: `Look at ${name}: you give it ${count || "nothing"}.`, rule };
  }
}
