// Light or dark is read off the page: JupyterLab, VS Code, Colab and a plain page all say it in their own way.

// Keeps `name` among the classes of `element` while the page is dark; `changed` is called after each look at it.
function watchTheme(element, name, changed = () => {}) {
  const look = () => {
    element.classList.toggle(name, luminanceBehind(element) < 0.4);
    changed();
  };
  const placed = new ResizeObserver(look); // JupyterLab puts the element on the page after this
  placed.observe(element);
  const observer = new MutationObserver(look);
  for (const node of [document.documentElement, document.body])
    observer.observe(node, { attributes: true, attributeFilter: ["class", "style", "theme", "data-theme", "data-jp-theme-name", "data-vscode-theme-kind"] });
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", look);
  return () => {
    placed.disconnect();
    observer.disconnect();
    scheme.removeEventListener("change", look);
  };
}

function luminanceBehind(element) {
  for (let node = element.parentElement; node; node = node.parentElement) {
    const [red, green, blue, alpha = 1] = (getComputedStyle(node).backgroundColor.match(/[\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
    if (alpha > 0.5) return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255;
  }
  return window.matchMedia("(prefers-color-scheme: dark)").matches ? 0 : 1;
}
