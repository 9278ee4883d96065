// What the pages do beside reading: widgets from their tables, and hints at links into the glossary.

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".lesson-widget").forEach(mountWidget);
  hintAtTerms();
});

function mountWidget(place) {
  const { views, pieces, ...table } = window.widgetTables[place.dataset.table];
  const keyed = views.map((view) => [
    JSON.stringify(table.axes.map((name) => view.values[name])),
    { ...view, svg: view.svg.map((index) => pieces[index]).join("") },
  ]);
  place.replaceChildren();
  window.lessonWidgets.mount(place, window.lessonWidgets.tableHost({ ...table, views: Object.fromEntries(keyed) }));
}

function hintAtTerms() {
  const hint = document.createElement("div");
  hint.className = "term-hint";
  hint.id = "term-hint";
  hint.setAttribute("role", "tooltip");
  hint.hidden = true;
  document.body.append(hint);
  const hide = () => (hint.hidden = true);
  for (const link of document.querySelectorAll('article a[href*="GLOSSARY.html#"]')) {
    const words = window.glossary[decodeURIComponent(link.hash.slice(1))];
    if (!words) continue;
    const show = () => {
      hint.textContent = words;
      hint.hidden = false;
      const box = link.getBoundingClientRect();
      const above = box.top - hint.offsetHeight - 6;
      hint.style.left = `${Math.max(8, Math.min(box.left, innerWidth - hint.offsetWidth - 12))}px`;
      hint.style.top = `${above > 0 ? above : box.bottom + 6}px`;
    };
    link.setAttribute("aria-describedby", hint.id);
    link.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show());
    link.addEventListener("focus", show);
    link.addEventListener("pointerleave", hide);
    link.addEventListener("blur", hide);
  }
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
}
