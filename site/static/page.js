// Hints at links into the glossary, and two things that the theme leaves out for those who read with a screen reader or
// without a mouse.

document.addEventListener("DOMContentLoaded", () => {
  hintAtTerms();
  document.querySelectorAll(".caption[role=heading]").forEach((caption) => caption.setAttribute("aria-level", "2"));
  document.querySelectorAll("pre, .table-wrapper, .mermaid, div.math").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0; // else the arrow keys cannot scroll it
  });
});

function hintAtTerms() {
  const hint = document.createElement("div");
  hint.className = "term-hint";
  hint.id = "term-hint";
  hint.setAttribute("role", "tooltip");
  hint.hidden = true;
  document.body.append(hint);
  let shown = null;
  const hide = () => (hint.hidden = true);
  const place = () => {
    if (hint.hidden) return;
    const box = shown.getBoundingClientRect();
    const above = box.top - hint.offsetHeight - 6;
    hint.style.left = `${Math.max(8, Math.min(box.left, innerWidth - hint.offsetWidth - 12))}px`;
    hint.style.top = `${above > 0 ? above : box.bottom + 6}px`;
  };
  for (const link of document.querySelectorAll('article a[href*="GLOSSARY.html#"]')) {
    const words = window.glossary[decodeURIComponent(link.hash.slice(1))];
    if (!words) continue;
    const show = () => {
      hint.textContent = words;
      hint.hidden = false;
      shown = link;
      place();
    };
    link.setAttribute("aria-describedby", hint.id);
    link.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show());
    link.addEventListener("focus", show);
    link.addEventListener("pointerleave", hide);
    link.addEventListener("blur", hide);
  }
  addEventListener("scroll", place, { passive: true }); // a link that is focused by keys is scrolled into view
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
}
