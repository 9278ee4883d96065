// For a room: bets and polls one by one on the whole screen, with a timer and the answer; and a test that checks itself.

document.addEventListener("DOMContentLoaded", () => {
  const shown = [...bets(), ...polls()];
  if (shown.length) new Presenter(shown);
  document.querySelectorAll(".quiz").forEach(checkItself);
});

const made = (name, text, attributes = {}) => Object.assign(document.createElement(name), { textContent: text ?? "" }, attributes);

// A copy without ids, which must stay unique.
function copied(node) {
  const copy = node.cloneNode(true);
  for (const element of [copy, ...copy.querySelectorAll("[id]")]) element.removeAttribute("id");
  return copy;
}

// The bets of a lesson: the one of the first screen with all that stands above it, then those folded under "Bet: …".
function bets() {
  return [...document.querySelectorAll("article details")].flatMap((fold) => {
    const says = fold.querySelector("summary")?.textContent.trim() ?? "";
    const answer = [...fold.children].filter(({ localName }) => localName !== "summary").map(copied);
    if (says === "The reveal") return [{ asked: above(fold), answer }];
    return says.startsWith("Bet:") ? [{ asked: [made("p", says.slice(4).trim())], answer }] : [];
  });
}

// What stands above a fold, up to the line that tells the minutes.
function above(fold) {
  const asked = [];
  for (let node = fold.previousElementSibling; node && !node.textContent.startsWith("Time:"); node = node.previousElementSibling) asked.unshift(copied(node));
  return asked;
}

// The polls of a guide: a heading "Poll 1 · …", and a table of answers whose last column is the reason.
function polls() {
  return [...document.querySelectorAll("article h3")].flatMap((heading) => {
    const table = heading.parentElement.querySelector("table");
    if (!/^Poll \d/.test(heading.textContent) || !table) return [];
    const bare = copied(table);
    bare.querySelectorAll("th:last-child, td:last-child").forEach((cell) => cell.remove());
    bare.querySelectorAll("strong").forEach((mark) => mark.replaceWith(...mark.childNodes));
    const words = copied(heading);
    words.querySelectorAll(".headerlink").forEach((link) => link.remove());
    return [{ asked: [made("p", words.textContent.replace(/^Poll \d+ · /, "")), bare], answer: [copied(table)], instead: bare }];
  });
}

class Presenter {
  constructor(shown) {
    this.shown = shown;
    this.dialog = made("dialog", "", { className: "present" });
    this.stage = made("div", "", { className: "present-stage" });
    this.clock = made("output", "", { className: "present-clock" });
    this.buttons = Object.fromEntries(
      [
        ["Back", () => this.show(this.at - 1)],
        ["30 s", () => this.time(30)],
        ["60 s", () => this.time(60)],
        ["Reveal", () => this.reveal()],
        ["Next", () => this.show(this.at + 1)],
        ["Close", () => this.dialog.close()],
      ].map(([name, act]) => [name, this.button(name, act)]),
    );
    const bar = made("p", "", { className: "present-bar" });
    bar.append(...Object.values(this.buttons), this.clock);
    this.dialog.append(this.stage, bar);
    document.addEventListener("keydown", ({ key }) => this.dialog.open && this.press(key)); // a disabled button loses the focus
    this.dialog.addEventListener("close", () => clearInterval(this.ticking));
    const opener = this.button(`Present ${shown.length} question${shown.length > 1 ? "s" : ""}`, () => this.open(0));
    opener.className = "present-open";
    document.body.append(this.dialog);
    document.querySelector("article h1").after(opener);
    const asked = new URLSearchParams(location.search).get("present");
    if (asked !== null) this.open((Number(asked) || 1) - 1);
  }

  button(name, act) {
    const button = made("button", name, { type: "button" });
    button.addEventListener("click", act);
    return button;
  }

  open(at) {
    this.dialog.showModal();
    this.show(at);
  }

  press(key) {
    const acts = { ArrowRight: () => this.show(this.at + 1), ArrowLeft: () => this.show(this.at - 1), r: () => this.reveal(), t: () => this.time(60), Escape: () => this.dialog.close() };
    acts[key]?.();
  }

  show(at) {
    this.at = Math.max(0, Math.min(at, this.shown.length - 1));
    clearInterval(this.ticking);
    this.clock.value = `${this.at + 1} of ${this.shown.length}`;
    this.stage.replaceChildren(...this.shown[this.at].asked);
    this.stage.scrollTop = 0;
    this.buttons.Back.disabled = this.at === 0;
    this.buttons.Next.disabled = this.at === this.shown.length - 1;
    this.buttons.Reveal.disabled = false;
  }

  reveal() {
    const { asked, answer, instead } = this.shown[this.at];
    clearInterval(this.ticking);
    this.clock.value = "";
    this.stage.replaceChildren(...asked.filter((node) => node !== instead), ...answer);
    this.buttons.Reveal.disabled = true;
    if (!instead) answer[0]?.scrollIntoView();
  }

  time(seconds) {
    clearInterval(this.ticking);
    const end = Date.now() + 1000 * seconds;
    const tick = () => {
      const left = Math.max(0, Math.ceil((end - Date.now()) / 1000));
      this.clock.value = left ? `${left} s` : "Time.";
      if (!left) clearInterval(this.ticking);
    };
    tick();
    this.ticking = setInterval(tick, 200);
  }
}

// Let the lists of a test take one answer each, and say which are right.
function checkItself(place) {
  const right = [...place.dataset.right];
  const lists = [...document.querySelectorAll("article section section ul")];
  lists.forEach((list, index) =>
    [...list.children].forEach((item, letter) => {
      const input = made("input", "", { type: "radio", name: `question-${index}`, value: "ABCD"[letter] });
      const label = made("label");
      label.append(input, ...item.childNodes);
      item.replaceChildren(label);
    }),
  );
  const says = made("p", "", { className: "quiz-says" });
  says.setAttribute("role", "status");
  const button = made("button", "How many are right?", { type: "button" });
  button.addEventListener("click", () => {
    const given = lists.map((list) => list.querySelector("input:checked")?.value);
    const wrong = right.flatMap((letter, index) => (given[index] && given[index] !== letter ? [index + 1] : []));
    const open = given.filter((letter) => !letter).length;
    const count = right.length - wrong.length - open;
    says.textContent = `${count} of ${right.length} are right.${wrong.length ? ` Look again at ${wrong.join(", ")}.` : ""}${open ? ` ${open === 1 ? "1 is" : `${open} are`} open.` : ""}`;
  });
  place.append(button, says);
}
