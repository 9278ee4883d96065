// Hints at links into the glossary, the reader's progress, and two things that the theme leaves out for those who read with
// a screen reader or without a mouse.

if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false; // it may not fetch pages to quote them

document.addEventListener("DOMContentLoaded", () => {
  hintAtTerms();
  keepProgress();
  document.querySelectorAll(".caption[role=heading]").forEach((caption) => caption.setAttribute("aria-level", "2"));
  document.querySelectorAll("pre, .table-wrapper, .mermaid, div.math").forEach((box) => resized.observe(box));
});

const resized = new ResizeObserver((boxes) => {
  for (const { target } of boxes) if (target.scrollWidth > target.clientWidth) target.tabIndex = 0; // else the arrow keys cannot scroll it
});

// Remember in this browser which lessons the reader has read to the end, and say so in the side bar.
function keepProgress() {
  const lesson = (url) => url.match(/\/lessons\/(\d\d)_\w+\.html/)?.[1];
  const links = [...document.querySelectorAll(".sidebar-tree a")].filter((link) => lesson(link.href));
  const finished = new Set((stored("finished") ?? "").split(" "));
  const show = () => {
    const done = links.filter((link) => finished.has(lesson(link.href)));
    done.filter((link) => !link.querySelector("b")).forEach((link) => link.insertAdjacentHTML("beforeend", ' <b role="img" aria-label="finished">✓</b>'));
    const caption = document.querySelector(".sidebar-tree .caption-text");
    if (done.length) caption.textContent = `Lessons · ${done.length} of ${links.length}`;
  };
  show();
  const end = document.querySelector(".next-page");
  const here = lesson(location.href);
  if (!here || !end) return;
  new IntersectionObserver((seen) => {
    if (!seen.some(({ isIntersecting }) => isIntersecting)) return;
    finished.add(here);
    stored("finished", [...finished].join(" ").trim());
    show();
  }).observe(end);
}

// What the browser keeps under this name, or nothing where it keeps nothing.
function stored(name, text) {
  try {
    if (text !== undefined) localStorage.setItem(name, text);
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

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
